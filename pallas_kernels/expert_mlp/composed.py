"""The experts as three grouped matmuls with the activation between them: what TPUs run.

Dims: M rows, D embed, F hidden, E experts.
"""

from functools import partial

import jax

from pallas_kernels.expert_mlp.activation import gated, gated_gradients
from pallas_kernels.grouped_matmul import grouped_matmul


def forward(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes, *, implementation=None):
    """Returns the output [M, D] and what the backward pass needs: the gate and up products, each [M, F]."""
    matmul = partial(grouped_matmul, implementation=implementation)
    gate_MF, up_MF = matmul(rows_MD, gate_EDF, group_sizes), matmul(rows_MD, up_EDF, group_sizes)
    return matmul(gated(gate_MF, up_MF), down_EFD, group_sizes), (gate_MF, up_MF)


def backward(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes, products, d_out_MD, *, implementation=None):
    """Returns the gradients of the rows and the three weights."""
    gate_MF, up_MF = products

    def gradients(lhs, rhs, d_out):
        # The value that `vjp` computes on the way is not used, so the compiler drops it.
        return jax.vjp(lambda l, r: grouped_matmul(l, r, group_sizes, implementation=implementation), lhs, rhs)[1](d_out)

    d_hidden_MF, d_down_EFD = gradients(gated(gate_MF, up_MF), down_EFD, d_out_MD)
    d_gate_MF, d_up_MF = gated_gradients(gate_MF, up_MF, d_hidden_MF)
    d_rows_by_gate, d_gate_EDF = gradients(rows_MD, gate_EDF, d_gate_MF)
    d_rows_by_up, d_up_EDF = gradients(rows_MD, up_EDF, d_up_MF)
    return d_rows_by_gate + d_rows_by_up, d_gate_EDF, d_up_EDF, d_down_EFD
