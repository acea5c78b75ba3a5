"""The one entrance: checks the arguments and picks who computes."""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import pallas_tpu, reference, xla

Implementation = Literal["reference", "xla", "pallas_tpu"]

IMPLEMENTATIONS = {
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
    "pallas_tpu": pallas_tpu.grouped_matmul,
}
assert set(IMPLEMENTATIONS) == set(get_args(Implementation))


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"],
    group_sizes: Int[Array, "H"],
    *,
    group_offset: Int[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "M N"]:
    """Returns each run of rows of `lhs` times its own matrix of `rhs`, accumulated in float32, in the dtype of `lhs`.

    Args:
        lhs: Rows, sorted by group: the first `group_sizes[0]` belong to group 0, the next to group 1, and so on.
        rhs: One matrix a group, or a shard of them: those of the G groups from `group_offset` on.
        group_sizes: How many rows each of H >= G groups has, none or more; their sum is at most M.
        group_offset: The group of the first matrix, where `rhs` is a shard; it may be known only when the program runs.
        implementation: Who computes it. None takes the kernels where the program is compiled for a TPU and plain XLA
            elsewhere. One asked for by name runs or fails.

    Returns:
        [M, N], with zeros in the rows that have no matrix here: those past the sum of the groups and those of groups
        that are not among the G. Whatever lies in such rows of `lhs` or the cotangent reaches nothing, and their
        gradient is zero; so is that of an empty group's matrix.
    """
    _check(lhs, rhs, group_sizes, is_shard=group_offset is not None)
    operands = (lhs, rhs, group_sizes, jnp.asarray(0 if group_offset is None else group_offset, jnp.int32))
    if implementation is None:
        return _by_platform(*operands)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is one of {sorted(IMPLEMENTATIONS)} or None, got {implementation!r}")
    return IMPLEMENTATIONS[implementation](*operands)


def _check(lhs, rhs, group_sizes, is_shard: bool) -> None:
    given = f"got lhs {jax.typeof(lhs)}, rhs {jax.typeof(rhs)}, group_sizes {jax.typeof(group_sizes)}"
    if (lhs.ndim, rhs.ndim, group_sizes.ndim) != (2, 3, 1):
        raise ValueError(f"need lhs [M, K], rhs [G, K, N] and group_sizes [G], {given}")
    if lhs.shape[1] != rhs.shape[1]:
        raise ValueError(f"lhs has K = {lhs.shape[1]} columns, the matrices of rhs K = {rhs.shape[1]} rows, {given}")
    if rhs.shape[0] > group_sizes.shape[0] or (rhs.shape[0] < group_sizes.shape[0] and not is_shard):
        raise ValueError(f"rhs has {rhs.shape[0]} groups, group_sizes {group_sizes.shape[0]}, {given}")
    if 0 in (*lhs.shape, *rhs.shape):
        raise ValueError(f"every dim must be at least 1, {given}")
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"lhs and rhs need one floating dtype, {given}")
    if group_sizes.dtype != jnp.int32:
        raise ValueError(f"group_sizes must be int32, {given}")


# The platform is known when the program is lowered, which may be for a TPU while this process has none. The choice is
# made inside of the rules for value and gradient: differentiated from outside, every branch would save its residuals.
@jax.custom_vjp
def _by_platform(*operands):
    return jax.lax.platform_dependent(*operands, tpu=pallas_tpu.grouped_matmul, default=xla.grouped_matmul)


def _forward(*operands):
    return _by_platform(*operands), operands


def _backward(operands, dout):
    gradients = jax.lax.platform_dependent(
        *operands,
        dout,
        tpu=partial(_gradients, pallas_tpu.grouped_matmul),
        default=partial(_gradients, xla.grouped_matmul),
    )
    return *gradients, None, None


def _gradients(implementation, lhs, rhs, group_sizes, group_offset, dout):
    # The value that `vjp` computes on the way is not used, so the compiler drops it.
    _, vjp = jax.vjp(lambda lhs, rhs: implementation(lhs, rhs, group_sizes, group_offset), lhs, rhs)
    return vjp(dout)


_by_platform.defvjp(_forward, _backward)
