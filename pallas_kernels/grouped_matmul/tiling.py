"""Tile sizes from the shape and the chip: those that the matrix units and the memory together are done with first."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pallas_kernels.tpu_chips import TpuChip

# Bundles beside the products, from the schedules that the compiler makes (`tools/kernel_schedule.py` prints them): of a
# grid step, of the rows that are multiplied at a time, and of a vector register (1,024 values) worked on or stored.
_PER_GRID_STEP = 250
_PER_ROW_STEP = 150
_PER_GROUP_STEP = 350
_PER_REGISTER = 0.5

_REGISTER = 1024

_LANES = 128
_ROW_TILES = (128, 256, 512, 1024, 2048)
_ROW_STEPS = (128, 256, 512, 1024)
_ROW_EDGES = (128, 256)
_MAX_PARTS = 64
_MAX_PRODUCTS = 3600
"""Instructions of one step, of 16 rows by one square of weights each: they are unrolled, and programs of many more take
minutes to compile.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tile sizes along M (rows), K and N, each the whole of its dim or a multiple of 128.

    `step` rows are multiplied at a time, and `edge` rows where a step is not all of one group: they divide each other.
    """

    m: int
    k: int
    n: int
    step: int
    edge: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsKernel:
    """What `rows_times_matrices` is called with, as far as it takes memory and time; sizes in elements."""

    m: int
    k: int
    n: int
    num_groups: int
    itemsize: int
    num_lhs: int = 1
    num_rhs: int = 1
    num_beside: int = 0
    num_results: int = 1
    summed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupsKernel:
    """What `rows_transposed_times_rows` is called with."""

    m: int
    k: int
    n: int
    num_groups: int
    itemsize: int
    result_itemsize: int


class _Needs(NamedTuple):
    """What a kernel takes."""

    vmem: int
    """Bytes of vector memory."""
    moved: int
    """Bytes to and from HBM."""
    products: float
    """Instructions of one step, of 16 rows by one square of weights each."""
    bundles: float
    """Of all grid steps."""
    parallel_tiles: int
    """For cores to share out."""


def vmem_limit(chip: TpuChip) -> int:
    """Returns the bytes of vector memory that a kernel lets the compiler use: some is not to be had."""
    return chip.vmem_bytes * 15 // 16


@functools.lru_cache(maxsize=1024)
def choose_tiling(kernel: RowsKernel | GroupsKernel, chip: TpuChip) -> Tiling:
    """Returns the tile sizes that are done first on the chip.

    Raises NotImplementedError, with the numbers, where none fits into its vector memory.
    """
    needs_of = _rows_needs if isinstance(kernel, RowsKernel) else _groups_needs
    # A quarter is left to what the compiler spills.
    budget = vmem_limit(chip) * 3 // 4
    candidates = [(tile, needs_of(tile, kernel, chip)) for tile in _candidates(kernel)]
    fitting = [(tile, needs) for tile, needs in candidates if needs.vmem <= budget and needs.products <= _MAX_PRODUCTS]
    if not fitting:
        least = min(needs.vmem for _, needs in candidates)
        raise NotImplementedError(
            f"no tiles of {kernel} fit into the vector memory of a {chip.name}: the smallest need {least:,} bytes, "
            f"{budget:,} of its {chip.vmem_bytes:,} are for tiles"
        )
    return min(fitting, key=lambda candidate: _seconds(candidate[1], chip))[0]


def _seconds(needs: _Needs, chip: TpuChip) -> float:
    cycles_per_second = chip.flops_per_second / chip.cores / (2 * chip.macs_per_cycle)
    # Cores share out the parallel tiles: with an odd number one idles.
    shared = _ceil(needs.parallel_tiles, chip.cores) / needs.parallel_tiles
    multiplying, moving = needs.bundles * shared / cycles_per_second, needs.moved / chip.hbm_bytes_per_second
    return max(multiplying, moving) + 0.05 * min(multiplying, moving)  # the one hides the other, but for its ends


def _rows_needs(tile: Tiling, kernel: RowsKernel, chip: TpuChip) -> _Needs:
    """Returns the needs of the grid (n, visit, k); a block that a grid step shares with the last is not moved."""
    tiles_k, tiles_n = _ceil(kernel.k, tile.k), _ceil(kernel.n, tile.n)
    visits = _num_visits(tile, kernel)
    num_sums = (1 if kernel.summed else kernel.num_rhs) if tiles_k > 1 else 0
    by_row = kernel.num_beside + kernel.num_results
    pipelined = (
        kernel.num_lhs * _block(tile.m, tile.k, kernel.itemsize)
        + kernel.num_rhs * _block(tile.k, tile.n, kernel.itemsize)
        + by_row * _block(tile.m, tile.n, kernel.itemsize)
    )
    lhs_rows, matrices = (kernel.m, kernel.num_groups) if tiles_k == 1 else (visits * tile.m, visits)
    elements = (
        kernel.num_lhs * tiles_n * lhs_rows * kernel.k
        + kernel.num_rhs * matrices * kernel.k * kernel.n
        + by_row * kernel.m * kernel.n
    )

    def bundles(rows: int) -> float:
        registers = (by_row - 1 + num_sums) * rows * tile.n / _REGISTER
        product = kernel.num_rhs * _cycles(rows, tile.k, tile.n, chip)
        if rows < chip.mxu_size:  # weights are pushed no faster than so few rows pass, and hide nothing else
            product, registers = 1.25 * product, 3 * registers
        return _with_overhead(product, _PER_ROW_STEP + _PER_REGISTER * registers, chip)

    return _Needs(
        # One of each block computes while the other moves; beside them the sums, and what is on its way there.
        vmem=2 * pipelined
        + num_sums * _block(tile.m, tile.n, 4)
        + (kernel.num_rhs + kernel.num_results) * _block(tile.step, tile.n, 4),
        moved=elements * kernel.itemsize,
        products=kernel.num_rhs * _products(tile.step, tile.k, tile.n, chip),
        bundles=tiles_n * tiles_k * (visits * _PER_GRID_STEP + _of_all_rows(bundles, tile, kernel)),
        parallel_tiles=tiles_n,
    )


def _groups_needs(tile: Tiling, kernel: GroupsKernel, chip: TpuChip) -> _Needs:
    """Returns the needs of the grid (k, n, visit)."""
    tiles_k, tiles_n = _ceil(kernel.k, tile.k), _ceil(kernel.n, tile.n)
    registers = tile.k * tile.n / _REGISTER
    pipelined = (_block(tile.m, tile.k, kernel.itemsize) + _block(tile.m, tile.n, kernel.itemsize)) + _block(
        tile.k, tile.n, kernel.result_itemsize
    )

    def bundles(rows: int) -> float:
        return _with_overhead(_cycles(tile.k, rows, tile.n, chip), _PER_GROUP_STEP + 0.1 * registers, chip)

    stored = kernel.num_groups * _PER_REGISTER * registers if kernel.result_itemsize < 4 else 0
    per_block = _num_visits(tile, kernel) * _PER_GRID_STEP + _of_all_rows(bundles, tile, kernel) + stored
    rows = kernel.m * (tiles_n * kernel.k + tiles_k * kernel.n) * kernel.itemsize
    return _Needs(
        # Beside the sum, the product on its way there, and a step of lhs transposed.
        vmem=2 * pipelined
        + (1 + (kernel.result_itemsize < 4)) * _block(tile.k, tile.n, 4)
        + 2 * _block(tile.step, tile.k, kernel.itemsize),
        moved=rows + kernel.num_groups * kernel.k * kernel.n * kernel.result_itemsize,
        products=_products(tile.k, tile.step, tile.n, chip),
        bundles=tiles_k * tiles_n * per_block,
        parallel_tiles=tiles_k * tiles_n,
    )


def _candidates(kernel: RowsKernel | GroupsKernel) -> Iterator[Tiling]:
    row_tiles = [tile for tile in _ROW_TILES if tile < kernel.m] or [kernel.m]
    for m, k, n in itertools.product(row_tiles, _tile_sizes(kernel.k), _tile_sizes(kernel.n)):
        for step in [step for step in _ROW_STEPS if m % step == 0] or [m]:
            for edge in [edge for edge in _ROW_EDGES if step % edge == 0] or [step]:
                yield Tiling(m=m, k=k, n=n, step=step, edge=edge)


@functools.cache
def _tile_sizes(size: int) -> list[int]:
    """Returns the whole of a dim, and multiples of 128: those that divide it, else those that cut it evenly."""
    dividing = [tile for tile in range(_LANES, size, _LANES) if size % tile == 0]
    parts = {_round_up(_ceil(size, num_parts), _LANES) for num_parts in range(2, _MAX_PARTS)}
    return [size, *sorted(dividing or (tile for tile in parts if tile < size), reverse=True)]


def _num_visits(tile: Tiling, kernel: RowsKernel | GroupsKernel) -> int:
    return _ceil(kernel.m, tile.m) + kernel.num_groups - 1


def _of_all_rows(bundles: Callable[[int], float], tile: Tiling, kernel: RowsKernel | GroupsKernel) -> float:
    """Returns the bundles of all rows, with groups that end anywhere: where one ends, a step is made of edges."""
    steps, ends = _ceil(kernel.m, tile.step), kernel.num_groups - 1
    num_edges = min(steps, ends) * (tile.step // tile.edge) + ends
    return max(0, steps - ends) * bundles(tile.step) + num_edges * bundles(tile.edge)


def _with_overhead(cycles: float, overhead: float, chip: TpuChip) -> float:
    """Returns the bundles of a product and of what stands beside it, which waits for the matrix units hide."""
    # Where a unit takes 16 cycles for a bundle's rows, or sums by itself, the products are issued in fewer bundles.
    issued = 1.0 if chip.name == "v6e" else 0.85
    return max(cycles, issued * cycles + overhead)


def _cycles(streamed: int, contracted: int, columns: int, chip: TpuChip) -> float:
    """Returns the cycles that a core's matrix units take, which work on whole squares of weights."""
    return streamed * _squares(contracted, columns, chip) * chip.mxu_size**2 / chip.macs_per_cycle


def _products(streamed: int, contracted: int, columns: int, chip: TpuChip) -> float:
    return streamed / 16 * _squares(contracted, columns, chip)


def _squares(contracted: int, columns: int, chip: TpuChip) -> int:
    return _ceil(contracted, chip.mxu_size) * _ceil(columns, chip.mxu_size)


def _block(rows: int, columns: int, itemsize: int) -> int:
    return _round_up(rows, 32 // itemsize) * _round_up(columns, _LANES) * itemsize


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def _round_up(size: int, multiple: int) -> int:
    return _ceil(size, multiple) * multiple
