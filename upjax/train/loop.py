"""The training run: a loop around the step that logs, evaluates, saves, resumes and stops.

Dims: B batch, T time.
"""

import contextlib
import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from upjax.checkpoint import (
    CHECKPOINTS,
    RunRecord,
    clear_unfinished,
    copy_tokenizer,
    last_good,
    start_saving,
)
from upjax.config import Config, config_to_dict, config_to_yaml
from upjax.data import make_dataset
from upjax.errors import InputError
from upjax.evaluate.perplexity import evaluate
from upjax.files import write_text
from upjax.mesh import make_mesh
from upjax.model import DecoderConfig, build
from upjax.train.checks import check
from upjax.train.flops import flops_per_token
from upjax.train.metrics import Log, Meter, open_metrics, read_metrics
from upjax.train.program import Program, batch_sharding, make_program
from upjax.train.schedule import branch_points
from upjax.train.start import Start, branch, start, training_part
from upjax.train.state import TrainState

CONFIG_FILE = "config.yaml"


class TrainingError(RuntimeError):
    """Training went wrong by itself: the loss is no number any more. The message names the last good checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What became of a run."""

    run: Path
    step: int
    finished: bool
    """False where SIGTERM stopped it; the same command goes on from `step`."""
    metrics: dict[str, Any]
    """The last that were logged."""


def train(config: Config, *, branch_from: int | str | Path | None = None, progress: bool = True) -> TrainResult:
    """Trains to the end of the schedule and returns where the run stands.

    The run goes on from its latest checkpoint where it has one, to the bit as if it had never stopped. `branch_from`
    names a checkpoint of the stable phase of another run (RUN/checkpoints/STEP) to decay from, or a step of the run in
    `config.output`; train.steps is then that step plus schedule.decay_steps.
    """
    parent = None
    if branch_from is not None:
        config, parent = branch(config, branch_from)
    decoder, _ = check(config)
    run = config.output
    _check_directory(run)
    program = make_program(config, decoder)
    with _mesh(config):
        begun = start(config, decoder, program.optimizer, parent)
        first = int(begun.state.step)
        if jax.process_index() == 0:
            _prepare_directory(config, source=parent or config.model.init_from)
        last = first
        if first < config.train.steps:
            with open_metrics(run, step=first, num_steps=config.train.steps, progress=progress) as log:
                last = _run(program, begun, log)
    logged = read_metrics(run)
    return TrainResult(run=run, step=last, finished=last == config.train.steps, metrics=logged[-1] if logged else {})


def _run(program: Program, begun: Start, log: Log) -> int:
    """Runs the steps that are left, and returns the number of the last one made."""
    config, decoder = program.config, program.decoder
    run, state, num_steps = config.output, begun.state, config.train.steps
    batches = _batches(config, begun.data_state)
    compiled = program.step.lower(state, program.abstract_batch()).compile()
    devices = list(batch_sharding().device_set)
    meter = Meter(flops_per_token(decoder, config.data.sequence_length), devices)
    finish_saving: Callable[[], None] = lambda: None
    waiting: tuple[int, dict[str, jax.Array]] | None = None

    def report(values: dict[str, Any]) -> None:
        if values["step"] % config.train.log_every == 0 or values["step"] == num_steps or "held_out_loss" in values:
            log(values | meter.rates(num_steps - values["step"]))

    with _stop_requests() as stop_requested:
        try:
            step = int(state.step)
            while step < num_steps:
                step += 1
                state, metrics = compiled(state, _on_mesh(next(batches)))
                if waiting:  # reported while the step above runs
                    report(_settle(meter, *waiting))
                waiting = step, metrics
                stopping = stop_requested(step)
                saves, evaluates = stopping or _saves(config, step), _evaluates(config, step)
                if saves or evaluates:
                    values, waiting = _settle(meter, *waiting), None
                    with meter.paused():
                        values |= _evaluate(config, decoder, state) if evaluates else {}
                    report(values)  # before it is saved: a run goes on after what it saved, and would miss the line
                if saves:
                    with meter.paused():
                        finish_saving()
                        finish_saving = _save(config, begun, state, batches.get_state(), step)
                if stopping:
                    break
        except FloatingPointError as error:
            finish_saving()
            raise TrainingError(f"{error}; {last_good(run)}") from error
        finally:
            finish_saving()
    return step


def _settle(meter: Meter, step: int, metrics: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns a step's metrics as numbers, once it is done; FloatingPointError when its loss or gradient is none."""
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    for name in ("loss", "grad_norm"):
        if not math.isfinite(values[name]):
            raise FloatingPointError(f"{name} is {values[name]} at step {step}")
    meter.count(values["tokens"])
    return {"step": step} | values


def _save(config: Config, begun: Start, state: TrainState, data_state: dict[str, Any], step: int) -> Callable[[], None]:
    """Saves a step, or starts to; returns what finishes it."""
    stable = branch_points(config.schedule, config.train.steps)

    def keep(steps: list[int]) -> set[int]:
        kept = set(steps[-config.train.keep_checkpoints :])
        return kept | {s for s in steps if s in stable} if config.train.keep_branch_points else kept

    record = RunRecord(model=begun.model, config=config_to_dict(config), data_state=data_state)
    training = training_part(state)
    finish = start_saving(config.output, step, params=state.params, training=training, record=record, keep=keep)
    if jax.default_backend() == "cpu":
        # Written meanwhile, the state would be in memory twice, and the writing would take the cores from the steps.
        finish()
        return lambda: None
    return finish


def _saves(config: Config, step: int) -> bool:
    """Says whether a step is saved: every so many, at the end, and where the decay begins if that is to be kept."""
    last_stable = config.train.steps - config.schedule.decay_steps
    branches = config.train.keep_branch_points and step == last_stable
    return branches or step % config.train.checkpoint_every == 0 or step == config.train.steps


def _evaluates(config: Config, step: int) -> bool:
    every = config.train.evaluate_every
    return every is not None and (step % every == 0 or step == config.train.steps)


def _evaluate(config: Config, decoder: DecoderConfig, state: TrainState) -> dict[str, float]:
    evaluation = evaluate(
        build(decoder, config.model.dtypes, state.params),
        config.data.path,
        sequence_length=config.data.sequence_length,
        batch_size=config.data.batch_size // config.optimizer.gradient_accumulation,
        max_tokens=config.train.evaluate_tokens,
    )
    return {"held_out_loss": evaluation.loss, "held_out_bits_per_byte": evaluation.bits_per_byte}


def _batches(config: Config, data_state: dict[str, Any] | None):
    batches = iter(
        make_dataset(
            config.data.path,
            sequence_length=config.data.sequence_length,
            batch_size=config.data.batch_size,
            seed=config.data.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
    )
    if data_state is not None:
        batches.set_state(data_state)
    return batches


def _mesh(config: Config) -> contextlib.AbstractContextManager:
    """Returns what sets the mesh. One device needs none, and XLA then copies no weights to lay them out for use."""
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.expert)
    return jax.set_mesh(make_mesh(*sizes)) if math.prod(sizes) > 1 else contextlib.nullcontext()


def _on_mesh(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns the batch, of which this process has its rows, split over the mesh."""
    return {name: jax.make_array_from_process_local_data(batch_sharding(), x) for name, x in batch.items()}


def _check_directory(run: Path) -> None:
    """Raises InputError when the output is there and holds something that no run put there."""
    foreign = {entry.name for entry in run.glob("*") if not entry.name.startswith(".")} - {CHECKPOINTS}
    if foreign and not (run / CONFIG_FILE).is_file():
        raise InputError(f"output {run} exists and is not a run (it has no {CONFIG_FILE}); choose another")


def _prepare_directory(config: Config, source: Path | None) -> None:
    """Makes the run's directory, and removes from one that is there what a killed process left unfinished."""
    (config.output / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    clear_unfinished(config.output)
    write_text(config.output / CONFIG_FILE, config_to_yaml(config))
    if source:
        copy_tokenizer(source, config.output)


@contextlib.contextmanager
def _stop_requests() -> Iterator[Callable[[int], bool]]:
    """Yields a function that says, step by step, whether SIGTERM has asked the run to save and stop."""
    if jax.process_count() > 1:  # all processes must stop at the same step, which JAX's coordinator agrees on
        yield multihost_utils.reached_preemption_sync_point
        return
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread can be told of signals
        yield lambda step: asked.is_set()
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda step: asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
