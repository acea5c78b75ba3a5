"""Tile sizes from the shape: those that multiply and move least and fit in the vector memory."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

# Of the 64 MiB that a core of v5p or TPU7x has (v5e and v6e have 128), some is left to the compiler.
VMEM_BUDGET_BYTES = 44 * 2**20

# Costs are counted in bytes of HBM traffic. While a byte moves, a v5p multiplies 166 FLOPs, a v5e 240, a v6e 560; the
# bundles around the matmul of a grid step take as long as about a quarter of a megabyte.
_FLOPS_PER_BYTE = 300
_BYTES_PER_STEP = 2**18
# What a visit costs beside its rows (pushing weights into the matrix units, reading and writing the accumulator), in
# rows: 0 to 150 in the schedules that the compiler makes for v5p and v6e.
_ROWS_PER_VISIT = 64

_LANES = 128
_ROW_TILES = (128, 256, 512, 1024)
_MAX_PARTS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tile sizes along M (rows), K and N: each the whole of its dim, or a multiple of 128."""

    m: int
    k: int
    n: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tilings:
    """The tile sizes of the product and of both of its gradients; m, k and n mean the same dims in all three."""

    forward: Tiling
    lhs_grad: Tiling
    rhs_grad: Tiling


def choose_tilings(m: int, k: int, n: int, num_groups: int, dtype, vmem_bytes: int = VMEM_BUDGET_BYTES) -> Tilings:
    """Returns the cheapest tile sizes that need no more than `vmem_bytes`."""
    itemsize = jnp.dtype(dtype).itemsize
    lhs_grad = _choose(_row_kernel, _Shape(m, n, k, num_groups, itemsize), vmem_bytes)
    return Tilings(
        forward=_choose(_row_kernel, _Shape(m, k, n, num_groups, itemsize), vmem_bytes),
        lhs_grad=Tiling(m=lhs_grad.m, k=lhs_grad.n, n=lhs_grad.k),
        rhs_grad=_choose(_group_kernel, _Shape(m, k, n, num_groups, itemsize), vmem_bytes),
    )


class _Shape(NamedTuple):
    m: int
    k: int
    n: int
    num_groups: int
    itemsize: int


class _Needs(NamedTuple):
    """What a kernel takes: bytes of vector memory, elements moved, and tiles that cores may share out."""

    vmem: int
    moved: int
    parallel_tiles: int


def _row_kernel(tile: Tiling, shape: _Shape) -> _Needs:
    """Returns the needs of [M, N] by the grid (n, visit, k); a block that a step shares with the last is not moved."""
    tiles_k, tiles_n = _ceil(shape.k, tile.k), _ceil(shape.n, tile.n)
    visits = _num_visits(tile, shape)
    lhs_rows, matrices = (shape.m, shape.num_groups) if tiles_k == 1 else (visits * tile.m, visits)
    return _Needs(
        # The accumulator, and the product on its way there.
        vmem=_pipelined(tile, shape.itemsize) + 2 * _block(tile.m, tile.n, 4),
        moved=tiles_n * lhs_rows * shape.k + matrices * shape.k * shape.n + shape.m * shape.n,
        parallel_tiles=tiles_n,
    )


def _group_kernel(tile: Tiling, shape: _Shape) -> _Needs:
    """Returns the needs of [G, K, N] by the grid (k, n, visit)."""
    tiles_k, tiles_n = _ceil(shape.k, tile.k), _ceil(shape.n, tile.n)
    masked = 2 * _block(tile.m, tile.k, shape.itemsize) + _block(tile.m, tile.n, shape.itemsize)
    return _Needs(
        # Beside accumulator and product, the operands without the rows of others, and lhs transposed.
        vmem=_pipelined(tile, shape.itemsize) + 2 * _block(tile.k, tile.n, 4) + masked,
        moved=shape.m * (tiles_n * shape.k + tiles_k * shape.n) + shape.num_groups * shape.k * shape.n,
        parallel_tiles=tiles_k * tiles_n,
    )


@functools.lru_cache(maxsize=1024)
def _choose(needs_of: Callable[[Tiling, _Shape], _Needs], shape: _Shape, vmem_bytes: int) -> Tiling:
    row_tiles = [tile for tile in _ROW_TILES if tile < shape.m] or [shape.m]
    sizes = itertools.product(row_tiles, _tile_sizes(shape.k), _tile_sizes(shape.n))
    candidates = [Tiling(m=m, k=k, n=n) for m, k, n in sizes]
    fitting = [tile for tile in candidates if needs_of(tile, shape).vmem <= vmem_bytes]
    if not fitting:
        raise ValueError(f"no tiles of {shape} fit in {vmem_bytes} bytes of vector memory")
    return min(fitting, key=lambda tile: _cost(tile, shape, needs_of(tile, shape)))


def _cost(tile: Tiling, shape: _Shape, needs: _Needs) -> float:
    visits, tiles_k, tiles_n = _num_visits(tile, shape), _ceil(shape.k, tile.k), _ceil(shape.n, tile.n)
    flops = 2 * visits * (tile.m + _ROWS_PER_VISIT) * (tiles_k * tile.k) * (tiles_n * tile.n)
    # The two cores of a v5p chip share out the parallel tiles: an odd one leaves a core idle.
    flops *= _ceil(needs.parallel_tiles, 2) * 2 / needs.parallel_tiles
    return flops / _FLOPS_PER_BYTE + needs.moved * shape.itemsize + visits * tiles_k * tiles_n * _BYTES_PER_STEP


def _tile_sizes(size: int) -> list[int]:
    """Returns the whole of a dim, and the multiples of 128 that cut it into 2, 3, ... nearly equal parts."""
    parts = {_round_up(_ceil(size, num_parts), _LANES) for num_parts in range(2, _MAX_PARTS)}
    return [size, *sorted((tile for tile in parts if tile < size), reverse=True)]


def _num_visits(tile: Tiling, shape: _Shape) -> int:
    return _ceil(shape.m, tile.m) + shape.num_groups


def _pipelined(tile: Tiling, itemsize: int) -> int:
    """Returns the bytes of both operands and the result, each twice: one computes while the other moves."""
    sides = ((tile.m, tile.k), (tile.k, tile.n), (tile.m, tile.n))
    return 2 * sum(_block(rows, columns, itemsize) for rows, columns in sides)


def _block(rows: int, columns: int, itemsize: int) -> int:
    return _round_up(rows, 32 // itemsize) * _round_up(columns, _LANES) * itemsize


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def _round_up(size: int, multiple: int) -> int:
    return _ceil(size, multiple) * multiple
