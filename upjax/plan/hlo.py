"""The text of a compiled XLA module, read into computations and instructions: only as much as planning needs."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BYTES_OF = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0,
}  # fmt: skip
"""Bytes of one element; the 8-bit floats (f8e4m3fn, ...) have names of their own and are found by their prefix."""

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")
_ARRAY = re.compile(r"([a-z]+[0-9a-z]*)\[([0-9,]*)\](\{[^}]*\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[^\s,}]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool
    """False where the layout puts it into another memory space, such as the vector memory."""

    @property
    def num_bytes(self) -> int:
        """Its elements' bytes, without what its tiles are padded by."""
        size = 1 if self.dtype.startswith("f8") else BYTES_OF[self.dtype]
        return math.ceil(math.prod(self.shape) * size)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `%name = result opcode(operands), attributes`."""

    name: str
    opcode: str
    result_text: str
    operand_text: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays of the result, those of a tuple one after the other."""
        return arrays(self.result_text)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the instructions that it takes."""
        return tuple(re.findall(r"%([^\s,(){}]+)", self.operand_text))

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from, "" where the compiler does not say."""
        return _group(r'op_name="([^"]*)"', self.attributes) or ""

    def called(self, role: str) -> tuple[str, ...]:
        """The computations that it calls in a role: calls, body, condition, to_apply, branch_computations."""
        names = [value for key, value in _CALLED.findall(self.attributes) if key == role]
        return tuple(name for value in names for name in re.findall(r"%?([^\s,{}%]+)", value))


@dataclasses.dataclass(frozen=True)
class Module:
    """A module: its computations, each a list of instructions in the order of the schedule."""

    computations: dict[str, list[Instruction]]
    entry: str

    @functools.cached_property
    def _places(self) -> dict[str, tuple[str, Instruction]]:
        return {i.name: (name, i) for name, body in self.computations.items() for i in body}

    def find(self, name: str) -> tuple[str, Instruction]:
        """Returns the instruction of that name, with the computation that it is in."""
        return self._places[name]

    def executed(self) -> Iterator[tuple[Instruction, str, int]]:
        """Yields (instruction, its computation, how often a step runs it), loops and calls entered, fusions not."""
        yield from self._run(self.entry, 1)

    def _run(self, computation: str, times: int) -> Iterator[tuple[Instruction, str, int]]:
        for instruction in self.computations[computation]:
            yield instruction, computation, times
            if instruction.opcode == "while":
                for body in instruction.called("body"):
                    yield from self._run(body, times * self.trip_count(instruction))
            elif instruction.opcode in ("call", "conditional"):
                for role in ("to_apply", "branch_computations", "calls"):
                    for called in instruction.called(role):
                        yield from self._run(called, times)

    def trip_count(self, loop: Instruction) -> int:
        """Returns how often a loop runs its body.

        The compiler's own count where it is written down, else the bound in a condition `counter < bound`: JAX's scans
        count from 0 by 1. A loop whose bound is not a constant is counted as one trip.
        """
        known = _group(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known)
        (condition,) = loop.called("condition")
        instructions = {i.name: i for i in self.computations[condition]}
        root = next(i for i in instructions.values() if i.is_root)
        bounds = [i for name in root.operands if (i := instructions.get(name)) and i.opcode == "constant"]
        if root.opcode == "compare" and "direction=LT" in root.attributes and len(bounds) == 1:
            return int(bounds[0].operand_text)
        return 1


def parse(text: str) -> Module:
    """Returns the module that the text of an HLO dump describes."""
    lines: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header and line.endswith("{"):
                current = lines.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        elif line == "}" or line.startswith("}, execution_thread="):
            current = None
        elif current and not _INSTRUCTION.match(line):
            current[-1] += line  # a string within an attribute may hold line breaks
        else:
            current.append(line)
    if not entry:
        raise ValueError("the text holds no ENTRY computation of an HLO module")
    return Module({name: [_instruction(line) for line in body] for name, body in lines.items()}, entry)


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ValueError(f"not an HLO instruction: {line[:200]!r}")
    rest = _COMMENT.sub("", line[match.end() :])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(
        match[2], rest[:opening], result, rest[opening + 1 : closing], rest[closing + 1 :], bool(match[1])
    )


def _closing(text: str, opening: int) -> int:
    """Returns where the parenthesis that opens at `opening` closes."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"a parenthesis is not closed in {text[:200]!r}")


def arrays(text: str) -> tuple[Array, ...]:
    """Returns the arrays in the text of a type."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype in BYTES_OF or dtype.startswith("f8"):
            shape = tuple(int(dim) for dim in dims.split(",") if dim)
            found.append(Array(dtype, shape, in_hbm=re.search(r"S\(\d+\)", layout) is None))
    return tuple(found)


def _group(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
