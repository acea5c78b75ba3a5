"""The exchange by gathers, where there is no ragged all-to-all: every device gets all rows and keeps those for it."""

import jax
import jax.numpy as jnp

from pallas_kernels.token_exchange.layout import received_starts, sent_starts


def send(rows: jax.Array, sizes_PE: jax.Array, num_received: int, axis: str) -> jax.Array:
    """Returns what `ragged.send` does."""
    P, E = sizes_PE.shape
    mine = jax.lax.axis_index(axis) * (E // P) + jnp.arange(E // P)
    return _place(
        rows, sizes_PE[:, mine], sent_starts(sizes_PE)[:, mine], received_starts(sizes_PE)[:, mine], num_received, axis
    )


def give_back(received: jax.Array, sizes_PE: jax.Array, num_sent: int, axis: str) -> jax.Array:
    """Returns what `ragged.give_back` does."""
    P, E = sizes_PE.shape
    me = jax.lax.axis_index(axis)
    by_holder = lambda x_PE: x_PE[me].reshape(P, E // P)
    return _place(
        received,
        by_holder(sizes_PE),
        by_holder(received_starts(sizes_PE)),
        by_holder(sent_starts(sizes_PE)),
        num_sent,
        axis,
    )


def _place(rows, sizes, starts, places, num_rows: int, axis: str) -> jax.Array:
    """Returns [num_rows, D] of runs of rows: run i of device p is `sizes[p, i]` rows from `starts[p, i]` on."""
    everyones = jax.lax.all_gather(rows, axis, tiled=True)
    first = (jnp.arange(sizes.shape[0])[:, None] * rows.shape[0] + starts).reshape(-1)
    place, size = places.reshape(-1), sizes.reshape(-1)
    row = jnp.arange(num_rows)[:, None]
    inside = (row >= place[None, :]) & (row < (place + size)[None, :])
    source = jnp.sum(jnp.where(inside, first[None, :] + row - place[None, :], 0), axis=1)
    return jnp.where(jnp.any(inside, axis=1)[:, None], everyones[source], 0)
