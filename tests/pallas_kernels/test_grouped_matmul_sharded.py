"""Inside `jax.shard_map` the gradients are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_ways import QUICK_COMPILE, WAYS, assert_close, by_loop
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import grouped_matmul

ROWS = P(("data", "expert"))  # tokens are spread over all devices, experts over one axis and repeated over the other
SPECS = (ROWS, P("expert"), ROWS, ROWS)
DATA, EXPERT = 2, 4
LOCAL_ROWS, LOCAL_GROUPS = 40, 3


def per_device(multiply, check_vma: bool):
    """Returns the loss and gradients of every device multiplying its own rows by its own matrices."""

    def loss(lhs, rhs, group_sizes, weights):
        local = lambda lhs, rhs, group_sizes, weights: multiply(lhs, rhs, group_sizes) * weights
        return jax.shard_map(local, in_specs=SPECS, out_specs=ROWS, check_vma=check_vma)(
            lhs, rhs, group_sizes, weights
        ).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), compiler_options=QUICK_COMPILE)


# JAX's interpreters of kernels do not follow which axes a value varies over; its compiler does, see the compile tests.
@pytest.mark.parametrize("way, check_vma", [("by_platform", True), ("pallas_tpu", False)])
def test_gradients_of_shared_matrices_are_summed_over_devices(way, check_vma):
    mesh = jax.make_mesh((DATA, EXPERT), ("data", "expert"))
    num_devices = DATA * EXPERT
    keys = jax.random.split(jax.random.key(5), 3)
    lhs = jax.random.normal(keys[0], (num_devices * LOCAL_ROWS, 64))
    rhs = jax.random.normal(keys[1], (EXPERT * LOCAL_GROUPS, 64, 48)) / 8
    weights = jax.random.normal(keys[2], (num_devices * LOCAL_ROWS, 48))
    local_sizes = jnp.array([[10, 0, 20], [0, 0, 40], [1, 2, 3], [0, 0, 0]] * DATA, jnp.int32)

    # Device d has the d-th run of rows and, by its place on the expert axis, the run of matrices d % EXPERT.
    runs = np.split(np.asarray(lhs), num_devices), np.split(np.asarray(weights), num_devices)
    matrices = np.split(np.asarray(rhs), EXPERT)
    expected_loss, expected_dlhs, expected_drhs = 0.0, [], [0.0] * EXPERT
    for device, (rows, scale) in enumerate(zip(*runs, strict=True)):
        out, dlhs, drhs = by_loop(rows, matrices[device % EXPERT], local_sizes[device], scale)
        expected_loss += np.sum(out * scale)
        expected_dlhs.append(dlhs)
        expected_drhs[device % EXPERT] = expected_drhs[device % EXPERT] + drhs
    expected = expected_loss, np.concatenate(expected_dlhs), np.concatenate(expected_drhs)

    multiply = grouped_matmul if way == "by_platform" else WAYS[way]
    with jax.set_mesh(mesh):
        arrays = (lhs, rhs, local_sizes.reshape(-1), weights)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, SPECS, strict=True)]
        loss, gradients = per_device(multiply, check_vma)(*placed)
    assert_close((loss, *gradients), expected, "float32")
