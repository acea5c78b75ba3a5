"""`plan`: the step of a config, compiled for a slice of TPUs, and what that says of memory and time."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upjax.config import Config, MeshConfig, mesh_sizes, parse_mesh
from upjax.errors import InputError, Problems
from upjax.model import DecoderConfig, num_params
from upjax.plan.collectives import Collective, collectives
from upjax.plan.compile import Compile, Compiled, PlanError, Progress, compile_step
from upjax.plan.hlo import parse
from upjax.plan.memory import Memory, read_memory
from upjax.plan.roofline import Roofline, roofline, routed_rows
from upjax.plan.topology import Topology, mesh_shapes, parse_topology
from upjax.plan.traffic import hbm_bytes
from upjax.train.checks import architecture, check_model, check_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What one compilation says. `memory` and `collectives` are the compiler's, `roofline` is an estimate."""

    topology: Topology
    mesh: MeshConfig
    decoder: DecoderConfig
    memory: Memory
    collectives: tuple[Collective, ...]
    hbm_bytes: int
    """That a device moves in a step: counted over the compiler's schedule, an estimate."""
    roofline: Roofline
    compiled: Compiled
    tokens: float | None
    """That chip-hours are asked for."""

    @property
    def fits(self) -> bool:
        """Whether the compiler takes the program: it refuses one that needs more memory than it may use.

        Where it was stopped before it had finished, what it may use is that of `topology`.
        """
        if self.compiled.refused is not None:
            return False
        return self.compiled.memory is not None or self.memory.total <= self.topology.available_bytes_per_device

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain data; what is an estimate says so in its name, or lies under "estimate".

        FLOPs are those of all devices together, bytes those of a chip where the name says so and of a device elsewhere.
        """
        per_chip = self.topology.devices_per_chip
        memory = dataclasses.asdict(self.memory) | {"total": self.memory.total}
        available = self.topology.available_bytes_per_device * per_chip
        of_step, peak = self.roofline, self.memory.total * per_chip
        return {
            "topology": self.topology.name,
            "mesh": mesh_sizes(self.mesh),
            "num_chips": self.topology.num_chips,
            "devices_per_chip": per_chip,
            "parameters": num_params(self.decoder),
            "active_parameters": num_params(self.decoder, active=True),
            "fits": self.fits,
            "peak_bytes_per_chip": peak,
            "available_bytes_per_chip": available,
            "hbm_bytes_per_chip": self.topology.hbm_bytes_per_chip,
            "free_bytes_per_chip": available - peak,
            "memory_per_device": memory,
            "flops_per_step": of_step.model_flops_per_step,
            "recomputed_flops_per_step": of_step.recomputed_flops_per_step,
            "hbm_traffic_bytes_per_step_estimate": self.hbm_bytes,
            "collective_bytes_sent_per_step": sum(c.bytes_sent * c.count for c in self.collectives),
            "collectives": [dataclasses.asdict(c) for c in self.collectives],
            "step_seconds_estimate": of_step.step_seconds,
            "mfu_estimate": of_step.mfu,
            "estimate": {
                "bound_by": of_step.bound_by,
                "compute_seconds": of_step.compute_seconds,
                "hbm_seconds": of_step.hbm_seconds,
                "asynchronous_collective_seconds": of_step.asynchronous_collective_seconds,
                "synchronous_collective_seconds": of_step.synchronous_collective_seconds,
                "tokens_per_step": of_step.tokens_per_step,
                "tokens_per_day": of_step.tokens_per_day,
                "tokens": self.tokens,
                "chip_hours": of_step.chip_hours(self.tokens) if self.tokens else None,
            },
            "compiler": {
                "seconds": self.compiled.seconds,
                "finished": self.compiled.memory is not None,
                "refused": self.compiled.refused,
                "memory_analysis": self.compiled.memory,
                # A loop's body counts once there, and a Pallas kernel as its author says.
                "cost_analysis": self.compiled.cost,
            },
        }


def plan(
    config: Config,
    topology: str,
    *,
    mesh: MeshConfig | str | None = None,
    tokens: float | None = None,
    progress: Progress = lambda stage: None,
    schedule_only: bool = False,
    compile_: Compile = compile_step,
) -> Plan:
    """Returns what the TPU compiler says of the step of `config` on a slice such as `v5p:4x4x4`, and an estimated time.

    `mesh` replaces that of the config; its axes multiply to the slice's devices. `tokens` asks for chip-hours. Needs no
    TPU, no dataset, and no checkpoint where the config states `model.decoder`. A step that does not fit is an answer,
    with `fits` False. `schedule_only` stops before code is made, several times sooner: all that is reported is known by
    then, except that the code can be made. `compile_` stands in for the compiler's process. Raises InputError with
    everything that does not go together, PlanError where the compiler fails for another reason than memory.
    """
    slice_ = parse_topology(topology)
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    config = dataclasses.replace(config, mesh=mesh or config.mesh)
    decoder = _decoder(config)
    problems = Problems(f"this step cannot run on {slice_.name}")
    check(config, decoder, slice_, problems)
    problems.raise_if_any()
    compiled = compile_(_stated(config, decoder), slice_, progress=progress, schedule_only=schedule_only)
    return read(config, decoder, slice_, compiled, tokens=tokens)


def sweep(
    config: Config,
    topology: str,
    *,
    tokens: float | None = None,
    progress: Progress = lambda stage: None,
) -> list[Plan]:
    """Returns the plans of every mesh that the step can have on the slice, best first.

    Those that fit come first, the fastest by estimate before the others, then those that do not, the smallest first.
    None is compiled to the end (`schedule_only`): plan the one to use. Raises InputError where no mesh goes, PlanError
    where the compiler fails on one for another reason than memory.
    """
    slice_ = parse_topology(topology)
    decoder = _decoder(config)
    tried = list(_possible(config, decoder, slice_))
    plans = []
    for number, of in enumerate(tried, start=1):
        name = ",".join(f"{axis}={size}" for axis, size in mesh_sizes(of.mesh).items())
        at = f"{number}/{len(tried)} {name}"
        say = lambda stage, at=at: progress(f"{at}: {stage}")
        try:
            compiled = compile_step(_stated(of, decoder), slice_, progress=say, schedule_only=True)
        except PlanError as error:
            raise PlanError(f"mesh {name}: {error}") from error
        plans.append(read(of, decoder, slice_, compiled, tokens=tokens))
    return sorted(plans, key=lambda p: (0, p.roofline.step_seconds) if p.fits else (1, float(p.memory.total)))


def check(config: Config, decoder: DecoderConfig, topology: Topology, problems: Problems) -> None:
    """Adds what keeps the step from running on the slice; nothing is compiled."""
    sizes = mesh_sizes(config.mesh)
    named = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if (size := config.mesh.data * config.mesh.fsdp * config.mesh.expert) < topology.num_devices:
        problems.add(
            f"the mesh ({named}) has {size} devices, {topology.name} has {topology.num_devices}: "
            "give --mesh, or --sweep to try all"
        )
    check_numbers(config, problems, num_devices=topology.num_devices, num_processes=1)
    check_model(config, decoder, problems)


def _possible(config: Config, decoder: DecoderConfig, topology: Topology) -> Iterator[Config]:
    """Yields the config with each mesh that divides all that it must; InputError where there is none."""
    refused = []
    for mesh in mesh_shapes(topology.num_devices):
        of = dataclasses.replace(config, mesh=mesh)
        problems = Problems("")
        check(of, decoder, topology, problems)
        if problems.found:
            refused.append(f"{mesh_sizes(mesh)}: {problems.found[0]}")
        else:
            yield of
    if len(refused) == len(list(mesh_shapes(topology.num_devices))):
        raise InputError(f"no mesh of {topology.num_devices} devices goes with this step", refused[:16])


def _decoder(config: Config) -> DecoderConfig:
    """Returns the architecture: that of the config, else that of the model that it begins with."""
    stated, init_from = config.model.decoder, config.model.init_from
    if stated and not (init_from and Path(init_from).exists()):
        return stated
    problems = Problems("the architecture of the model to plan for is not known")
    decoder = architecture(config, problems)
    if decoder is None:
        problems.add("either make that model first, or state its architecture in the config, as model.decoder")
    problems.raise_if_any()
    return decoder


def _stated(config: Config, decoder: DecoderConfig) -> Config:
    """Returns the config with the architecture in it: all that the compiler's process gets."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, decoder=decoder))


def read(
    config: Config, decoder: DecoderConfig, topology: Topology, compiled: Compiled, *, tokens: float | None = None
) -> Plan:
    """Returns the plan that the compiler's answer makes."""
    module = parse(compiled.text)
    found = collectives(module, mesh_sizes(config.mesh), topology, compiled.places)
    moved = hbm_bytes(module, routed_rows=routed_rows(config, decoder, topology.num_devices))
    return Plan(
        topology=topology,
        mesh=config.mesh,
        decoder=decoder,
        memory=read_memory(module, compiled.assignment, compiled.live_ranges, compiled.arguments),
        collectives=tuple(found),
        hbm_bytes=moved,
        roofline=roofline(config, decoder, topology, hbm_bytes=moved, collectives=found),
        compiled=compiled,
        tokens=tokens,
    )
