"""The split of temporary memory, from dumps written by hand."""

from upjax.plan.hlo import parse
from upjax.plan.memory import read_memory

MODULE = """\
HloModule jit_step, is_scheduled=true

%back (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %at = s32[] get-tuple-element(%state), index=0
  %grad = f32[4]{0} get-tuple-element(%state), index=1
  %work = f32[4]{0} negate(%grad), metadata={op_name="jit(step)/transpose(jvp())/while/body/neg"}
  ROOT %out = (s32[], f32[4]{0}) tuple(%at, %work)
}

%less (state.1: (s32[], f32[4])) -> pred[] {
  %state.1 = (s32[], f32[4]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant(3)
  ROOT %is = pred[] compare(%counter, %bound), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %kept = f32[4]{0} exponential(%x), metadata={op_name="jit(step)/jvp()/exp"}
  %gone = f32[4]{0} negate(%x), metadata={op_name="jit(step)/jvp()/neg"}
  %zero = s32[] constant(0)
  %init = (s32[], f32[4]{0}) tuple(%zero, %gone)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%less, body=%back, metadata={op_name="jit(step)/transpose(jvp())/while"}
  %grads = f32[4]{0} get-tuple-element(%loop), index=1
  ROOT %new = f32[4]{0} multiply(%grads, %kept)
}
"""  # noqa: E501

ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 999, page 0, thread-local:
 value: <1 at @0> (size=4,offset=0): s32[]
allocation 1: size 100, page 0, parameter 0, shape |f32[4]| at ShapeIndex {}, maybe-live-out:
 value: <2 x @0> (size=100,offset=0): f32[4]{0}
allocation 2: size 8, page 0, constant:
 value: <3 zero @0> (size=8,offset=0): s32[]
allocation 3: size 5000, color 1, page 0, preallocated-temp:
 value: <4 nothing @0> (size=5000,offset=0): f32[4]{0:S(1)}
allocation 4: size 700, page 0, preallocated-temp:
 value: <5 kept @0> (size=200,offset=0): f32[4]{0}
 value: <6 gone @0> (size=300,offset=200): f32[4]{0}
 value: <7 work @0> (size=400,offset=200): f32[4]{0}
 value: <8 loop{1} (phi) @1> (size=50,offset=600): f32[4]{0}
 value: <9 grads @0> (size=50,offset=600): f32[4]{0}
"""

LIVE_RANGES = """\
HloLiveRange (max 12):
  InstructionSequence:
    0:x
    1:kept
    2:gone
    3:zero
    4:at
    5:grad
    6:work
    7:loop
    8:grads
    9:new
  BufferLiveRange:
    x{}:0-9
    kept{}:1-9
    gone{}:2-3
    work{}:6-7
    loop{1}:4-8
    grads{}:8-9
  Live ranges at 6 (peak):
    work{}: 400 bytes (cumulative: 400 bytes)
"""


def test_memory_is_split_at_its_busiest_instant():
    memory = read_memory(
        parse(MODULE), ASSIGNMENT, LIVE_RANGES, {"parameters": 60, "optimizer": 30, "batch": 2}, num_buffers=2
    )
    assert (memory.parameters, memory.optimizer, memory.batch) == (60, 30, 2)
    # At 6 the backward pass works: 200 kept from the forward pass, 400 + 50 of its own, in an allocation of 700.
    assert (memory.activations, memory.temporaries, memory.gaps) == (200, 450, 50)
    assert memory.other == 100 - 92 + 8  # padding of the arguments and a constant
    assert memory.total == 100 + 8 + 700
    told = [(b.name, b.bytes, b.op_name) for b in memory.largest_buffers]
    assert told == [
        ("work{}", 400, "jit(step)/transpose(jvp())/while/body/neg"),
        ("kept{}", 200, "jit(step)/jvp()/exp"),
    ]


def test_what_a_loop_carries_is_named_by_what_makes_it():
    memory = read_memory(parse(MODULE), ASSIGNMENT, LIVE_RANGES, {"parameters": 0, "optimizer": 0, "batch": 0})
    carried = next(b for b in memory.largest_buffers if b.bytes == 50)
    assert carried.op_name == "jit(step)/transpose(jvp())/while/body/neg"
