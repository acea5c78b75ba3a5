"""What a grouped matmul means: each row times the matrix of its group."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul(
    lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], group_sizes: Int[Array, "H"], group_offset=0
) -> Float[Array, "M N"]:
    """Returns `lhs[row] @ rhs[group of row - group_offset]`, accumulated in float32; zeros for rows without a matrix.

    The first `group_sizes[0]` rows belong to group 0, the next `group_sizes[1]` to group 1, and so on. Rows past the
    sum, and those of groups that `rhs` has no matrix of, get zero gradient and give none, whatever lies in them.
    """
    group = jnp.sum(jnp.arange(lhs.shape[0])[:, None] >= jnp.cumsum(group_sizes)[None, :], axis=1) - group_offset
    has_matrix = ((group >= 0) & (group < rhs.shape[0]) & (group < group_sizes.shape[0] - group_offset))[:, None]
    # `where` on the way in and on the way out: the gradient multiplies both, and 0 * NaN is NaN.
    rows = jnp.where(has_matrix, lhs, 0).astype(jnp.float32)
    matrices = rhs.astype(jnp.float32)[jnp.clip(group, 0, rhs.shape[0] - 1)]
    return jnp.where(has_matrix, jnp.einsum("mk,mkn->mn", rows, matrices), 0).astype(lhs.dtype)
