"""What a device's memory holds, from the compiler's own assignment of buffers. All bytes are of one device."""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from upjax.plan.hlo import Module

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color (\d+))?, page \d+(.*?):?$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_POSITION = re.compile(r"^    (\d+):(\S+)$", re.MULTILINE)
_RANGE = re.compile(r"^    (\S+?):(\d+)-(\d+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A place in temporary memory, and what is there while most memory is in use."""

    bytes: int
    shape: str
    name: str
    """The instruction that makes it."""
    op_name: str
    """Where in the step that comes from, "" where the compiler does not say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one device by what they are for; together they are the most that the step needs at any time.

    Temporary memory is split as it is at the instant at which most of it is in use.
    """

    parameters: int
    optimizer: int
    batch: int
    activations: int
    """What was there before the backward pass began and is kept for it: copies of weights in the compute dtype too."""
    temporaries: int
    """What lives shorter: what a layer works with, gradients, gathered weights."""
    gaps: int
    """Temporary memory that no buffer fills at that instant."""
    other: int
    """Constants, outputs that replace no input, and padding of the arguments."""
    largest_buffers: tuple[Buffer, ...]
    """The largest of the activations and temporaries."""

    @property
    def total(self) -> int:
        """The peak."""
        parts = (self.parameters, self.optimizer, self.batch, self.activations, self.temporaries, self.gaps, self.other)
        return sum(parts)


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str
    """With the place in a tuple: `while.1{5}`."""
    size: int
    offset: int
    shape: str
    first: int
    last: int
    """It lives from one position of the schedule to another."""


def read_memory(
    module: Module, assignment: str, live_ranges: str, arguments: Mapping[str, int], num_buffers: int = 8
) -> Memory:
    """Returns the split of a device's memory.

    `assignment` and `live_ranges` are the compiler's dumps of those names, `arguments` the bytes of parameters,
    optimizer and batch by their shapes.
    """
    ranges = {name: (int(first), int(last)) for name, first, last in _RANGE.findall(live_ranges)}
    total, temporary, values = _allocations(assignment, ranges)
    peak = _busiest(values)
    living = [v for v in values if v.first <= peak <= v.last]
    begin = _backward_begins(module, live_ranges)
    kept = [v for v in living if begin is not None and v.first < begin <= v.last]
    activations, in_use = _bytes(kept), _bytes(living)
    return Memory(
        **arguments,
        activations=activations,
        temporaries=in_use - activations,
        gaps=temporary - in_use,
        other=total - temporary - sum(arguments.values()),
        largest_buffers=tuple(_largest(module, living)[:num_buffers]),
    )


def _allocations(assignment: str, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int, list[_Value]]:
    """Returns the bytes of all HBM, those of temporary memory, and the values in the latter."""
    total, temporary, values, in_temporary = 0, 0, [], False
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            size, color, kind = int(allocation[1]), allocation[2], allocation[3]
            in_hbm = color is None and "thread-local" not in kind  # other colors are other memories
            in_temporary = in_hbm and "preallocated-temp" in kind
            total += size * in_hbm
            temporary += size * in_temporary
        elif in_temporary and (value := _VALUE.match(line)):
            name = value[1] if value[1].endswith("}") else value[1] + "{}"
            if name in ranges:
                values.append(_Value(name, int(value[2]), int(value[3]), value[4], *ranges[name]))
    return total, temporary, values


def _busiest(values: Sequence[_Value]) -> int:
    """Returns the position of the schedule at which the values fill the most memory."""
    length = 1 + max((v.last for v in values), default=0)
    living = collections.defaultdict(lambda: np.zeros(length, bool))
    for v in values:
        living[v.offset, v.size][v.first : v.last + 1] = True  # values that share a place are one buffer
    usage = np.zeros(length, np.int64)
    for (_, size), when in living.items():
        usage += size * when
    return int(np.argmax(usage))


def _bytes(values: Sequence[_Value]) -> int:
    return sum(size for _, size in {(v.offset, v.size) for v in values})


def _backward_begins(module: Module, live_ranges: str) -> int | None:
    """Returns the position at which the first loop of the backward pass begins, None where there is none."""
    position = {name: int(at) for at, name in _POSITION.findall(live_ranges)}
    inside = [
        position[inner.name]
        for loop, _, _ in module.executed()
        if loop.opcode == "while" and "transpose(" in loop.op_name
        for body in loop.called("body")
        for inner in module.computations[body]
        if inner.name in position
    ]
    return min(inside, default=None)


def _largest(module: Module, living: Sequence[_Value]) -> list[Buffer]:
    """Returns the buffers that the values fill, largest first."""
    buffers: dict[tuple[int, int], Buffer] = {}
    for v in living:
        known, op_name = buffers.get((v.offset, v.size)), _origin(module, v.name)
        if known is None or len(op_name) > len(known.op_name):
            shape = v.shape.partition("{")[0]
            buffers[v.offset, v.size] = Buffer(bytes=v.size, shape=shape, name=v.name, op_name=op_name)
    return sorted(buffers.values(), key=lambda buffer: -buffer.bytes)


def _origin(module: Module, name: str) -> str:
    """Returns where in the step a value comes from; what a loop carries comes from where its body makes it."""
    base, _, index = name.rstrip("}").partition("{")
    computation, instruction = module.find(base)
    loop_body = computation if instruction.opcode == "parameter" else ""
    if instruction.opcode == "while":
        (loop_body,) = instruction.called("body")
    if loop_body and index.isdecimal():
        names = {i.name: i for i in module.computations[loop_body]}
        root = next(i for i in names.values() if i.is_root)
        if root.opcode == "tuple" and int(index) < len(root.operands):
            return names[root.operands[int(index)]].op_name or instruction.op_name
    return instruction.op_name
