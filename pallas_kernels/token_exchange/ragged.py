"""The exchange by `jax.lax.ragged_all_to_all`, for TPUs: a row travels once, to the one device that needs it."""

import jax
import jax.numpy as jnp

from pallas_kernels.token_exchange.layout import of_receiver, received_starts, sent_starts


def send(rows: jax.Array, sizes_PE: jax.Array, num_received: int, axis: str) -> jax.Array:
    """Returns [num_received, D]: what the devices of the axis send to this one's experts; zeros past it."""
    me = jax.lax.axis_index(axis)
    return jax.lax.ragged_all_to_all(
        rows,
        _zeros(rows, num_received),
        sent_starts(sizes_PE)[me],
        sizes_PE[me],
        received_starts(sizes_PE)[me],
        of_receiver(sizes_PE, me),
        axis_name=axis,
    )


def give_back(received: jax.Array, sizes_PE: jax.Array, num_sent: int, axis: str) -> jax.Array:
    """Returns [num_sent, D]: the rows that `send` took away, in their old places; zeros elsewhere."""
    me = jax.lax.axis_index(axis)
    return jax.lax.ragged_all_to_all(
        received,
        _zeros(received, num_sent),
        of_receiver(received_starts(sizes_PE), me),
        of_receiver(sizes_PE, me),
        of_receiver(sent_starts(sizes_PE), me),
        sizes_PE[me],
        axis_name=axis,
    )


def _zeros(like: jax.Array, num_rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.zeros_like(like[:1]), (num_rows, like.shape[1]))
