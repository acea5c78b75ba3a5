"""What is checked before anything is loaded: that config, model, data and devices go together."""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

import jax

from upjax.checkpoint import read_model_config
from upjax.config import Config, MeshConfig, flatten, mesh_sizes
from upjax.data import DatasetInfo, held_out_batches, load_info, make_dataset
from upjax.errors import InputError, Problems
from upjax.mesh import AXES
from upjax.model import DecoderConfig, Dtypes, abstract_params

T = TypeVar("T")


def check(config: Config) -> tuple[DecoderConfig, DatasetInfo]:
    """Returns the model's architecture and what the dataset holds; InputError lists everything that does not fit."""
    problems = Problems("this run cannot start")
    decoder = architecture(config, problems)
    dataset = _try(problems, lambda: load_info(config.data.path))
    check_numbers(config, problems, num_devices=len(jax.devices()), num_processes=jax.process_count())
    if decoder:
        check_model(config, decoder, problems)
    if dataset:
        check_dataset(config, dataset, decoder, problems)
    problems.raise_if_any()
    return decoder, dataset


def architecture(config: Config, problems: Problems) -> DecoderConfig | None:
    """Returns the model's architecture; None, with the problems saying why, where it cannot be had.

    Where both `decoder` and a model to begin with are given, each field in which they differ is a problem.
    """
    stated, init_from = config.model.decoder, config.model.init_from
    if init_from is None:
        return stated
    stored = _try(problems, lambda: read_model_config(init_from))
    if stated is None or stored is None:
        return stated or stored
    fields = [flatten(dataclasses.asdict(decoder)) for decoder in (stated, stored)]
    for name in sorted(fields[0].keys() | fields[1].keys()):
        in_config, in_model = (of.get(name) for of in fields)
        if in_config != in_model:
            problems.add(f"model.decoder.{name} is {in_config!r}, in the model {init_from} it is {in_model!r}")
    return stated


def _try(problems: Problems, read: Callable[[], T]) -> T | None:
    """Returns what is read, or None when that cannot be and the problems say why."""
    try:
        return read()
    except InputError as error:
        problems.add(str(error))
        return None


def check_numbers(config: Config, problems: Problems, *, num_devices: int, num_processes: int) -> None:
    """Adds the fields of the config that do not go with each other or with the devices there are."""
    mesh, data, steps = config.mesh, config.data, config.train.steps
    size = mesh.data * mesh.fsdp * mesh.expert
    shape = f"mesh (data {mesh.data} x fsdp {mesh.fsdp} x expert {mesh.expert})"
    if size > num_devices:
        problems.add(f"the {shape} needs {size} devices, there are {num_devices}")
    elif num_processes > 1 and size != num_devices:
        problems.add(f"the {shape} has {size} devices, {num_processes} processes must share all {num_devices}")
    parts = size * config.optimizer.gradient_accumulation
    if data.batch_size % parts:
        problems.add(
            f"data.batch_size {data.batch_size} is not a multiple of {parts}: the {size} devices of the {shape} "
            f"times optimizer.gradient_accumulation {config.optimizer.gradient_accumulation}"
        )
    warmup, decay = config.schedule.warmup_steps, config.schedule.decay_steps
    if warmup + decay > steps:
        problems.add(f"schedule.warmup_steps {warmup} + schedule.decay_steps {decay} > train.steps {steps}")


def check_model(config: Config, decoder: DecoderConfig, problems: Problems) -> None:
    """Adds what the model's architecture does not allow: too long sequences, dims that the mesh does not divide."""
    if config.data.sequence_length > decoder.max_sequence_length:
        problems.add(
            f"data.sequence_length {config.data.sequence_length} is more than the model's "
            f"max_sequence_length {decoder.max_sequence_length}"
        )
    if config.train.capacity_factor is not None and decoder.moe is None:
        problems.add(f"train.capacity_factor {config.train.capacity_factor} for a model that has no experts")
    for path, dim, axes, size in _indivisible(decoder, config.mesh):
        problems.add(f"parameter {path} has a dim of {dim}, which mesh {' x '.join(axes)} = {size} does not divide")


def check_dataset(config: Config, dataset: DatasetInfo, decoder: DecoderConfig | None, problems: Problems) -> None:
    """Adds what the dataset lacks: enough documents in the splits that are read, token ids that the model knows."""
    if decoder and dataset.max_token_id >= decoder.vocab_size:
        problems.add(
            f"dataset {config.data.path} holds token id {dataset.max_token_id}, the model has ids below its "
            f"vocab_size {decoder.vocab_size}: tokenize with the model's own tokenizer"
        )
    shape = {"sequence_length": config.data.sequence_length, "batch_size": config.data.batch_size}
    _try(problems, lambda: make_dataset(config.data.path, seed=config.data.seed, **shape))
    if config.train.evaluate_every:
        _try(problems, lambda: held_out_batches(config.data.path, max_tokens=config.train.evaluate_tokens, **shape))


def _indivisible(decoder: DecoderConfig, mesh: MeshConfig):
    """Yields (path, dim, axes, their size) for each dim of a parameter that its mesh axes do not divide."""
    sizes = mesh_sizes(mesh)
    one = jax.sharding.AbstractMesh((1,) * len(AXES), AXES, (jax.sharding.AxisType.Explicit,) * len(AXES))
    with jax.sharding.use_abstract_mesh(one):  # the real one would refuse the first parameter without naming it
        params = abstract_params(decoder, Dtypes())
    for path, leaf in params.items():
        for dim, entry in zip(leaf.shape, leaf.sharding.spec, strict=True):
            axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            size = math.prod(sizes[axis] for axis in axes)
            if dim % size:
                yield path, dim, axes, size
