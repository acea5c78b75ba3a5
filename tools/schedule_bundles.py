"""Reads the final schedule that the TPU compiler dumps for a kernel: bundles (one is issued a cycle), loops, branches.

A TPU core is a statically scheduled VLIW machine, so the listing of a kernel's loops is close to the cycles they take
when the data is in vector memory in time. It holds every branch: what runs is told apart here by structure alone.
"""

import dataclasses
import glob
import re
from pathlib import Path

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:((?:\s*>)*)\s*\{")
_COMMENT = re.compile(r"/\*.*?\*/")
_REGION = re.compile(r"(?:Start|Start/End)(?: empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel\s*(?:\([^)]*\))?\s*target = \$region(\d+)")
_ALLOCATION = re.compile(r"space=vmem, size = (0x[0-9a-f]+)")
_SPILLED = re.compile(r"vmem:\[#(allocation\d+_spill)")
_REGISTER_BYTES = 4096
_SPILL, _FILL = re.compile(r"\bvst [^;]*_spill"), re.compile(r"\bvld [^;]*_spill")


@dataclasses.dataclass(frozen=True)
class Span:
    """Bundles first to last (exclusive) that a branch skips, or that a loop repeats."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def holds(self, other: "Span") -> bool:
        return self.first <= other.first and other.last <= self.last and self != other


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's bundles: how many products each issues, and what lies in which loop and behind which branch."""

    products: tuple[int, ...]
    """`vmatmul` instructions of each bundle."""
    loops: tuple[Span, ...]
    branches: tuple[Span, ...]
    spills: int
    """Stores of vector registers to memory, and loads back, because there were too few: as listed in the loops."""
    vmem_bytes: int
    """Vector memory that the compiler gave to blocks, sums and spilled registers."""

    @property
    def grid_loop(self) -> Span:
        """The loop over the grid: the outermost one."""
        return max(self.loops, key=lambda loop: loop.size)

    def num_products(self, span: Span) -> int:
        return sum(self.products[span.first : span.last])

    def inside(self, span: Span, spans: tuple[Span, ...]) -> list[Span]:
        """Returns those of `spans` that lie in `span`, without those that lie in another of them."""
        within = [other for other in spans if span.holds(other)]
        return [s for s in within if not any(other.holds(s) for other in within)]

    def branches_with_products(self, span: Span) -> list[Span]:
        """Returns the branches in `span` that hold products and no further such branch outside of a loop in them."""
        within = [b for b in self.branches if span.holds(b) and self.num_products(b)]
        return [b for b in within if not any(b.holds(other) for other in within)]


def read_schedules(dump: Path) -> dict[str, Schedule]:
    """Returns the schedule of each kernel in a folder that the compiler dumped to, by the kernel's name."""
    schedules = {}
    for path in sorted(dump.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.+?)(?:\.\d+)?-\d+-final_bundles\.txt", path.name)
        if match and not match[1].startswith("<"):
            stem = path.name.removesuffix("final_bundles.txt").rpartition("-")[0].rpartition("-")[0]
            original = next(dump.glob(f"{glob.escape(stem)}-*-original.txt"), None)
            schedules[match[1]] = _read(path.read_text(errors="replace"), original.read_text() if original else "")
    return schedules


def _read(final: str, original: str) -> Schedule:
    bundles: list[str] = []
    depths: list[int] = []
    for line in final.splitlines():
        if match := _BUNDLE.match(line):
            bundles.append(line)
            depths.append(match[1].count(">"))
        elif bundles:
            bundles[-1] += line
    starts: dict[str, int] = {}
    for i, text in enumerate(bundles):
        for region in _REGION.findall(text):
            starts.setdefault(region, i)
    code = [_COMMENT.sub("", text) for text in bundles]
    branches = [(i, region) for i, text in enumerate(bundles) for region in _BRANCH.findall(text)]
    jumps = [(i, starts[region]) for i, region in branches if region in starts]
    looped = "".join(text for text, depth in zip(code, depths, strict=True) if depth)
    spill_slots = len(set(_SPILLED.findall(final)))
    return Schedule(
        products=tuple(len(re.findall(r"\bvmatmul", text)) for text in code),
        loops=tuple(Span(target, i + 1) for i, target in jumps if target <= i),
        branches=tuple(Span(i + 1, target) for i, target in jumps if target > i),
        spills=len(_SPILL.findall(looped)) + len(_FILL.findall(looped)),
        vmem_bytes=sum(int(size, 16) for size in _ALLOCATION.findall(original)) + spill_slots * _REGISTER_BYTES,
    )
