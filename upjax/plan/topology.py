"""A slice of TPUs by its name, such as v5p:4x4x4, and the meshes that it can carry. Needs neither TPU nor libtpu."""

import dataclasses
import math
import re
from collections.abc import Iterator

from pallas_kernels.tpu_chips import TpuChip, tpu_chips
from upjax.config import MeshConfig
from upjax.errors import InputError

_NUM_DIMS = {"v4": 3, "v5p": 3, "tpu7x": 3, "v5e": 2, "v6e": 2}
_ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}
_EXAMPLES = ("v4:2x2x1", "v5e:4x4", "v5e:16x16", "v5p:2x2x1", "v5p:4x4x4", "v6e:8x8", "tpu7x:4x4x4")
_LARGEST_PLANE = 256
"""Chips of the largest slice of a generation with a 2D torus: 16x16."""

_AVAILABLE_GIB = {"v4": 15.25, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}
"""HBM of a device that libtpu 0.0.52 lets a program use: what it names in the error where a program needs more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice: its generation and how many chips lie along each dim."""

    name: str
    """As libtpu takes it."""
    device: TpuChip
    """One JAX device; a chip of v4 and tpu7x is two of them."""
    devices_per_chip: int
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.devices_per_chip

    @property
    def hbm_bytes_per_chip(self) -> int:
        """What the chip has, as published."""
        return self.device.hbm_bytes * self.devices_per_chip

    @property
    def available_bytes_per_device(self) -> int:
        """What the compiler lets a program use of a device's HBM."""
        return int(_AVAILABLE_GIB[self.device.name] * 2**30)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dim closes to a ring.

        Slices of v4, v5p and tpu7x are made of cubes of 4x4x4, and close where all dims are multiples of 4; a dim of
        v5e or v6e closes only at the full 16 (https://cloud.google.com/tpu/docs/v4 and .../v5e).
        """
        if len(self.shape) == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return tuple(size == 16 for size in self.shape)

    @property
    def link_bytes_per_second(self) -> float:
        """What one link of a device carries in one direction."""
        return self.device.ici_bytes_per_second / 2 / self.device.ici_links


def parse_topology(name: str) -> Topology:
    """Returns the slice that a name such as `v5p:4x4x4` or `v5e:4x8` names; InputError for what is none."""
    generation, _, dims = name.strip().lower().partition(":")
    generation = _ALIASES.get(generation, generation)
    shape = tuple(int(dim) for dim in dims.split("x")) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", dims) else ()
    problems = []
    if generation not in _NUM_DIMS:
        problems.append(f"generation {generation!r} is not one of {', '.join(_NUM_DIMS)}")
    elif len(shape) != _NUM_DIMS[generation]:
        like = "4x4x4" if _NUM_DIMS[generation] == 3 else "4x4"
        problems.append(
            f"the shape of a {generation} slice has {_NUM_DIMS[generation]} dims, such as {like}, not {dims!r}"
        )
    elif len(shape) == 2 and math.prod(shape) > _LARGEST_PLANE:
        problems.append(f"a {generation} slice has at most {_LARGEST_PLANE} chips, {dims} has {math.prod(shape)}")
    elif math.prod(shape) > 1 and any(size % 2 for size in shape[:2]):
        problems.append(f"{dims} is not made of whole hosts: with more than one chip, the first two dims are even")
    if problems:
        raise InputError(f"there is no topology {name!r}; names that work: {', '.join(_EXAMPLES)}", problems)
    device = tpu_chips()[generation]
    return Topology(
        name=f"{generation}:{dims}",
        device=device,
        devices_per_chip=2 if generation in ("v4", "tpu7x") else 1,
        shape=shape,
    )


def mesh_shapes(num_devices: int) -> Iterator[MeshConfig]:
    """Yields every mesh of so many devices."""
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    for expert in divisors:
        for fsdp in divisors:
            if num_devices % (expert * fsdp) == 0:
                yield MeshConfig(data=num_devices // expert // fsdp, fsdp=fsdp, expert=expert)
