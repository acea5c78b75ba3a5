"""The collectives of a compiled step: what each moves, over which mesh axes, how often, and whether it is asynchronous.

All of this is read from the scheduled program and is the compiler's, but for the seconds, which are an estimate.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from upjax.plan.hlo import Instruction, Module
from upjax.plan.topology import Topology

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_OPCODE = re.compile(rf"({'|'.join(KINDS)})(-start)?$")
Groups = list[tuple[int, ...]]
Place = tuple[int, ...]
"""Where a device is: its chip's coordinates on the torus."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction of a step."""

    kind: str
    name: str
    axes: tuple[str, ...]
    """The mesh axes within which devices exchange."""
    group_size: int
    arrays: tuple[str, ...]
    """What is gathered, reduced or exchanged, whole."""
    bytes: int
    """Of those arrays, for one execution on one device."""
    bytes_sent: int
    """What a device sends for one execution, when a ring or a direct exchange does it."""
    count: int
    """Executions in a step: more than one within a loop."""
    asynchronous: bool
    """Whether the compiler lets other work run meanwhile."""
    op_name: str
    seconds: float = 0.0
    """Estimate, for one execution."""


def collectives(
    module: Module, mesh: Mapping[str, int], topology: Topology, places: Sequence[Place]
) -> list[Collective]:
    """Returns the step's collectives; `places` are the devices' coordinates in the order of the mesh."""
    found = []
    for of, times in _collective_instructions(module):
        groups = _groups_of(of.collective, mesh)
        made = _collective(of, times, groups, mesh)
        seconds = _seconds(made, groups[0], topology, places)
        found.append(dataclasses.replace(made, seconds=seconds))
    return found


@dataclasses.dataclass(frozen=True)
class _Found:
    """A collective instruction, and what stands around it."""

    collective: Instruction
    operands: tuple[Instruction, ...]
    asynchronous: bool
    scatters: bool
    """Whether a slice of the sum is all that is kept: how the TPU compiler writes a reduce-scatter."""
    op_name: str


def _collective_instructions(module: Module) -> Iterator[tuple[_Found, int]]:
    for outer, computation, times in module.executed():
        if _OPCODE.match(outer.opcode):
            yield _found(module, computation, outer, asynchronous=outer.opcode.endswith("-start")), times
        elif outer.opcode in ("fusion", "async-start"):
            for called in outer.called("calls"):
                for inner in module.computations[called]:
                    if _OPCODE.match(inner.opcode):
                        asynchronous = outer.opcode == "async-start" or "async_collective" in called
                        yield _found(module, called, inner, asynchronous=asynchronous, outer=outer), times


def _found(
    module: Module, computation: str, inner: Instruction, *, asynchronous: bool, outer: Instruction | None = None
) -> _Found:
    within = {i.name: i for i in module.computations[computation]}
    scatters = (
        outer is not None
        and inner.opcode == "all-reduce"
        and any(i.is_root and i.opcode == "dynamic-slice" and inner.name in i.operands for i in within.values())
    )
    operands = tuple(within[name] for name in inner.operands if name in within)
    return _Found(inner, operands, asynchronous, scatters, (outer and outer.op_name) or inner.op_name)


def _collective(found: _Found, times: int, groups: Groups, mesh: Mapping[str, int]) -> Collective:
    instruction = found.collective
    kind = "reduce-scatter" if found.scatters else instruction.opcode.removesuffix("-start")
    operands = [array for operand in found.operands for array in operand.results]
    if kind == "all-gather":
        # An all-gather-start gives back its operands too.
        whole = instruction.results[len(operands) :] if instruction.opcode.endswith("-start") else instruction.results
    elif kind == "ragged-all-to-all":
        # From a buffer into another, as much as the data says. The one with room for all that could come is not full:
        # with even routers, the smaller one is.
        whole = (min(operands[:2], key=lambda array: array.num_bytes),)
    else:
        whole = tuple(operands)
    n = max(len(group) for group in groups)
    num_bytes = sum(array.num_bytes for array in whole)
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0, "collective-broadcast": 1.0}
    return Collective(
        kind=kind,
        name=instruction.name,
        axes=axes_of(groups, mesh),
        group_size=n,
        arrays=tuple(map(str, whole)),
        bytes=num_bytes,
        bytes_sent=math.ceil(num_bytes * share.get(kind, (n - 1) / n)),
        count=times,
        asynchronous=found.asynchronous,
        op_name=found.op_name,
    )


def _groups_of(instruction: Instruction, mesh: Mapping[str, int]) -> Groups:
    pairs = re.search(r"source_target_pairs=\{([0-9,{} ]*)\}", instruction.attributes)
    if pairs:
        return [tuple(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", pairs[0])]
    text = re.search(r"replica_groups=(.*)", instruction.attributes)
    return replica_groups(text[1] if text else "{}", math.prod(mesh.values()))


def replica_groups(text: str, num_devices: int) -> Groups:
    """Returns the groups that the start of `text` writes down; NotImplementedError for a form that is not known.

    XLA has three forms: a list `{{0,1},{2,3}}` (`{}` is all devices), an iota `[2,2]<=[2,2]T(1,0)` (arange of the
    product, reshaped, transposed, reshaped) and mesh axes `mesh['a'=2,'b'=2] {'b'}`.
    """
    if listed := re.match(r"\{((?:\{[0-9, ]*\},?)*)\}", text):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([0-9][0-9, ]*)\}", listed[1])]
        return groups or [tuple(range(num_devices))]
    if iota := re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        ids = _iota(iota[3], iota[4])
        return list(map(tuple, ids.reshape(int(iota[1]), int(iota[2])).tolist()))
    if axes := re.match(r"mesh\[([^\]]*)\](?:, ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes[1])}
        named = re.findall(r"'?([^',{}\s]+)'?", axes[4])
        if sizes and set(named) <= sizes.keys():
            ids = _iota(axes[2] or str(math.prod(sizes.values())), axes[3]).reshape(*sizes.values())
            order = [*(a for a in sizes if a not in named), *named]
            size = math.prod(sizes[a] for a in named)
            return list(map(tuple, ids.transpose([list(sizes).index(a) for a in order]).reshape(-1, size).tolist()))
    raise NotImplementedError(f"replica groups in a form that is not known: {text[:120]!r}")


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    ids = np.arange(math.prod(map(int, dims.split(",")))).reshape(*map(int, dims.split(",")))
    return ids.transpose(*map(int, permutation.split(","))) if permutation else ids


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of a group differ; device numbers count along the mesh."""
    shape = tuple(mesh.values())
    differs = set()
    for group in groups:
        at = np.array(np.unravel_index(np.array(group), shape))
        differs |= {axis for axis, where in zip(mesh, at, strict=True) if len(set(where.tolist())) > 1}
    return tuple(axis for axis in mesh if axis in differs)


def _seconds(collective: Collective, group: tuple[int, ...], topology: Topology, places: Sequence[Place]) -> float:
    """Returns the estimated seconds of one execution: what has to pass over the links that its group has.

    Along each torus dim that the group spans, a device has two links where the group closes the ring and one where it
    does not (its end has no more). Devices of a group that lie `stride` apart share their links with the groups between
    them. What a ring passes on, from neighbour to neighbour, is spread over the dims. In an exchange of all with all,
    half of what one half of a dim has crosses its middle, so that n devices along it take n / 4 times the bytes of one,
    and the slowest dim counts. No latency; nothing else on the links.
    """
    at = [places[device] for device in group]
    links, crossing = 0.0, 0.0
    for dim, (size, wraps) in enumerate(zip(topology.shape, topology.wraps, strict=True)):
        seen = sorted({place[dim] for place in at})
        if len(seen) > 1:
            stride = min(b - a for a, b in itertools.pairwise(seen))
            along = (2 if wraps and len(seen) * stride == size else 1) / stride
            links += along
            crossing = max(crossing, len(seen) / 4 / along)
    if not links:  # the two devices of a chip
        return 0.0
    if collective.kind in ("all-to-all", "ragged-all-to-all"):
        return collective.bytes * crossing / topology.link_bytes_per_second
    return collective.bytes_sent / links / topology.link_bytes_per_second
