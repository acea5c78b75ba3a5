"""The one entrance: rows sent over a mesh axis to their experts and given back, inside `jax.shard_map`.

Each is the other's gradient, so neither ever scatters. No row is dropped, whatever the routing: who receives must have
room for all rows of the axis.

Dims: P devices of the axis, E experts in all, L experts of one device, D embed.
"""

from functools import partial
from typing import Literal, get_args

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.token_exchange import gathered, ragged
from pallas_kernels.token_exchange.layout import of_receiver
from pallas_kernels.varying import vary_together

Implementation = Literal["ragged", "gathered"]
IMPLEMENTATIONS = get_args(Implementation)
_MODULES = {"ragged": ragged, "gathered": gathered}


def all_group_sizes(group_sizes: Int[Array, "E"], axis: str) -> Int[Array, "P E"]:
    """Returns how many rows each device of the axis has for each expert, given those of this one."""
    return jax.lax.all_gather(group_sizes, axis)


def received_group_sizes(sizes_PE: Int[Array, "P E"], axis: str) -> Int[Array, "L"]:
    """Returns how many rows each of this device's experts gets from all devices."""
    P, E = sizes_PE.shape
    return of_receiver(sizes_PE, jax.lax.axis_index(axis)).reshape(P, E // P).sum(axis=0)


def send(
    rows: Float[Array, "N D"],
    sizes_PE: Int[Array, "P E"],
    axis: str,
    *,
    num_received: int,
    implementation: Implementation | None = None,
) -> Float[Array, "R D"]:
    """Returns the rows for this device's experts from all devices of the axis, sorted by expert, then by device.

    Args:
        rows: This device's, sorted by expert; those past the sum of its sizes go nowhere and get zero gradient.
        sizes_PE: Of `all_group_sizes`.
        axis: The mesh axis.
        num_received: R, the rows that there is room for; P * N holds any routing.
        implementation: None takes `ragged`, a ragged all-to-all, where the program is compiled for a TPU, and elsewhere
            `gathered`, which needs nothing but gathers. One asked for by name runs or fails.

    Returns:
        [R, D], zeros past the sum of `received_group_sizes`; whatever lies there in the cotangent reaches nothing.
    """
    rows, sizes_PE = vary_together(rows, sizes_PE)
    return _exchange("send", (axis, _checked(implementation), rows.shape[0], num_received), rows, sizes_PE)


def give_back(
    received: Float[Array, "R D"],
    sizes_PE: Int[Array, "P E"],
    axis: str,
    *,
    num_sent: int,
    implementation: Implementation | None = None,
) -> Float[Array, "N D"]:
    """Returns rows such as `send` gave, back on their devices and in the order that they had; zeros elsewhere."""
    received, sizes_PE = vary_together(received, sizes_PE)
    return _exchange("give_back", (axis, _checked(implementation), num_sent, received.shape[0]), received, sizes_PE)


def _checked(implementation: str | None) -> str | None:
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation is one of {sorted(IMPLEMENTATIONS)} or None, got {implementation!r}")
    return implementation


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(direction: str, settings: tuple, rows, sizes_PE):
    axis, implementation, num_sent, num_received = settings
    num_rows = num_received if direction == "send" else num_sent
    run = lambda name: lambda rows, sizes: getattr(_MODULES[name], direction)(rows, sizes, num_rows, axis)
    if implementation is None:
        return jax.lax.platform_dependent(rows, sizes_PE, tpu=run("ragged"), default=run("gathered"))
    return run(implementation)(rows, sizes_PE)


def _forward(direction: str, settings: tuple, rows, sizes_PE):
    return _exchange(direction, settings, rows, sizes_PE), sizes_PE


def _backward(direction: str, settings: tuple, sizes_PE, cotangent):
    return _exchange("give_back" if direction == "send" else "send", settings, cotangent, sizes_PE), None


_exchange.defvjp(_forward, _backward)
