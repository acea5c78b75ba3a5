"""The experts as three grouped matmuls with the activation between them: what the fused ways are measured against.

Dims: M rows, D embed, F hidden, E experts.
"""

from functools import partial

import jax

from pallas_kernels.expert_mlp.activation import gated, gated_gradients
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.row_tiles import from_bits, to_bits


def forward(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes, *, implementation=None):
    """Returns the output [M, D] and what the backward pass needs: the gate and up products, each [M, F], as bits."""
    matmul = partial(grouped_matmul, implementation=implementation)
    gate_EDF, up_EDF, down_EFD = (w.astype(rows_MD.dtype) for w in (gate_EDF, up_EDF, down_EFD))
    gate_MF, up_MF = matmul(rows_MD, gate_EDF, group_sizes), matmul(rows_MD, up_EDF, group_sizes)
    return matmul(gated(gate_MF, up_MF), down_EFD, group_sizes), (to_bits(gate_MF), to_bits(up_MF))


def backward(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes, products, d_out_MD, *, implementation=None):
    """Returns the gradients of the rows and the three weights."""
    gate_MF, up_MF = (from_bits(product) for product in products)

    def gradients(lhs, rhs, d_out):
        matmul = lambda lhs, rhs: grouped_matmul(lhs, rhs.astype(lhs.dtype), group_sizes, implementation=implementation)
        return jax.vjp(matmul, lhs, rhs)[1](d_out)  # the value, computed on the way, is not used: the compiler drops it

    d_hidden_MF, d_down_EFD = gradients(gated(gate_MF, up_MF), down_EFD, d_out_MD)
    d_gate_MF, d_up_MF = gated_gradients(gate_MF, up_MF, d_hidden_MF)
    d_rows_by_gate, d_gate_EDF = gradients(rows_MD, gate_EDF, d_gate_MF)
    d_rows_by_up, d_up_EDF = gradients(rows_MD, up_EDF, d_up_MF)
    return d_rows_by_gate + d_rows_by_up, d_gate_EDF, d_up_EDF, d_down_EFD
