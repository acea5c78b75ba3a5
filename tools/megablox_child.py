"""The compiling process of `upjax.plan` with JAX's megablox in place of our expert kernels, for `tools/plan_all.py`.

Our kernels are replaced where the model calls them, in this process alone. The step is otherwise the same: rows past
the last group are zeros, products are accumulated in float32 and kept in the dtype of the rows.

Dims: M rows, D embed, F hidden, E experts.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import ops

import upjax.model.dispatch
import upjax.model.moe
from pallas_kernels.expert_mlp import expert_mlp as ours
from pallas_kernels.varying import vary_together
from upjax.plan import child

TILING = (512, 1024, 1024)
"""Rows, inner and outer columns."""


def expert_mlp(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes):
    """Returns each row through its expert, as `pallas_kernels.expert_mlp` does, by three megablox products."""
    rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes = vary_together(rows_MD, gate_EDF, up_EDF, down_EFD, group_sizes)
    ops.backend.jax = _Jax(jax.typeof(rows_MD).manual_axis_type)

    def matmul(lhs, rhs):
        tiling = tuple(min(*pair) for pair in zip(TILING, (lhs.shape[0], *rhs.shape[1:]), strict=True))
        return ops.gmm(lhs, rhs.astype(lhs.dtype), group_sizes, lhs.dtype, tiling)

    hidden_MF = jax.nn.silu(matmul(rows_MD, gate_EDF)) * matmul(rows_MD, up_EDF)
    in_group_M1 = jnp.arange(rows_MD.shape[0])[:, None] < jnp.sum(group_sizes)
    return jnp.where(in_group_M1, matmul(hidden_MF, down_EFD), 0)


class _Jax:
    """JAX as megablox sees it: what its kernels return says over which mesh axes it varies, as shard_map demands."""

    def __init__(self, manual_axis_type):
        self.ShapeDtypeStruct = partial(jax.ShapeDtypeStruct, manual_axis_type=manual_axis_type)

    def __getattr__(self, name: str):
        return getattr(jax, name)


def main() -> None:
    callers = [m for m in (upjax.model.moe, upjax.model.dispatch) if getattr(m, "expert_mlp", None) is ours]
    assert callers, "the model calls expert_mlp somewhere else now"
    for module in callers:
        module.expert_mlp = expert_mlp
    child.main(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
