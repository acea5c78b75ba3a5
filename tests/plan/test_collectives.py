"""Collectives: replica groups against numpy, sizes and axes by hand, and the links that a group has."""

import itertools

import numpy as np
import pytest

from upjax.plan.collectives import axes_of, collectives, replica_groups
from upjax.plan.hlo import parse
from upjax.plan.topology import parse_topology

MESH = {"data": 2, "fsdp": 4, "expert": 8}
SUBSETS = [subset for n in range(1, 4) for subset in itertools.combinations(MESH, n)]


def groups_along(axes, mesh=MESH):
    """The groups of devices that differ along `axes` alone, by plain indexing."""
    ids = np.arange(np.prod(list(mesh.values()))).reshape(*mesh.values())
    found = {}
    for place in np.ndindex(ids.shape):
        fixed = tuple(p for p, axis in zip(place, mesh, strict=True) if axis not in axes)
        found.setdefault(fixed, []).append(int(ids[place]))
    return sorted(map(tuple, found.values()))


@pytest.mark.parametrize("axes", SUBSETS, ids="+".join)
def test_the_three_forms_of_groups_are_the_same_groups(axes):
    expected = groups_along(axes)
    listed = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in expected) + "}"
    kept = [i for i, axis in enumerate(MESH) if axis not in axes]
    moved = [i for i, axis in enumerate(MESH) if axis in axes]
    iota = f"[{len(expected)},{len(expected[0])}]<=[2,4,8]T({','.join(map(str, kept + moved))})"
    names = ",".join(f"'axis_{list(MESH).index(axis)}'" for axis in axes)
    named = f"mesh['axis_0'=2,'axis_1'=4,'axis_2'=8] {{{names}}}"
    for text in (listed, iota, named):
        groups = replica_groups(text + ", use_global_device_ids=true", 64)
        assert sorted(tuple(sorted(group)) for group in groups) == expected, text
        assert axes_of(groups, MESH) == axes


def test_no_groups_are_one_group_of_all():
    assert replica_groups("{}, dimensions={0}", 4) == [(0, 1, 2, 3)]


def test_groups_without_a_transpose_and_a_form_that_is_not_known():
    assert replica_groups("[2,4]<=[8]", 8) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    with pytest.raises(NotImplementedError, match="replica groups"):
        replica_groups("ring{0..7}", 8)


def test_axes_of_one_device_are_never_named():
    assert axes_of([(0, 1), (2, 3)], {"data": 1, "fsdp": 2, "expert": 2}) == ("expert",)


MODULE = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[16,8]) -> f32[4,8] {
  %input = f32[16,8]{1,0} parameter(0)
  %reduced = f32[16,8]{1,0} all-reduce(%input), channel_id=7, replica_groups={{0,1,2,3}}, to_apply=%add
  %where = s32[] constant(0)
  ROOT %part = f32[4,8]{1,0} dynamic-slice(%reduced, %where, %where), dynamic_slice_sizes={4,8}
}

%async_computation.1 (rows: bf16[4,8]) -> bf16[8,8] {
  %rows = bf16[4,8]{1,0} parameter(0)
  ROOT %inner = bf16[8,8]{1,0} all-gather(%rows), replica_groups=[2,2]<=[4], dimensions={0}
}

ENTRY %main (x: f32[16,8], y: bf16[4,8]) -> f32[4,8] {
  %x = f32[16,8]{1,0} parameter(0)
  %y = bf16[4,8]{1,0} parameter(1)
  %gathered = bf16[8,8]{1,0} all-gather(%y), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, metadata={op_name="jit(step)/gather"}
  %started = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%y), replica_groups=mesh['a'=4] {'a'}, dimensions={0}
  %finished = bf16[16,8]{1,0} all-gather-done(%started)
  %wrapped = ((bf16[4,8]{1,0}), bf16[8,8]{1,0}, u32[]) async-start(%y), calls=%async_computation.1
  %unwrapped = bf16[8,8]{1,0} async-done(%wrapped)
  %both = (f32[16,8]{1,0}, bf16[4,8]{1,0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add
  %sent = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{2,3}}
  %received = bf16[4,8]{1,0} collective-permute-done(%sent)
  %exchanged = bf16[4,8]{1,0} all-to-all(%y), replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %scattered = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(step)/scatter"}
}
"""  # noqa: E501


def test_each_collective_has_its_kind_axes_sizes_and_asynchrony():
    mesh, topology = {"data": 1, "fsdp": 2, "expert": 2}, parse_topology("v5p:2x2x1")
    places = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    found = collectives(parse(MODULE), mesh, topology, places)
    told = [(c.kind, c.axes, c.group_size, c.bytes, c.bytes_sent, c.asynchronous) for c in found]
    assert told == [
        ("all-gather", ("fsdp",), 2, 128, 64, False),
        ("all-gather", ("fsdp", "expert"), 4, 256, 192, True),
        ("all-gather", ("expert",), 2, 128, 64, True),
        ("all-reduce", ("fsdp", "expert"), 4, 576, 864, False),
        ("collective-permute", ("expert",), 2, 64, 64, True),
        ("all-to-all", ("expert",), 2, 64, 32, False),
        ("reduce-scatter", ("fsdp", "expert"), 4, 512, 384, False),
    ]
    assert found[-1].op_name == "jit(step)/scatter"
    # One hop along one dim that closes no ring: one link, 1200 GB/s / 2 directions / 6 links.
    assert found[0].seconds == pytest.approx(64 / 100e9)
    # All four chips: both dims, one link each.
    assert found[-1].seconds == pytest.approx(384 / 200e9)


def test_an_exchange_of_all_with_all_is_bound_by_the_middle_of_a_dim():
    module = parse(MODULE.replace("all-to-all(%y), replica_groups={{0,1},{2,3}}", "all-to-all(%y), replica_groups={}"))
    exchange = lambda mesh, name, places: next(
        c for c in collectives(module, mesh, parse_topology(name), places) if c.kind == "all-to-all"
    )
    four = {"data": 1, "fsdp": 1, "expert": 4}
    # A closed ring of four: each half of two sends half of its 2 x 64 bytes to the other, over two links.
    ring = exchange(four, "v5p:4x4x4", [(i, 0, 0) for i in range(4)])
    assert ring.seconds == pytest.approx(2 * 64 / 2 / 2 / 100e9)
    # 2 x 2: along each dim pairs of two halves, one link from each device to the other half.
    square = exchange(four, "v5p:2x2x1", [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)])
    assert square.seconds == pytest.approx(64 / 2 / 100e9)


def test_a_ragged_exchange_counts_what_even_routers_send():
    text = """\
HloModule m, is_scheduled=true

ENTRY %main (rows: bf16[16,8], space: bf16[64,8], sizes: s32[4]) -> bf16[64,8] {
  %rows = bf16[16,8]{1,0} parameter(0)
  %space = bf16[64,8]{1,0} parameter(1)
  %sizes = s32[4]{0} parameter(2)
  ROOT %sent = bf16[64,8]{1,0} ragged-all-to-all(%rows, %space, %sizes, %sizes, %sizes, %sizes), replica_groups={{0,1,2,3}}
}
"""  # noqa: E501
    mesh, places = {"data": 1, "fsdp": 1, "expert": 4}, [(i, 0, 0) for i in range(4)]
    (found,) = collectives(parse(text), mesh, parse_topology("v5p:4x4x4"), places)
    assert (found.kind, found.bytes, found.bytes_sent) == ("ragged-all-to-all", 16 * 8 * 2, 16 * 8 * 2 * 3 // 4)


def test_a_ring_that_closes_has_two_links_and_shared_links_count_in_part():
    module = parse(MODULE.replace("replica_groups=[2,2]<=[2,2]T(1,0)", "replica_groups={{0,1,2,3}}"))
    mesh, topology = {"data": 1, "fsdp": 1, "expert": 4}, parse_topology("v5p:4x4x4")
    ring = [(i, 0, 0) for i in range(4)]
    assert collectives(module, mesh, topology, ring)[0].seconds == pytest.approx(96 / 200e9)
    line = [(i, 0) for i in range(4)]  # 4 of the 8 along a dim of v6e, which does not close
    links = collectives(module, mesh, parse_topology("v6e:8x8"), line)[0].seconds
    assert links == pytest.approx(96 / (800e9 / 2 / 4))
    apart = [(2 * i, 0) for i in range(4)]  # every second chip: the other half shares the links
    assert collectives(module, mesh, parse_topology("v6e:8x8"), apart)[0].seconds == pytest.approx(2 * links)
