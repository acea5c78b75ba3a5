"""What a TPU generation offers: matrix units, memories, links. Kernels choose tiles by it, planners compute roofs.

All figures are of one JAX device: a chip, but for v4 (compiled for absent chips) and TPU7x, where a device is one of
the two cores of a chip. Peaks are the published ones, from https://cloud.google.com/tpu/docs/ v4, v5e, v5p, v6e and
tpu7x ("key specifications"). The page of v4 names no rate of a link: 50 GB/s each way, by https://arxiv.org/abs/2304.01433.
The matrix units and the vector memory are those of JAX's `pltpu.get_tpu_info_for_chip`.
"""

import dataclasses
import functools

import jax
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuChip:
    """One JAX device of a TPU generation."""

    name: str
    cores: int
    """TensorCores that one device joins (megacore); each has the vector memory and the matrix units below."""
    vmem_bytes: int
    """Vector memory of a core."""
    macs_per_cycle: int
    """bfloat16 multiply-adds of a core's matrix units in one cycle."""
    mxu_size: int
    """Rows and columns of one matrix unit."""
    flops_per_second: float
    """Dense bfloat16."""
    hbm_bytes: int
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    """Of all links, both directions together."""
    ici_links: int


def _chip(name: str, version, *, cores: int, share: int = 1, tflops, hbm_gib, hbm_gb_s, ici_gb_s, ici_links) -> TpuChip:
    core = pltpu.get_tpu_info_for_chip(version, 1)
    return TpuChip(
        name=name,
        cores=cores,
        vmem_bytes=core.vmem_capacity_bytes,
        # A unit of 128 x 128 takes 16 rows in 16 cycles, one of 256 x 256 in 8: the peak rates come out at real clocks.
        macs_per_cycle=core.num_mxus * core.mxu_column_size**2 * (core.mxu_column_size // 128),
        mxu_size=core.mxu_column_size,
        flops_per_second=tflops * 1e12 / share,
        hbm_bytes=hbm_gib * 2**30 // share,
        hbm_bytes_per_second=hbm_gb_s * 1e9 / share,
        ici_bytes_per_second=ici_gb_s * 1e9 / share,
        ici_links=ici_links,
    )


@functools.cache
def tpu_chips() -> dict[str, TpuChip]:
    """Returns the generations by the name that topologies give them."""
    version = pltpu.ChipVersion
    chips = (
        _chip("v4", version.TPU_V4, cores=1, share=2, tflops=275, hbm_gib=32, hbm_gb_s=1228, ici_gb_s=600, ici_links=6),
        _chip("v5e", version.TPU_V5E, cores=1, tflops=197, hbm_gib=16, hbm_gb_s=819, ici_gb_s=400, ici_links=4),
        _chip("v5p", version.TPU_V5P, cores=2, tflops=459, hbm_gib=95, hbm_gb_s=2765, ici_gb_s=1200, ici_links=6),
        _chip("v6e", version.TPU_V6E, cores=1, tflops=918, hbm_gib=32, hbm_gb_s=1638, ici_gb_s=800, ici_links=4),
        _chip(
            "tpu7x",
            version.TPU_7X,
            cores=1,
            share=2,
            tflops=2307,
            hbm_gib=192,
            hbm_gb_s=7380,
            ici_gb_s=1200,
            ici_links=6,
        ),
    )
    return {chip.name: chip for chip in chips}


_BY_DEVICE_KIND = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def chip_of(device_kind: str) -> TpuChip | None:
    """Returns the generation that calls its devices `device_kind`, None for what is no known TPU."""
    name = _BY_DEVICE_KIND.get(device_kind)
    return tpu_chips()[name] if name else None


def target_chip() -> TpuChip | None:
    """Returns the chip that a program being traced is for: that of the mesh that is set, else of this process."""
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None)
    return chip_of(abstract.device_kind if abstract is not None else jax.devices()[0].device_kind)
