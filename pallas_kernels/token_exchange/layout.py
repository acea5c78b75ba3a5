"""Where rows lie before and after the exchange, from the counts that every device knows.

A device's rows are sorted by expert; experts 0 to L - 1 live on device 0 of the axis, the next L on device 1, and so
on. What a device receives is sorted by its own experts, and within one by the device that it came from: so it is in the
order that grouped matmuls take, without another permutation.

Dims: P devices of the axis, E experts in all, L experts of one device (E = P * L).
"""

import jax
import jax.numpy as jnp


def sent_starts(sizes_PE: jax.Array) -> jax.Array:
    """Returns [P, E]: at which row of its sender each expert's rows start."""
    return jnp.cumsum(sizes_PE, axis=1) - sizes_PE


def received_starts(sizes_PE: jax.Array) -> jax.Array:
    """Returns [P, E]: at which row of its receiver the rows that a device sends to an expert start."""
    P, E = sizes_PE.shape
    # By receiver, its expert, sender: the order in which rows lie at the receiver.
    by_receiver = sizes_PE.reshape(P, P, E // P).transpose(1, 2, 0).reshape(P, E)
    starts = jnp.cumsum(by_receiver, axis=1) - by_receiver
    return starts.reshape(P, E // P, P).transpose(2, 0, 1).reshape(P, E)


def of_receiver(x_PE: jax.Array, device) -> jax.Array:
    """Returns [P * L]: of what is known by sender and expert, that of one device's experts, sender by sender."""
    P, E = x_PE.shape
    return jax.lax.dynamic_slice_in_dim(x_PE, device * (E // P), E // P, axis=1).reshape(E)
