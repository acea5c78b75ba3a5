"""Says how near a kernel comes to the limits of a TPU that is not here: from the schedule that its compiler makes.

    python tools/kernel_schedule.py grouped_matmul --topology v6e:2x2 --case mixtral --against megablox
    python tools/kernel_schedule.py swiglu_experts_backward --topology v5p:2x2x1 --case qwen3 --rows 65536 --json

Compiler fact: the bundles of the loops, spilled registers, vector memory. Count: how often each loop runs for these
group sizes, and the bytes that the grid moves (block bytes, whenever a step's block is not that of the step before).
Estimate: the times. Schedule time is the bundles that run at the chip's clock, no less than its matrix units take; HBM
time the bytes at peak bandwidth; roofline efficiency the time of the FLOPs at peak over the larger of the two, kernel
by kernel. Nothing was run.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table
from schedule_bundles import Schedule, read_schedules
from schedule_kernels import KERNELS, PEERS, Program, Tiled, composed, ours, peer
from schedule_traffic import kernels

from pallas_kernels.expert_mlp.cases import REAL, Case
from pallas_kernels.grouped_matmul.cases import PATTERNS
from pallas_kernels.tpu_chips import TpuChip, chip_of

ROWS_PER_PRODUCT = 16
"""Rows of bfloat16 that one `vmatmul` takes."""


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as dump:
        # Read when the compiler is loaded, which is when the first topology is asked for.
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        report = measure(args, Path(dump))
    print(json.dumps(report)) if args.json else show(report)


def measure(args: argparse.Namespace, dump: Path) -> dict[str, Any]:
    """Returns the figures of a kernel, and under `against` those of the peers that were asked for."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices[0]
    chip = chip_of(device.device_kind)
    assert chip is not None, device.device_kind
    case = dataclasses.replace(REAL[args.case], pattern=args.groups)
    case = dataclasses.replace(case, M=args.rows or case.M)
    target = Target(case, chip, device, dump)
    program = ours(args.kernel, case, chip, args.weights)
    minimum = {"hbm_bytes_minimum": _operand_bytes(program, case)}
    report = {
        "kernel": args.kernel,
        "topology": args.topology,
        "case": dataclasses.asdict(case),
        **target.figures([(1, program)], 0),
        **minimum,
    }
    for name in args.against:
        if name == "composed":
            figures = target.figures(*composed(args.kernel, case, chip))
        else:
            figures = _best_peer(name, args.kernel, args.tiling, target)
        report.setdefault("against", {})[name] = figures | minimum
    return report


@dataclasses.dataclass(frozen=True)
class Target:
    """What is compiled for, and where the compiler dumps to."""

    case: Case
    chip: TpuChip
    device: Any
    dump: Path

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The device alone: set while a kernel is traced, it says what for."""
        return jax.sharding.Mesh([self.device], ("device",), axis_types=(jax.sharding.AxisType.Auto,))

    def figures(self, programs: list[tuple[int, Program]], bytes_between: int) -> dict[str, Any]:
        """Returns the figures of programs, each so many times, and of the bytes that pass between them."""
        parts = [part for count, program in programs for part in self._kernels(program, count)]
        bandwidth = self.chip.hbm_bytes_per_second
        flops = sum(count * program.flops for count, program in programs)
        peak = flops / self.chip.flops_per_second
        # XLA's own kernels have no grid to walk: what they move is not known, and their efficiency is one at best.
        known = all(part["hbm_bytes"] is not None for part in parts)
        bounds = [part["times"] * max(part["schedule_seconds"], part["hbm_seconds"] or 0) for part in parts]
        by_hbm = [(part["hbm_seconds"] or 0) > part["schedule_seconds"] for part in parts]
        hottest = max(parts, key=lambda part: part["schedule_seconds"])
        return {
            "loop_bundles": hottest["loop_bundles"],
            "static_mxu_efficiency": min(1.0, peak / sum(part["times"] * part["schedule_seconds"] for part in parts)),
            "hbm_bytes": sum(part["times"] * part["hbm_bytes"] for part in parts) + bytes_between if known else None,
            "roofline_efficiency": peak / (sum(bounds) + bytes_between / bandwidth),
            "bound_by": "hbm" if all(by_hbm) else "hbm and matrix units" if any(by_hbm) else "matrix units",
            "vmem_bytes": max(part["vmem_bytes"] for part in parts),
            "spills": sum(part["spills"] for part in parts),
            "flops": flops,
            "peak_seconds": peak,
            "kernels": parts,
        }

    def _kernels(self, program: Program, count: int) -> list[dict[str, Any]]:
        mesh = self.mesh.abstract_mesh
        traffic = kernels(program.function, _sizes(self.case), *program.operands, cores=self.chip.cores, mesh=mesh)
        schedules = self._compile(program)
        tiled_by_name = {tiled.name: tiled for tiled in program.tiled}
        clock = self.chip.flops_per_second / self.chip.cores / (2 * self.chip.macs_per_cycle)
        parts = []
        for kernel in traffic or [None]:
            tiled = tiled_by_name.get(kernel.name) if kernel else None
            schedule = schedules[tiled.name] if tiled else max(schedules.values(), key=lambda s: sum(s.products))
            if tiled:
                loop, cycles = _cycles_of_ours(schedule, tiled, self.case, self.chip)
            else:
                loop, cycles = _cycles_of_steps(schedule, kernel.grid if kernel else None, program.flops, self.chip)
            moved = kernel.read_bytes + kernel.written_bytes if kernel and kernel.grid else None
            parts.append(
                {
                    "name": tiled.name if tiled else program.name,
                    "times": count,
                    **loop,
                    "spills": schedule.spills,
                    "vmem_bytes": schedule.vmem_bytes,
                    "hbm_bytes": moved,
                    "schedule_seconds": cycles / clock,
                    "hbm_seconds": None if moved is None else moved / self.chip.hbm_bytes_per_second,
                    **({"tile": dataclasses.asdict(tiled.tile)} if tiled else {}),
                }
            )
        return parts

    def _compile(self, program: Program) -> dict[str, Schedule]:
        for path in self.dump.iterdir():
            path.unlink()
        on_device = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(self.mesh, jax.P()))
        operands = [on_device(x) for x in (_sizes(self.case), *program.operands)]
        with jax.set_mesh(self.mesh):
            jax.jit(program.function).trace(*operands).lower(lowering_platforms=("tpu",)).compile()
        return {name: s for name, s in read_schedules(self.dump).items() if sum(s.products)}


def _best_peer(name: str, kernel: str, tilings: Sequence[tuple[int, int, int]], target: Target) -> dict[str, Any]:
    """Returns the figures of a peer's best tiling of those asked for, or why there are none."""
    found, refused = [], []
    for tiling in tilings:
        try:
            found.append({"tiling": tiling, **target.figures(*peer(name, kernel, target.case, tiling))})
        except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
            refused.append({"tiling": tiling, "refused": " ".join(str(error).split())[:300]})
    if not found:
        return refused[0]
    best = max(found, key=lambda figures: figures["roofline_efficiency"])
    return best | {"tilings": [*({k: f[k] for k in ("tiling", "roofline_efficiency")} for f in found), *refused]}


def _cycles_of_ours(schedule: Schedule, tiled: Tiled, case: Case, chip: TpuChip) -> tuple[dict[str, Any], float]:
    """Returns a step's figures and the cycles that a core takes, by how often each of the kernel's loops runs.

    In the loop over the grid stands one over the steps of a visit, and in that the products of a step that is all of
    one group, and those of an edge in a loop of their own. All else in the grid's loop counts for every grid step.
    """
    tile, tiles_k, tiles_n = tiled.tile, -(-tiled.k // tiled.tile.k), -(-tiled.n // tiled.tile.n)
    steps = next(loop for loop in schedule.inside(schedule.grid_loop, schedule.loops) if schedule.num_products(loop))
    edges = [loop for loop in schedule.inside(steps, schedule.loops) if schedule.num_products(loop)]
    edge = edges[0] if edges else None
    wholes = [b for b in schedule.branches if steps.holds(b) and schedule.num_products(b)]
    whole = max((b for b in wholes if not (edge and b.holds(edge))), key=lambda b: b.size)
    edge_branch = max((b for b in wholes if edge and b.holds(edge)), key=lambda b: b.size)

    def products_of(rows: int) -> float:
        """Returns the cycles of the matrix units for so many rows of a tile."""
        streamed, contracted = (tile.k, rows) if tiled.over_rows else (rows, tile.k)
        up = lambda size: -(-size // chip.mxu_size) * chip.mxu_size
        return tiled.products * streamed * up(contracted) * up(tile.n) / chip.macs_per_cycle

    def bundles_of(span) -> float:
        # What is done to the sums after the last block along K is a branch in it.
        last = max((b.size for b in schedule.branches if span.holds(b) and not schedule.num_products(b)), default=0)
        return span.size - (last * (1 - 1 / tiles_k) if tiles_k > 1 and not tiled.over_rows else 0)

    counts = _runs(case.group_sizes, tile, over_rows=tiled.over_rows)
    inner = sum(loop.size for loop in schedule.inside(schedule.grid_loop, schedule.loops))
    per_visit, per_step = schedule.grid_loop.size - inner, steps.size - whole.size - edge_branch.size
    whole_cycles = max(bundles_of(whole), products_of(tile.step))
    edge_cycles = max(bundles_of(edge), products_of(tile.edge)) if edge else 0.0
    cycles = (
        counts["visits"] * per_visit
        + counts["steps"] * per_step
        + counts["whole"] * whole_cycles
        + counts["edges"] * edge_cycles
    )
    floor = products_of(tile.step)
    shared = next((-(-tiles // chip.cores) for tiles in (tiles_k if tiled.over_rows else 1, tiles_n) if tiles > 1), 1)
    first = next((tiles for tiles in (tiles_k if tiled.over_rows else 1, tiles_n) if tiles > 1), 1)
    loop = {
        "loop_bundles": whole.size,
        "loop_floor": floor,
        "loop_mxu_efficiency": min(1.0, floor / bundles_of(whole)),
        "edge_bundles": edge.size if edge else None,
        "bundles_per_grid_step": per_visit,
        "grid_steps": counts["visits"] * tiles_k * tiles_n,
        **{f"{name}_per_column_tile": count for name, count in counts.items()},
    }
    return loop, cycles * tiles_k * tiles_n * shared / first


def _runs(group_sizes: Sequence[int], tile, *, over_rows: bool) -> dict[str, int]:
    """Returns how often the loops run for one tile of columns: visits, steps, those of them that are whole, edges."""
    runs = dict.fromkeys(("visits", "steps", "whole", "edges"), 0)
    first = 0
    for size in group_sizes:
        last = first + size
        if not size and over_rows:
            runs["visits"] += 1
        for tile_start in range(first // tile.m * tile.m, last if size else first, tile.m):
            runs["visits"] += 1
            start, end = max(first - tile_start, 0), min(last - tile_start, tile.m)
            for step in range(start // tile.step * tile.step, end, tile.step):
                runs["steps"] += 1
                if start <= step and step + tile.step <= end:
                    runs["whole"] += 1
                else:
                    low, high = max(start, step), min(end, step + tile.step)
                    runs["edges"] += -(-high // tile.edge) - low // tile.edge
        first = last
    return runs


def _cycles_of_steps(
    schedule: Schedule, grid: tuple[int, ...] | None, flops: float, chip: TpuChip
) -> tuple[dict[str, Any], float]:
    """Returns a grid step's figures and the cycles that a core takes, with one branch of those that hold products.

    A kernel that lists its products in several branches runs one of them a step. Where the grid is not known, the steps
    are as many as the FLOPs need and no more.
    """
    loop = schedule.grid_loop
    copies = schedule.branches_with_products(loop)
    runs = loop.size - sum(b.size for b in copies) + max((b.size for b in copies), default=0)
    products = max((schedule.num_products(b) for b in copies), default=schedule.num_products(loop))
    macs = products * ROWS_PER_PRODUCT * chip.mxu_size**2
    steps = math.prod(grid) if grid else math.ceil(flops / 2 / macs)
    floor = macs / chip.macs_per_cycle
    first = next((dim for dim in grid or (chip.cores,) if dim > 1), 1)
    figures = {
        "loop_bundles": runs,
        "loop_floor": floor,
        "loop_mxu_efficiency": min(1.0, floor / runs),
        "grid_steps": steps,
    }
    return figures, max(runs, floor) * steps * -(-first // chip.cores) / first


def _operand_bytes(program: Program, case: Case) -> int:
    """Returns the bytes of the operands and the results, each moved once."""
    results = jax.eval_shape(program.function, _sizes(case), *program.operands)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((program.operands, results)))


def _sizes(case: Case) -> jax.Array:
    return jnp.array(case.group_sizes, jnp.int32)


def show(report: dict[str, Any]) -> None:
    """Prints the report as a table."""
    case = report["case"]
    shape = f"{case['M']:,} rows, {case['E']} experts of {case['D']} x {case['F']}, {case['pattern']}"
    table = Table(title=f"{report['kernel']} on {report['topology']}: {case['name']}, {shape}", title_justify="left")
    for heading in ("", "loop bundles", "floor", "grid steps", "spills", "VMEM MiB", "HBM GB", "schedule ms", "HBM ms"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("roofline efficiency", justify="right")
    for name, figures in (("ours", report), *report.get("against", {}).items()):
        if "refused" in figures:
            table.add_row(f"[bold]{name}[/]: {figures['refused'][:120]}")
            continue
        peak = figures["peak_seconds"]
        for part in figures["kernels"]:
            times = f"{part['times']} x " if part["times"] > 1 else ""
            table.add_row(f"  {times}{part['name']}", *_cells(part))
        total = ["", "", "", f"{figures['spills']:,}", f"{figures['vmem_bytes'] / 2**20:.1f}"]
        moved = f"{_gigabytes(figures['hbm_bytes'])} (least {_gigabytes(figures['hbm_bytes_minimum'])})"
        efficiency = f"{figures['roofline_efficiency']:.3f} by {figures['bound_by']}"
        tiling = f" {figures['tiling']}" if "tiling" in figures else ""
        table.add_row(f"[bold]{name}[/]{tiling}, {peak * 1e3:.3f} ms at peak", *total, moved, "", "", efficiency)
        table.add_section()
    Console(width=200 if not sys.stdout.isatty() else None).print(table)


def _cells(part: dict[str, Any]) -> list[str]:
    return [
        f"{part['loop_bundles']:,}",
        f"{part['loop_floor']:,.0f}",
        f"{part['grid_steps']:,}",
        f"{part['spills']:,}",
        f"{part['vmem_bytes'] / 2**20:.1f}",
        _gigabytes(part["hbm_bytes"]),
        f"{part['schedule_seconds'] * 1e3:.3f}",
        "not known" if part["hbm_seconds"] is None else f"{part['hbm_seconds'] * 1e3:.3f}",
    ]


def _gigabytes(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--topology", default="v5p:2x2x1", help="v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1")
    parser.add_argument("--case", default="mixtral", choices=sorted(REAL))
    parser.add_argument("--rows", type=int, help="rows instead of the case's own")
    parser.add_argument("--groups", default="even", choices=sorted(PATTERNS), help="how the rows fall to the experts")
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "float32"), help="dtype of the weights")
    parser.add_argument("--against", action="append", default=[], choices=[*PEERS, "composed"], help="may be repeated")
    parser.add_argument(
        "--tiling",
        action="append",
        type=lambda text: tuple(map(int, text.split(","))),
        help="rows,k,n of the peers; may be repeated, the best counts (default 512,1024,1024)",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.tiling = args.tiling or [(512, 1024, 1024)]
    return args


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other processes may compile too
    main()
