"""The experts by the Mosaic kernels for TPU, with the activation inside of them, forward and backward.

Forward: one kernel makes the gate and up products and what they are multiplied to, a second the down product. Backward:
one kernel goes back through the down product and the activation, which it makes again instead of having kept it, and
writes the gradients over the products; one sums the two ways back to the rows; three make the weights' gradients.

Dims: M rows, D embed, F hidden, E experts.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.expert_mlp.activation import gated_tile, gated_tile_gradients
from pallas_kernels.grouped_matmul.groups_kernel import rows_transposed_times_rows
from pallas_kernels.grouped_matmul.pallas_tpu import check_dtype, default_chip
from pallas_kernels.grouped_matmul.rows_kernel import rows_times_matrices
from pallas_kernels.grouped_matmul.tiling import GroupsKernel, RowsKernel, Tiling, choose_tiling
from pallas_kernels.grouped_matmul.visits import row_bounds, visits_of_groups, visits_of_rows
from pallas_kernels.row_tiles import from_bits, to_bits
from pallas_kernels.tpu_chips import TpuChip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tilings:
    """The tile sizes of each kernel; k is the dim that it sums over, but for the weights' gradients, [k, n] each."""

    gate_up: Tiling
    down: Tiling
    d_gate_up: Tiling
    d_rows: Tiling
    d_gate: Tiling
    d_down: Tiling


def choose_tilings(M: int, D: int, F: int, E: int, dtype, weight_dtype, chip: TpuChip) -> Tilings:
    """Returns the tile sizes that are done first on the chip."""
    size, weight_size = jnp.dtype(dtype).itemsize, jnp.dtype(weight_dtype).itemsize
    of_rows = partial(RowsKernel, m=M, num_groups=E, itemsize=size)
    of_groups = partial(GroupsKernel, m=M, num_groups=E, itemsize=size, result_itemsize=weight_size)
    return Tilings(
        gate_up=choose_tiling(of_rows(k=D, n=F, num_rhs=2, num_results=3), chip),
        down=choose_tiling(of_rows(k=F, n=D), chip),
        d_gate_up=choose_tiling(of_rows(k=D, n=F, num_beside=2, num_results=3), chip),
        d_rows=choose_tiling(of_rows(k=F, n=D, num_lhs=2, num_rhs=2, summed=True), chip),
        d_gate=choose_tiling(of_groups(k=D, n=F), chip),
        d_down=choose_tiling(of_groups(k=F, n=D), chip),
    )


def forward(
    rows_MD,
    gate_EDF,
    up_EDF,
    down_EFD,
    group_sizes,
    *,
    tilings: Tilings | None = None,
    chip: TpuChip | None = None,
    interpret: Any = False,
):
    """Returns the output [M, D] and what the backward pass needs: the gate and up products, each [M, F], as bits.

    The products of rows past the groups are left as they come.
    """
    check_dtype(rows_MD)
    (M, D), (E, _, F), dtype = rows_MD.shape, gate_EDF.shape, rows_MD.dtype
    chip = chip or default_chip()
    tilings = tilings or choose_tilings(M, D, F, E, dtype, gate_EDF.dtype, chip)
    gate_EDF, up_EDF, down_EFD = (w.astype(dtype) for w in (gate_EDF, up_EDF, down_EFD))
    starts = row_bounds(group_sizes, E, 0, M)
    run = partial(rows_times_matrices, chip=chip, interpret=interpret)
    gate_MF, up_MF, hidden_MF = run(
        [rows_MD],
        [gate_EDF, up_EDF],
        visits_of_rows(starts, M, tilings.gate_up.m, others=False),
        tile=tilings.gate_up,
        name="expert_mlp_gate_up",
        epilogue=lambda gate, up: (gate, up, gated_tile(*_rounded(dtype, gate, up))),
        num_results=3,
    )
    visits = visits_of_rows(starts, M, tilings.down.m)
    (out_MD,) = run([hidden_MF], [down_EFD], visits, tile=tilings.down, name="expert_mlp_down")
    return out_MD, (to_bits(gate_MF), to_bits(up_MF))


def backward(
    rows_MD,
    gate_EDF,
    up_EDF,
    down_EFD,
    group_sizes,
    products,
    d_out_MD,
    *,
    tilings: Tilings | None = None,
    chip: TpuChip | None = None,
    interpret: Any = False,
):
    """Returns the gradients of the rows and, in the dtype of the weights, of the three weights."""
    check_dtype(rows_MD)
    (M, D), (E, _, F), dtype, weight_dtype = rows_MD.shape, gate_EDF.shape, rows_MD.dtype, gate_EDF.dtype
    chip = chip or default_chip()
    tilings = tilings or choose_tilings(M, D, F, E, dtype, weight_dtype, chip)
    gate_EDF, up_EDF, down_EFD = (w.astype(dtype) for w in (gate_EDF, up_EDF, down_EFD))
    starts = row_bounds(group_sizes, E, 0, M)
    by_row = partial(rows_times_matrices, transpose_rhs=True, chip=chip, interpret=interpret)
    d_gate_MF, d_up_MF, hidden_MF = by_row(
        [d_out_MD],
        [down_EFD],
        visits_of_rows(starts, M, tilings.d_gate_up.m, others=False),
        tile=tilings.d_gate_up,
        name="expert_mlp_gate_up_grad",
        beside=[from_bits(product) for product in products],
        epilogue=gated_tile_gradients,
        num_results=3,
        aliases={0: 0, 1: 1},
    )
    (d_rows_MD,) = by_row(
        [d_gate_MF, d_up_MF],
        [gate_EDF, up_EDF],
        visits_of_rows(starts, M, tilings.d_rows.m),
        tile=tilings.d_rows,
        name="expert_mlp_rows_grad",
        summed=True,
    )

    def weight_gradient(name: str, lhs, rhs, tile: Tiling):
        visits = visits_of_groups(starts, M, tile.m)
        return rows_transposed_times_rows(
            lhs, rhs, visits, tile=tile, chip=chip, dtype=weight_dtype, name=name, interpret=interpret
        )

    return (
        d_rows_MD,
        weight_gradient("expert_mlp_gate_weights_grad", rows_MD, d_gate_MF, tilings.d_gate),
        weight_gradient("expert_mlp_up_weights_grad", rows_MD, d_up_MF, tilings.d_gate),
        weight_gradient("expert_mlp_down_weights_grad", hidden_MF, d_out_MD, tilings.d_down),
    )


def _rounded(dtype, *products: jax.Array) -> list[jax.Array]:
    """Returns the products as they are kept for the backward pass: that one is then of the very forward pass."""
    return [product.astype(dtype).astype(jnp.float32) for product in products]
