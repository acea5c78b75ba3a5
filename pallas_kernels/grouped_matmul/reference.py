"""What a grouped matmul means: each row times the matrix of its group."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul(
    lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], group_sizes: Int[Array, "G"]
) -> Float[Array, "M N"]:
    """Returns `lhs[row] @ rhs[group of row]`, accumulated in float32, and zeros for rows past the sum of the groups.

    The first `group_sizes[0]` rows belong to group 0, the next `group_sizes[1]` to group 1, and so on. Rows past the
    sum get zero gradient and give none, whatever lies in them.
    """
    group = jnp.sum(jnp.arange(lhs.shape[0])[:, None] >= jnp.cumsum(group_sizes)[None, :], axis=1)
    in_a_group = (group < rhs.shape[0])[:, None]
    # `where` on the way in and on the way out: the gradient multiplies both, and 0 * NaN is NaN.
    rows = jnp.where(in_a_group, lhs, 0).astype(jnp.float32)
    matrices = rhs.astype(jnp.float32)[jnp.minimum(group, rhs.shape[0] - 1)]
    return jnp.where(in_a_group, jnp.einsum("mk,mkn->mn", rows, matrices), 0).astype(lhs.dtype)
