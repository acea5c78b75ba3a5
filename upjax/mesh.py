"""The device mesh: its axes, and how a weight or a batch lies on it.

Axes: `data` replicates parameters, `fsdp` shards them, `expert` shards the experts (and, like `fsdp`, the parameters
that are not experts). A batch is split over all three. Axes are explicit: an array's sharding is part of its type.
Without a mesh (plain single-device use) every function here leaves arrays as they are.
"""

import math
from collections.abc import Callable

import jax
from jax.experimental import mesh_utils
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "expert")
BATCH = AXES
"""The axes that the batch dim of activations is split over."""
SHARDED = ("fsdp", "expert")
"""The axes that a dim of a dense weight is split over."""


def make_mesh(data: int = 1, fsdp: int = 1, expert: int = 1, *, devices=None) -> jax.sharding.Mesh:
    """Returns a mesh of `data * fsdp * expert` devices with explicit axes, to use as `with jax.set_mesh(mesh):`.

    On TPUs the axes lie along the torus. One may take part of a dim of it (8 of 4x4x4), which `jax.make_mesh` refuses
    on all TPUs but v5e. Raises ValueError when that many devices are not there.
    """
    sizes = (data, fsdp, expert)
    devices = list(devices if devices is not None else jax.devices())
    if math.prod(sizes) > len(devices):
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} expert={expert} needs more than the {len(devices)} devices here"
        )
    laid_out = mesh_utils.create_device_mesh(sizes, devices[: math.prod(sizes)], allow_split_physical_axes=True)
    return jax.sharding.Mesh(laid_out, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))


def has_mesh() -> bool:
    """Says whether a mesh is set."""
    return not jax.sharding.get_abstract_mesh().empty


def axis_size(name: str) -> int:
    """Returns the size of a mesh axis, 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape[name] if has_mesh() else 1


def spec_of(x: jax.Array) -> P | None:
    """Returns how `x` lies on the mesh, None without a mesh: what `out_sharding=` takes."""
    return jax.typeof(x).sharding.spec if has_mesh() else None


def reshard(x: jax.Array, spec: P) -> jax.Array:
    """Returns `x` laid out as `spec`; `x` itself without a mesh."""
    return jax.sharding.reshard(x, spec) if has_mesh() else x


def replicated(x: jax.Array) -> jax.Array:
    """Returns `x` whole on every device."""
    return reshard(x, P(*[None] * x.ndim))


def batch_sharded(x: jax.Array) -> jax.Array:
    """Returns `x` with its first dim split over the whole mesh."""
    return reshard(x, P(BATCH, *[None] * (x.ndim - 1)))


def per_device(function: Callable[..., jax.Array], *, check_vma: bool = True) -> Callable[..., jax.Array]:
    """Returns what runs `function` on each device's own part of the operands; its results are split over all devices.

    A mesh of one device runs it as it is: `jax.shard_map` would sum gradients over that device alone, a copy of each.
    `check_vma` is that of `jax.shard_map`; False is for kernels that do not say how their outputs vary, and then no
    operand may be the same on several devices: its gradient would not be summed.
    """

    def run(*operands):
        if not has_mesh():
            return function(*operands)
        if jax.sharding.get_abstract_mesh().size == 1:
            return jax.tree.map(batch_sharded, function(*jax.tree.map(replicated, operands)))
        return jax.shard_map(function, out_specs=P(BATCH), check_vma=check_vma)(*operands)

    return run
