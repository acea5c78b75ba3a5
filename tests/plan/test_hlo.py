"""The reading of HLO text: loops, fusions, tuples, comments, attributes over several lines."""

import pytest

from upjax.plan.hlo import arrays, parse
from upjax.plan.traffic import hbm_bytes

MODULE = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "step.py"

%body (state: (s32[], f32[4,8,128])) -> (s32[], f32[4,8,128]) {
  %state = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%state), index=0
  %stack = f32[4,8,128]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %row = f32[1,8,128]{2,1,0:T(8,128)} fusion(%stack, %at), kind=kLoop, calls=%slice_row, metadata={op_name="jit(step)/while/body/row" stack_frame_id=3}
  %near = f32[1,8,128]{2,1,0:T(8,128)S(1)} copy(%row)
  %kernel = f32[1,8,128]{2,1,0:T(8,128)} custom-call(%near), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
  "note":"}"}}, metadata={op_name="jit(step)/while/body/kernel"}, backend_config={"cost_estimate":{"flops":"7","bytes_accessed":"10000"}}
  %new = f32[4,8,128]{2,1,0:T(8,128)} fusion(%stack, %kernel, %at), kind=kLoop, calls=%write_row
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%at, %one)
  ROOT %out = (s32[]{:T(128)}, /*index=1*/f32[4,8,128]{2,1,0:T(8,128)}) tuple(%next, %new)
}, execution_thread="main"

%slice_row (p0: f32[4,8,128], p1: s32[]) -> f32[1,8,128] {
  %p0 = f32[4,8,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %sliced = f32[1,8,128]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,128}
}

%write_row (q0: f32[4,8,128], q1: f32[1,8,128], q2: s32[]) -> f32[4,8,128] {
  %q0 = f32[4,8,128]{2,1,0} parameter(0)
  %q1 = f32[1,8,128]{2,1,0} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %updated = f32[4,8,128]{2,1,0} dynamic-update-slice(%q0, %q1, %q2, %none, %none)
}

%condition (state.1: (s32[], f32[4,8,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %bound = s32[]{:T(128)} constant(4)
  ROOT %less = pred[]{:T(512)} compare(%counter, %bound), direction=LT
}

ENTRY %main (x: f32[4,8,128]) -> f32[4,8,128] {
  %x = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %start = s32[]{:T(128)} constant(0)
  %init = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}) tuple(%start, %x)
  %loop = (s32[]{:T(128)}, f32[4,8,128]{2,1,0:T(8,128)}) while(%init), condition=%condition, body=%body, metadata={op_name="jit(step)/while"}
  ROOT %done = f32[4,8,128]{2,1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_what_runs_is_counted_as_often_as_its_loop_runs():
    module = parse(MODULE)
    assert module.entry == "main"
    times = {instruction.name: n for instruction, _, n in module.executed()}
    assert (times["x"], times["loop"], times["kernel"], times["next"]) == (1, 1, 4, 4)
    assert "sliced" not in times  # a fusion is one instruction


def test_the_compilers_own_trip_count_comes_first():
    known = MODULE.replace(
        'body=%body, metadata={op_name="jit(step)/while"}', 'body=%body, backend_config={"known_trip_count":{"n":"9"}}'
    )
    module = parse(known)
    assert module.trip_count(module.find("loop")[1]) == 9


def test_attributes_over_several_lines_and_comments_are_read():
    module = parse(MODULE)
    computation, kernel = module.find("kernel")
    assert computation == "body"
    assert kernel.op_name == "jit(step)/while/body/kernel"
    _, out = module.find("out")
    assert [str(array) for array in out.results] == ["s32[]", "f32[4,8,128]"]
    assert out.operands == ("next", "new")


def test_the_bytes_of_arrays_and_their_memory_space():
    near, far = arrays("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, f8e4m3fn[5]{0}, f32[])")[:2]
    assert (near.num_bytes, near.in_hbm) == (12, False)
    assert (far.num_bytes, far.in_hbm) == (5, True)


def test_traffic_counts_slices_updates_and_the_kernels_own_estimate():
    row = 8 * 128 * 4
    # A turn of the loop: a row is read and written, copied from HBM, 10,000 bytes by the kernel, a row read and written
    # in place; the counter twice. The slice's place is read twice.
    turn = 2 * row + 4 + row + 10_000 + 2 * row + 4 + 3 * 4
    assert hbm_bytes(parse(MODULE)) == 4 * turn


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule empty\n")


def test_the_experts_kernels_move_the_rows_that_even_routers_send():
    text = """\
HloModule m, is_scheduled=true

ENTRY %main (x: bf16[64,8]) -> bf16[64,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %y = bf16[64,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="experts/expert_mlp_down"}
  ROOT %z = bf16[64,8]{1,0} copy(%y)
}
"""  # noqa: E501
    both = 2 * 64 * 8 * 2
    assert hbm_bytes(parse(text)) == 2 * both
    assert hbm_bytes(parse(text), routed_rows=16) == both + both / 4
