"""Grouped matmul and both of its gradients by the Mosaic kernels for TPU."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.groups_kernel import rows_transposed_times_rows
from pallas_kernels.grouped_matmul.rows_kernel import rows_times_matrices
from pallas_kernels.grouped_matmul.tiling import GroupsKernel, RowsKernel, Tiling, choose_tiling
from pallas_kernels.grouped_matmul.visits import row_bounds, visits_of_groups, visits_of_rows
from pallas_kernels.tpu_chips import TpuChip, target_chip, tpu_chips
from pallas_kernels.varying import vary_together

DEFAULT_CHIP = "v5p"
"""What tiles are chosen for where the program does not say what it is for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tilings:
    """The tile sizes of the product and of both of its gradients; m, k and n mean the same dims in all three."""

    forward: Tiling
    lhs_grad: Tiling
    rhs_grad: Tiling


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"],
    group_sizes: Int[Array, "H"],
    group_offset: Int[Array, ""] | int = 0,
    *,
    tilings: Tilings | None = None,
    chip: TpuChip | None = None,
    interpret: Any = False,
) -> Float[Array, "M N"]:
    """Returns what `reference.grouped_matmul` does, differentiable in `lhs` and `rhs`.

    Args:
        lhs: Rows, sorted by group.
        rhs: One matrix a group, of the dtype of `lhs`: float32 or bfloat16.
        group_sizes: How many rows each group has, H >= G of them.
        group_offset: The group that the first matrix belongs to.
        tilings: Tile sizes; None chooses them by shape, dtype and chip.
        chip: What they are chosen for; None takes the chip of the mesh that is set, or of this process.
        interpret: Runs the kernels without a TPU, as `pl.pallas_call` does.
    """
    check_dtype(lhs)
    chip = chip or default_chip()
    if tilings is None:
        tilings = choose_tilings(*lhs.shape, rhs.shape[2], rhs.shape[0], lhs.dtype, chip)
    operands = vary_together(lhs, rhs, group_sizes, jnp.asarray(group_offset, jnp.int32))
    return _grouped_matmul(tilings, chip, interpret, *operands)


def default_chip() -> TpuChip:
    """Returns the chip that a program being traced is for, where it can be known, else `DEFAULT_CHIP`."""
    return target_chip() or tpu_chips()[DEFAULT_CHIP]


def check_dtype(rows: jax.Array) -> None:
    """Raises NotImplementedError for rows that the kernels can't multiply."""
    if rows.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"the TPU kernels multiply float32 or bfloat16, got {rows.dtype}")


def choose_tilings(m: int, k: int, n: int, num_groups: int, dtype, chip: TpuChip) -> Tilings:
    """Returns the tile sizes that are done first on the chip."""
    size = jnp.dtype(dtype).itemsize
    of_rows = partial(RowsKernel, m=m, num_groups=num_groups, itemsize=size)
    of_groups = GroupsKernel(m=m, k=k, n=n, num_groups=num_groups, itemsize=size, result_itemsize=size)
    lhs_grad = choose_tiling(of_rows(k=n, n=k), chip)
    return Tilings(
        forward=choose_tiling(of_rows(k=k, n=n), chip),
        lhs_grad=dataclasses.replace(lhs_grad, k=lhs_grad.n, n=lhs_grad.k),
        rhs_grad=choose_tiling(of_groups, chip),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _grouped_matmul(tilings: Tilings, chip: TpuChip, interpret, lhs, rhs, group_sizes, group_offset):
    return forward(lhs, rhs, group_sizes, group_offset, tile=tilings.forward, chip=chip, interpret=interpret)


def _forward(tilings: Tilings, chip: TpuChip, interpret, *operands):
    return _grouped_matmul(tilings, chip, interpret, *operands), operands


def _backward(tilings: Tilings, chip: TpuChip, interpret, operands, dout):
    lhs, rhs, group_sizes, group_offset = operands
    of_groups = dict(group_sizes=group_sizes, group_offset=group_offset, chip=chip, interpret=interpret)
    dlhs = lhs_grad(dout, rhs, tile=tilings.lhs_grad, **of_groups)
    drhs = rhs_grad(lhs, dout, rhs.shape[0], tile=tilings.rhs_grad, dtype=rhs.dtype, **of_groups)
    return dlhs, drhs, None, None


_grouped_matmul.defvjp(_forward, _backward)


def forward(lhs, rhs, group_sizes, group_offset=0, *, tile: Tiling, chip: TpuChip, interpret: Any = False):
    """Returns [M, N]: the rows of each group by its matrix, zeros for rows of no group."""
    starts = row_bounds(group_sizes, rhs.shape[0], group_offset, lhs.shape[0])
    visits = visits_of_rows(starts, lhs.shape[0], tile.m)
    return rows_times_matrices(
        [lhs], [rhs], visits, tile=tile, chip=chip, name="grouped_matmul_forward", interpret=interpret
    )[0]


def lhs_grad(dout, rhs, group_sizes, group_offset=0, *, tile: Tiling, chip: TpuChip, interpret: Any = False):
    """Returns [M, K]: the rows of each group by its matrix transposed, zeros for rows of no group."""
    starts = row_bounds(group_sizes, rhs.shape[0], group_offset, dout.shape[0])
    visits = visits_of_rows(starts, dout.shape[0], tile.m)
    transposed = dataclasses.replace(tile, k=tile.n, n=tile.k)
    name = "grouped_matmul_lhs_grad"
    return rows_times_matrices(
        [dout], [rhs], visits, tile=transposed, chip=chip, name=name, interpret=interpret, transpose_rhs=True
    )[0]


def rhs_grad(
    lhs,
    dout,
    num_groups: int,
    group_sizes,
    group_offset=0,
    *,
    tile: Tiling,
    chip: TpuChip,
    dtype,
    interpret: Any = False,
):
    """Returns [G, K, N] in `dtype`: each group's rows of lhs, transposed, by the same rows of dout."""
    starts = row_bounds(group_sizes, num_groups, group_offset, lhs.shape[0])
    visits = visits_of_groups(starts, lhs.shape[0], tile.m)
    return rows_transposed_times_rows(
        lhs, dout, visits, tile=tile, chip=chip, dtype=dtype, name="grouped_matmul_rhs_grad", interpret=interpret
    )
