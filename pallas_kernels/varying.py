"""What kernels need inside `jax.shard_map`, where an array's type says over which mesh axes its values differ."""

import jax


def vary_together(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, each varying over every mesh axis that any of them varies over.

    A kernel's operands and results then have one type, and the gradient of an operand that was the same on all devices
    comes back summed over them, because that is the transpose of this.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    missing = [tuple(frozenset().union(*varying) - axes) for axes in varying]
    return [
        jax.lax.pcast(array, axes, to="varying") if axes else array for array, axes in zip(arrays, missing, strict=True)
    ]
