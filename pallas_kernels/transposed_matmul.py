"""The product of two matrices over their rows, as weight gradients need it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint


def transposed_matmul(a: jax.Array, b: jax.Array, *, out_sharding=None) -> jax.Array:
    """Returns a^T @ b in float32: [..., K] and [..., N], contracted over all leading dims, give [K, N].

    On a CPU, XLA hands bfloat16 to the machine's bfloat16 units only where the left side is contracted over the dims
    that lie last in memory, so there its transpose is made for real: 3 to 5 times faster than converting to float32.
    """
    rows = tuple(range(a.ndim - 1))

    def as_it_lies(a, b):
        a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))  # contracted over several dims, XLA would transpose `a`
        return lax.dot_general(
            a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32, out_sharding=out_sharding
        )

    def transposed_first(a, b):
        a = jnp.moveaxis(a, -1, 0)
        a = with_layout_constraint(a, Layout(tuple(range(a.ndim))))
        contracted = (tuple(range(1, a.ndim)), rows)
        return lax.dot_general(
            a, b, (contracted, ((), ())), preferred_element_type=jnp.float32, out_sharding=out_sharding
        )

    if a.dtype != jnp.bfloat16:
        return as_it_lies(a, b)
    return lax.platform_dependent(a, b, cpu=transposed_first, default=as_it_lies)
