"""A run's config: YAML in, validated, resolved YAML out. Each field is read by exactly one module."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from upjax.errors import InputError, Problems
from upjax.mesh import AXES
from upjax.model import DecoderConfig, Dtypes

STRICT = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
Fraction = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Where the parameters come from: an upjax model (or a run), or a fresh random model of architecture `decoder`.

    With both, the model at `init_from` must have that architecture, and `upjax plan` needs no model to be there.
    """

    init_from: Path | None = None
    decoder: DecoderConfig | None = None
    dtypes: Dtypes = Dtypes()

    def __post_init__(self):
        if self.init_from is None and self.decoder is None:
            raise ValueError(
                "give init_from (a model or a run), decoder (an architecture, random parameters) or both, got none"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """A dataset of `upjax tokenize`, and how it is cut into batches."""

    path: Path
    sequence_length: PositiveInt
    batch_size: PositiveInt
    seed: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshConfig:
    """How many devices lie along each axis of the mesh."""

    data: PositiveInt = 1
    fsdp: PositiveInt = 1
    expert: PositiveInt = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW; `learning_rate` is the peak that the schedule scales."""

    learning_rate: PositiveFloat
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat = 1.0
    gradient_accumulation: PositiveInt = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    """Warm-up, stable, decay: the last `decay_steps` steps take the learning rate to `final_fraction` of its peak."""

    warmup_steps: NonNegativeInt = 0
    decay_steps: NonNegativeInt = 0
    decay: Literal["linear", "cosine", "1-sqrt", "exponential"] = "linear"
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0

    def __post_init__(self):
        if self.decay == "exponential" and self.final_fraction == 0:
            raise ValueError("an exponential decay never reaches 0: final_fraction must be above 0, got 0.0")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    """How long to train, on what loss, and how often to do what else."""

    steps: PositiveInt
    seed: NonNegativeInt = 0
    remat: Literal["none", "dots", "full"] = "none"
    load_balance_coefficient: NonNegativeFloat = 0.01
    z_loss_coefficient: NonNegativeFloat = 0.001
    capacity_factor: PositiveFloat | None = None
    """How many times its even share of a device's tokens an expert takes while training; None: all that come, as in
    evaluation and after export."""
    log_every: PositiveInt = 10
    checkpoint_every: PositiveInt = 1000
    keep_checkpoints: PositiveInt = 2
    """The newest this many are kept."""
    keep_branch_points: bool = True
    """Whether every checkpoint of the stable phase, from which `branch_from` can decay, is kept too."""
    evaluate_every: PositiveInt | None = None
    """Held-out loss every so many steps and at the end; None: never."""
    evaluate_tokens: PositiveInt | None = None
    """At most this many held-out tokens, None: all of them."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A training run; `output` is its directory."""

    output: Path
    model: ModelConfig
    data: DataConfig
    mesh: MeshConfig = MeshConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig


_CONFIG = pydantic.TypeAdapter(Config)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Returns the config in a YAML file, with overrides such as `train.steps=100` (YAML values) put in first.

    Raises InputError with every unknown key and bad value at once.
    """
    problems = Problems(f"{path} is not a config to train with")
    try:
        mapping = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"cannot read the config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}") from error
    if not isinstance(mapping, dict):
        raise InputError(f"{path} must hold a mapping of sections, got {type(mapping).__name__}")
    overridden = [key for text in overrides if (key := _override(mapping, text, problems))]
    return _parse(mapping, problems, overridden)


def parse_config(mapping: Mapping[str, Any], source: str) -> Config:
    """Returns the config that `config_to_dict` made a mapping of; `source` names where it comes from in errors."""
    return _parse(mapping, Problems(f"{source} does not hold the config of a run"), ())


def parse_mesh(text: str) -> MeshConfig:
    """Returns the mesh that `data=1,fsdp=8,expert=8` asks for; InputError for anything else."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or not size.isdecimal() or not int(size) or axis in sizes:
            raise InputError(f"mesh {text!r} is not of the form data=1,fsdp=4,expert=2")
        sizes[axis] = int(size)
    return MeshConfig(**sizes)


def mesh_sizes(mesh: MeshConfig) -> dict[str, int]:
    """Returns the size of each axis, in the order of `upjax.mesh.AXES`."""
    return {axis: getattr(mesh, axis) for axis in AXES}


def config_to_dict(config: Config) -> dict[str, Any]:
    """Returns the config as what JSON and YAML hold, defaults filled in."""
    return _CONFIG.dump_python(config, mode="json")


def config_to_yaml(config: Config) -> str:
    """Returns the resolved config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _parse(mapping: Mapping[str, Any], problems: Problems, overridden: Sequence[str]) -> Config:
    try:
        config = _CONFIG.validate_python(mapping)
    except pydantic.ValidationError as error:
        for detail in error.errors(include_url=False):
            key = ".".join(map(str, detail["loc"]))
            origin = " (from the command line)" if key in overridden else ""
            problems.add(f"{key}{origin}: {_explain(key, detail)}")
        problems.raise_if_any()
    problems.raise_if_any()
    return config


def _explain(key: str, detail: Mapping[str, Any]) -> str:
    match detail["type"]:
        case "missing":
            return "missing"
        case "unexpected_keyword_argument":
            return f"unknown key{_suggestion(key)}"
        case "value_error":
            return str(detail["ctx"]["error"])
        case _:
            message = detail["msg"]
            return f"{message[0].lower()}{message[1:]}, got {detail['input']!r}"


def _suggestion(key: str) -> str:
    """Returns the nearest key there is: one of the same name elsewhere, else one that is spelled much like it."""
    known = list(_keys(Config))
    name = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == name] or difflib.get_close_matches(key, known, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _keys(section: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        yield f"{prefix}{field.name}"
        hint = hints[field.name]
        for kind in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
            if dataclasses.is_dataclass(kind):
                yield from _keys(kind, f"{prefix}{field.name}.")


def _override(mapping: dict[str, Any], text: str, problems: Problems) -> str | None:
    """Puts one override into the mapping and returns its key, or None after naming what is wrong with it."""
    key, equals, value = text.partition("=")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        problems.add(f"override {text!r}: the value is not YAML: {' '.join(str(error).split())}")
        return None
    *sections, name = key.split(".")
    if not equals or not all((*sections, name)):
        problems.add(f"override {text!r}: write it as section.key=value")
        return None
    for section in sections:
        mapping = mapping.setdefault(section, {})
        if not isinstance(mapping, dict):
            problems.add(f"override {text!r}: {section} holds {mapping!r}, not a mapping")
            return None
    mapping[name] = parsed
    return key
