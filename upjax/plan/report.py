"""A plan for people: tables, Markdown, and a bar of what fills a chip's memory."""

import collections
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table

from upjax.config import mesh_sizes
from upjax.plan.planning import Plan

GIB, GB = 2**30, 1e9
PARTS = ("parameters", "optimizer", "batch", "activations", "temporaries", "gaps", "other")
SMALL_BYTES = 1e6
"""Collectives that send less in a whole step are summed up in one line."""


def show(plan: Plan) -> None:
    """Prints a plan to stdout."""
    Console().print(render(plan), soft_wrap=False)


def render(plan: Plan) -> RenderableType:
    """Returns the tables of a plan; each says whether it is the compiler's or an estimate."""
    parts = [_summary(plan), _memory(plan)]
    if not plan.fits:
        parts.append(_buffers(plan))
    if plan.collectives:
        parts.append(_collectives(plan))
    return Group(*parts, _time(plan))


def verdict(plan: Plan) -> str:
    """Returns whether the step fits, and by how much, in one line."""
    per_chip, topology = plan.topology.devices_per_chip, plan.topology
    available = topology.available_bytes_per_device * per_chip
    need = plan.memory.total * per_chip
    told = f"{need / GIB:.1f} GiB of {available / GIB:.1f} GiB a chip that the compiler may use"
    if plan.fits:
        return f"fits: {told}, {(available - need) / GIB:.1f} GiB free"
    return f"does not fit: {told}, {(need - available) / GIB:.1f} GiB too much"


def mesh_name(plan: Plan) -> str:
    """Returns the mesh as `--mesh` takes it, without axes of one device."""
    sizes = {axis: size for axis, size in mesh_sizes(plan.mesh).items() if size > 1} or {"data": 1}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _summary(plan: Plan) -> Table:
    told = plan.to_dict()
    table = _table(f"{plan.topology.name}, mesh {mesh_name(plan)}", "", "")
    stage = "compiled to the end" if plan.compiled.memory else "scheduled, no code made"
    table.add_row("compiler", "refused the program" if plan.compiled.refused else stage)
    table.add_row("memory", verdict(plan))
    if plan.compiled.memory:
        table.add_row("code", f"{plan.compiled.memory['generated_code'] / 2**20:.0f} MiB, not in that")
    devices = f"{told['num_chips']:,}" + (
        f" of {told['devices_per_chip']} devices each" * (told["devices_per_chip"] > 1)
    )
    table.add_row("chips", devices)
    table.add_row("parameters", f"{told['parameters'] / 1e9:.2f} billion, {told['active_parameters'] / 1e9:.2f} active")
    return table


def _memory(plan: Plan) -> Table:
    table = _table("Memory of a device at its peak (compiler)", "", "GiB", "share")
    for part in PARTS:
        size = getattr(plan.memory, part)
        table.add_row(part, f"{size / GIB:.3f}", f"{size / plan.memory.total:.1%}")
    table.add_row("total", f"{plan.memory.total / GIB:.3f}", "", style="bold")
    table.add_row("may be used", f"{plan.topology.available_bytes_per_device / GIB:.3f}", "")
    return table


def _buffers(plan: Plan) -> Table:
    table = _table("Largest buffers at the peak (compiler)", "GiB", "array", "made by")
    for buffer in plan.memory.largest_buffers:
        table.add_row(f"{buffer.bytes / GIB:.3f}", buffer.shape, _short(buffer.op_name) or buffer.name)
    return table


def _collectives(plan: Plan) -> Table:
    """Returns the collectives summed up by kind, axes and asynchrony."""
    sums: dict[tuple[str, ...], list[float]] = collections.defaultdict(lambda: [0, 0, 0.0])
    for c in plan.collectives:
        small = c.bytes_sent * c.count < SMALL_BYTES
        key = ("small ones", "", "") if small else (c.kind, " x ".join(c.axes), "yes" if c.asynchronous else "no")
        for i, value in enumerate((c.count, c.bytes_sent * c.count, c.seconds * c.count)):
            sums[key][i] += value
    title = "Collectives of a step, of one device (compiler; seconds are an estimate)"
    table = _table(title, "kind", "mesh axes", "async", "times", "GB sent", "seconds")
    for key, (times, sent, seconds) in sorted(sums.items(), key=lambda item: -item[1][1]):
        table.add_row(*key, f"{times:,}", f"{sent / GB:,.3f}", f"{seconds:.4f}")
    return table


def _time(plan: Plan) -> Table:
    of = plan.roofline
    table = _table("Time of a step at published peak rates (estimate)", "", "")
    rows = {
        "compute": f"{of.compute_seconds:.4f} s",
        "HBM traffic": f"{of.hbm_seconds:.4f} s ({plan.hbm_bytes / GB:,.0f} GB a device)",
        "collectives, asynchronous": f"{of.asynchronous_collective_seconds:.4f} s",
        "collectives, others": f"{of.synchronous_collective_seconds:.4f} s",
        "step": f"{of.step_seconds:.4f} s, most of it {of.bound_by}",
        "model FLOPs": f"{of.model_flops_per_step:.3e} a step, {of.recomputed_flops_per_step:.3e} made again",
        "MFU": f"{of.mfu:.1%}",
        "tokens": f"{of.tokens_per_step:,} a step, {of.tokens_per_day / 1e9:,.2f} billion a day",
    }
    if plan.tokens:
        rows["chip-hours"] = f"{of.chip_hours(plan.tokens):,.0f} for {plan.tokens / 1e9:,.1f} billion tokens"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def show_sweep(plans: Sequence[Plan]) -> None:
    """Prints the plans of a sweep to stdout, in their order."""
    table = _table("Meshes, best first (memory: compiler; the rest: estimates)", *_SWEEP)
    for plan in plans:
        of, per_chip = plan.roofline, plan.topology.devices_per_chip
        table.add_row(
            mesh_name(plan),
            "yes" if plan.fits else "no",
            f"{plan.memory.total * per_chip / GIB:.1f}",
            f"{sum(c.bytes_sent * c.count for c in plan.collectives) / GB:,.1f}",
            f"{of.step_seconds:.3f}",
            f"{of.mfu:.1%}",
            of.bound_by,
        )
    Console().print(table)


_SWEEP = ("mesh", "fits", "GiB a chip", "GB sent by a device", "s a step", "MFU", "bound by")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _short(op_name: str) -> str:
    """Returns the last parts of where an instruction comes from."""
    kept = [part for part in op_name.split("/") if part not in ("while", "body", "closed_call", "checkpoint")]
    return "/".join(kept[-4:])


def plot(plan: Plan, path: Path | str) -> None:
    """Writes a PNG of what fills the memory of a chip, stacked, beside what it has."""
    from matplotlib.figure import Figure  # here, because it takes a second that no other command should wait

    per_chip = plan.topology.devices_per_chip
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes, left = figure.subplots(), 0.0
    for part in PARTS:
        width = getattr(plan.memory, part) * per_chip / GIB
        axes.barh([0], [width], left=[left], label=f"{part} {width:.2f}")
        left += width
    may_use = plan.topology.available_bytes_per_device * per_chip / GIB
    axes.axvline(may_use, color="black", linestyle="--", label=f"may be used {may_use:.2f}")
    axes.set(xlabel="GiB a chip", yticks=[], xlim=(0, 1.05 * max(left, may_use)))
    axes.set_title(f"{plan.topology.name}, mesh {mesh_name(plan)}: {verdict(plan)}", fontsize=9)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, format="png", dpi=150)
