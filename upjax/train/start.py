"""Where a run starts: from a model, from its own latest checkpoint, or as a branch of another run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from upjax.checkpoint import (
    ModelRecord,
    checkpoint_directory,
    list_steps,
    load_model,
    load_training,
    read_model,
    read_run,
)
from upjax.config import Config, config_to_dict, flatten, parse_config
from upjax.errors import InputError, Problems
from upjax.mesh import replicated
from upjax.model import Decoder, DecoderConfig, flat_params
from upjax.provenance import software
from upjax.train.schedule import branch_points
from upjax.train.state import TrainState, abstract_state, init_state

MAY_CHANGE = (
    "output",
    "mesh.data",
    "mesh.fsdp",
    "mesh.expert",
    "optimizer.gradient_accumulation",
    "train.remat",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.keep_branch_points",
    "train.evaluate_every",
    "train.evaluate_tokens",
)
"""What a run may be resumed with otherwise than it began: nothing that changes what it computes but for rounding."""

OF_THE_DECAY = ("train.steps", "schedule.decay_steps", "schedule.decay", "schedule.final_fraction")
"""What may change as long as no step of either decay has been made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The state to go on from, where the data goes on (None: at its beginning), and what to record of the model."""

    state: TrainState
    data_state: dict[str, Any] | None
    model: ModelRecord


def branch(config: Config, branch_from: int | str | Path) -> tuple[Config, Path]:
    """Returns the config of a run that decays from a checkpoint of another run, and that checkpoint.

    `branch_from` is RUN/checkpoints/STEP, or a step of the run in `config.output`, and the branch then goes to
    <output>-STEP-<decay_steps> beside it. The branch decays at once, so its train.steps is the step plus the decay's.
    """
    decay_steps = config.schedule.decay_steps
    if isinstance(branch_from, int) or str(branch_from).isdecimal():
        step = int(branch_from)
        parent = checkpoint_directory(config.output, step)
        config = dataclasses.replace(
            config, output=config.output.with_name(f"{config.output.name}-{step}-{decay_steps}")
        )
    else:
        parent = Path(branch_from)
    if not parent.name.isdecimal() or not parent.is_dir():
        steps = list_steps(parent.parent.parent)
        raise InputError(f"branch_from {parent} is not a checkpoint RUN/checkpoints/STEP; the run has steps {steps}")
    step, began = int(parent.name), parse_config(read_run(parent).config, f"checkpoint {parent}")
    stable = branch_points(began.schedule, began.train.steps)
    problems = Problems(f"cannot branch from {parent}")
    if step not in stable:
        phase = "warm-up" if step < stable.start else "decay"
        problems.add(f"step {step} lies in the run's {phase}; its stable phase is {stable.start} to {stable.stop - 1}")
    if not decay_steps:
        problems.add("schedule.decay_steps is 0: there is nothing to do after the branch point")
    if config.output.resolve() == parent.resolve().parent.parent:
        problems.add(f"output {config.output} is the run that it branches from; choose another")
    problems.raise_if_any()
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=step + decay_steps)), parent


def start(
    config: Config, decoder: DecoderConfig, optimizer: optax.GradientTransformation, parent: Path | None
) -> Start:
    """Returns where the run goes on: from its latest checkpoint, else from `parent`, else from a model."""
    steps = list_steps(config.output)
    if steps:
        return _resume(config, decoder, optimizer, checkpoint_directory(config.output, steps[-1]), branches=False)
    if parent:
        begun = _resume(config, decoder, optimizer, parent, branches=True)
        origin = {"checkpoint": str(parent), "step": int(parent.name)}
        provenance = begun.model.provenance | {"parent": origin}
        return dataclasses.replace(begun, model=dataclasses.replace(begun.model, provenance=provenance))
    return _begin(config, decoder, optimizer)


def _begin(config: Config, decoder: DecoderConfig, optimizer: optax.GradientTransformation) -> Start:
    params_key, state_key = jax.random.split(jax.random.key(config.train.seed))
    dtypes = config.model.dtypes
    if config.model.init_from:
        params = flat_params(load_model(config.model.init_from, dtypes=dtypes))
        made_from = read_model(config.model.init_from).provenance
    else:
        params = jax.jit(lambda key: flat_params(Decoder(decoder, dtypes, key=replicated(key))))(params_key)
        made_from = None
    provenance = {
        "method": "train",
        "source": str(config.model.init_from) if config.model.init_from else "random parameters",
        "made_from": made_from,
        "seed": config.train.seed,
        "parent": None,
        "software": software(),
    }
    model = ModelRecord(config=decoder, parameters_dtype=dtypes.parameters, provenance=provenance)
    return Start(state=init_state(params, optimizer, state_key), data_state=None, model=model)


def _resume(config: Config, decoder: DecoderConfig, optimizer, checkpoint: Path, *, branches: bool) -> Start:
    record = read_run(checkpoint)
    same_data = check_same(config, record.config, checkpoint, branches=branches)
    abstract = abstract_state(decoder, config.model.dtypes, optimizer)
    params, training = load_training(checkpoint, abstract.params, training_part(abstract))
    return Start(
        state=TrainState(params=params, **training),
        data_state=record.data_state if same_data else None,
        model=dataclasses.replace(record.model, provenance=record.model.provenance | {"software": software()}),
    )


def training_part(state: TrainState) -> dict[str, Any]:
    """Returns what a checkpoint keeps of the state beside the parameters."""
    return {"opt_state": state.opt_state, "step": state.step, "key": state.key}


def check_same(config: Config, began: Mapping[str, Any], checkpoint: Path, *, branches: bool) -> bool:
    """Returns whether the data is the same too; InputError lists what differs and may not."""
    step = int(checkpoint.name)
    old, new = flatten(began), flatten(config_to_dict(config))
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} - set(MAY_CHANGE)
    stable_end = min(mapping["train.steps"] - mapping["schedule.decay_steps"] for mapping in (old, new))
    if step <= stable_end:
        changed -= set(OF_THE_DECAY)
    data = {key for key in changed if key.startswith("data.")}
    if branches:
        changed -= data
    problems = Problems(
        f"the config is not the one that {checkpoint} was made with; choose another output, or branch from it"
    )
    for key in sorted(changed):
        problems.add(f"{key}: {old.get(key)!r} then, {new.get(key)!r} now")
    problems.raise_if_any()
    return not data
