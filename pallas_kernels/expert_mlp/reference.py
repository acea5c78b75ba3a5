"""What the experts compute: each row through the gated MLP (SwiGLU) of its group.

Dims: M rows, D embed, F hidden, E experts.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import grouped_matmul


def expert_mlp(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes) -> jax.Array:
    """Returns down(silu(gate(row)) * up(row)) of each row's expert, [M, D]; zeros for rows past the groups.

    The three products are accumulated in float32 and kept in the dtype of the rows.
    """
    gate_EDF, up_EDF, down_EFD = (w.astype(rows_MD.dtype) for w in (gate_EDF, up_EDF, down_EFD))
    gate_MF = grouped_matmul(rows_MD, gate_EDF, group_sizes)
    up_MF = grouped_matmul(rows_MD, up_EDF, group_sizes)
    hidden_MF = (jax.nn.silu(gate_MF.astype(jnp.float32)) * up_MF.astype(jnp.float32)).astype(rows_MD.dtype)
    return grouped_matmul(hidden_MF, down_EFD, group_sizes)
