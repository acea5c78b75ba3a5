"""Rows in slots of a fixed capacity: shapes that do not depend on the routing. What finds no slot is dropped.

Dims: N rows of one device, E experts in all, C slots of an expert, P devices of the axis, L experts of one device,
D embed.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.varying import vary_together


def expert_capacity(num_rows: int, num_experts: int, capacity_factor: float) -> int:
    """Returns the slots that an expert has for the rows of one device: its even share times the factor, rounded up.

    Lepikhin et al. 2020 (GShard, section 2.2) and Fedus et al. 2021 (Switch, eq. 3), with a token's every choice a row.
    """
    return max(1, math.ceil(capacity_factor * num_rows / num_experts))


def num_dropped(group_sizes: Int[Array, "E"], capacity: int) -> Int[Array, ""]:
    """Returns how many rows find no slot."""
    return jnp.sum(jnp.maximum(group_sizes - capacity, 0))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def to_slots(rows: Float[Array, "N D"], group_sizes: Int[Array, "E"], capacity: int) -> Float[Array, "E C D"]:
    """Returns the first rows of each expert, as many as it has slots, zeros in the slots that stay empty."""
    starts = (jnp.cumsum(group_sizes) - group_sizes)[:, None]
    slot = jnp.arange(capacity)[None, :]
    taken = rows[jnp.minimum(starts + slot, rows.shape[0] - 1)]
    return jnp.where((slot < group_sizes[:, None])[:, :, None], taken, 0)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def from_slots(slots: Float[Array, "E C D"], group_sizes: Int[Array, "E"], num_rows: int) -> Float[Array, "N D"]:
    """Returns the rows that `to_slots` took, in their old places; zeros for those without a slot or an expert."""
    E, C, D = slots.shape
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(num_rows)
    expert = jnp.sum(row[:, None] >= ends[None, :], axis=1)
    within = row - jnp.append(ends - group_sizes, 0)[expert]
    found = (expert < E) & (within < C)
    index = jnp.where(found, expert * C + within, 0)
    return jnp.where(found[:, None], slots.reshape(E * C, D)[index], 0)


# Each is the other's transpose: both gather.
to_slots.defvjp(
    lambda rows, sizes, capacity: (to_slots(rows, sizes, capacity), (sizes, rows.shape[0])),
    lambda capacity, saved, g: (from_slots(g, *saved), None),
)
from_slots.defvjp(
    lambda slots, sizes, num_rows: (from_slots(slots, sizes, num_rows), (sizes, slots.shape[1])),
    lambda num_rows, saved, g: (to_slots(g, *saved), None),
)


def swap_slots(slots: Float[Array, "E C D"], axis: str) -> Float[Array, "L P*C D"]:
    """Returns the slots of this device's experts, filled by every device of the axis in turn."""
    (slots,) = vary_together(slots)
    P = jax.lax.axis_size(axis)
    E, C, D = slots.shape
    received = jax.lax.all_to_all(slots.reshape(P, E // P, C, D), axis, 0, 0, tiled=False)
    return received.transpose(1, 0, 2, 3).reshape(E // P, P * C, D)


def swap_slots_back(slots: Float[Array, "L P*C D"], axis: str) -> Float[Array, "E C D"]:
    """Returns what `swap_slots` was given, of slots such as it returns."""
    P = jax.lax.axis_size(axis)
    L, C, D = slots.shape[0], slots.shape[1] // P, slots.shape[2]
    sent = slots.reshape(L, P, C, D).transpose(1, 0, 2, 3)
    return jax.lax.all_to_all(sent, axis, 0, 0, tiled=False).reshape(L * P, C, D)
