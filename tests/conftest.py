"""Eight CPU devices, strict shapes, exact matmuls: set before JAX starts, for every test."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest
from jax.experimental import topologies

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session")
def devices_of():
    """Returns the devices of a topology of TPUs that are not here, by its name, for their compiler."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TPU_SKIP_MDS_QUERY", "1")  # no metadata server
        environment.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other processes compile too
        yield lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices
