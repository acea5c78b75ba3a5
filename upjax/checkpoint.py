"""Models and training runs on disk, arrays by Orbax.

A model directory:      model.json  params/  tokenizer/
A run directory:        checkpoints/STEP/{params,training,run}/  tokenizer/  (and what `upjax.train` logs)

A checkpoint is written beside its final name and renamed when whole, and renamed before it is deleted, so whatever
instant a process is killed at, each directory named by a step is a whole checkpoint.
"""

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import pydantic
from orbax.checkpoint import v1 as ocp
from pydantic.dataclasses import dataclass

from upjax.config import STRICT
from upjax.errors import InputError, Problems
from upjax.files import staged_directory, write_text
from upjax.model import Decoder, DecoderConfig, Dtypes, abstract_params, build, flat_params

MODEL_FILE = "model.json"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"
UNFINISHED = (".orbax-checkpoint-tmp", ".deleted")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelRecord:
    """What is stored with parameters; `provenance` says what they were made from, and how."""

    format: Literal[1] = 1
    config: DecoderConfig
    parameters_dtype: Literal["float32", "bfloat16"]
    provenance: dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunRecord:
    """What a checkpoint of a run holds beside arrays: the resolved config, and where the data goes on."""

    format: Literal[1] = 1
    model: ModelRecord
    config: dict[str, Any]
    data_state: dict[str, Any]


def save_model(
    path: Path | str,
    decoder: Decoder,
    *,
    provenance: Mapping[str, Any],
    tokenizer_from: Path | str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model directory, with the tokenizer of a Hugging Face directory, an upjax model or a run."""
    if jax.process_count() > 1:
        raise NotImplementedError(
            "save_model runs in one process; several processes write a model as a run's checkpoint"
        )
    record = ModelRecord(config=decoder.config, parameters_dtype=decoder.dtypes.parameters, provenance=dict(provenance))
    with staged_directory(path, overwrite=overwrite) as staging, _errors("write", Path(path)):
        with _context(), _quiet():
            try:
                ocp.save((staging / "params").absolute(), flat_params(decoder))
            except Exception:
                _clear(staging)
                raise
        write_text(staging / MODEL_FILE, json.dumps(_to_json(record), indent=2) + "\n")
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, staging)


def load_model(path: Path | str, *, dtypes: Dtypes | None = None) -> Decoder:
    """Returns the decoder of a model directory, a checkpoint of a run, or the latest checkpoint of a run.

    Each parameter is read straight to where it lies on the mesh that is set, whatever mesh it was written from. By
    default parameters keep the dtype that they are stored in, and the layers compute in it.
    """
    place, record = _find(Path(path)).absolute(), read_model(path)
    dtypes = dtypes or Dtypes(record.parameters_dtype, record.parameters_dtype)
    stored, name = (place / "params", "state") if (place / MODEL_FILE).is_file() else (place, "params")
    abstract = abstract_params(record.config, dtypes)
    with _errors("read", place):
        _check_stored(place, ocp.metadata(stored, name).metadata, abstract)
        return build(record.config, dtypes, ocp.load(stored, abstract, checkpointable_name=name))


def read_model(path: Path | str) -> ModelRecord:
    """Returns the record of what `load_model` would load; reads no array."""
    place = _find(Path(path))
    if not (place / MODEL_FILE).is_file():
        return read_run(place).model
    try:
        return pydantic.TypeAdapter(ModelRecord).validate_json((place / MODEL_FILE).read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        raise InputError(f"cannot read the model {place / MODEL_FILE}: {error}") from error


def read_model_config(path: Path | str) -> DecoderConfig:
    """Returns the architecture of what `load_model` would load."""
    return read_model(path).config


def copy_tokenizer(source: Path | str, target: Path) -> None:
    """Copies the tokenizer of a Hugging Face directory, an upjax model or a run into `target`/tokenizer."""
    from upjax.hf.files import copy_tokenizer

    (target / TOKENIZER).mkdir(exist_ok=True)
    copy_tokenizer(tokenizer_directory(source), target / TOKENIZER)


def tokenizer_directory(path: Path | str) -> Path:
    """Returns where the tokenizer files of a model directory, a run or a checkpoint of it are, else `path` itself."""
    path = Path(path)
    root = path.parent.parent if path.parent.name == CHECKPOINTS else path
    return root / TOKENIZER if (root / TOKENIZER).is_dir() else path


def start_saving(
    run: Path,
    step: int,
    *,
    params: dict[str, jax.Array],
    training: Any,
    record: RunRecord,
    keep: Callable[[list[int]], set[int]],
) -> Callable[[], None]:
    """Starts to write the checkpoint of a step, and returns a function to call before the next one, and at the end.

    The arrays may be given away once this returns: they are copied first, and written while training goes on. The
    function returned waits until all is written, and deletes the checkpoints of the run that `keep`, given the steps
    there are, leaves out. It raises InputError when the checkpoint could not be written; those before it are whole.
    """
    place = checkpoint_directory(run, step)
    writing = {"params": params, "training": training, "run": _to_json(record)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        with _writes_checkpoint(run, step), _context():
            response = ocp.save_checkpointables_async(place.absolute(), writing)
        quiet = stack.pop_all()

    def finish() -> None:
        with quiet, _writes_checkpoint(run, step):
            response.result()
        if jax.process_index() == 0:
            steps = list_steps(run)
            for doomed in sorted(set(steps) - keep(steps)):
                removed = checkpoint_directory(run, doomed).rename(run / CHECKPOINTS / f"{doomed}.deleted")
                shutil.rmtree(removed)

    return finish


def list_steps(run: Path) -> list[int]:
    """Returns the steps that a run has checkpoints of, in order."""
    return sorted(int(entry.name) for entry in (run / CHECKPOINTS).glob("*") if entry.name.isdecimal())


def last_good(run: Path) -> str:
    """Returns a clause that names the latest checkpoint of a run, for the end of an error."""
    steps = list_steps(run)
    return f"the last good checkpoint is {checkpoint_directory(run, steps[-1])}" if steps else "there is no checkpoint"


def checkpoint_directory(run: Path, step: int) -> Path:
    """Returns where the checkpoint of a step is or will be."""
    return run.absolute() / CHECKPOINTS / str(step)  # Orbax takes no relative path


def clear_unfinished(run: Path) -> None:
    """Removes what a killed process left half written or half deleted."""
    _clear(run / CHECKPOINTS)


def read_run(checkpoint: Path) -> RunRecord:
    """Returns the record in a checkpoint of a run; reads no array."""
    with _errors("read", checkpoint):
        content = ocp.load_checkpointables(checkpoint.absolute(), {"run": None})["run"]
    try:
        return pydantic.TypeAdapter(RunRecord).validate_python(content)
    except pydantic.ValidationError as error:
        raise InputError(f"the record in checkpoint {checkpoint} is not one of this version: {error}") from error


def load_training(checkpoint: Path, params: Any, training: Any) -> tuple[dict[str, jax.Array], Any]:
    """Returns the parameters and the rest of the training state as the abstract ones say, on the mesh that is set."""
    with _errors("read", checkpoint):
        place = checkpoint.absolute()
        _check_stored(checkpoint, ocp.metadata(place, "params").metadata, params)
        loaded = ocp.load_checkpointables(place, {"params": params, "training": training})
    return loaded["params"], loaded["training"]


def _find(path: Path) -> Path:
    """Returns the model directory or the checkpoint that `path` means."""
    path = path.absolute()  # Orbax takes no other
    if (path / MODEL_FILE).is_file():
        return path
    if path.parent.name == CHECKPOINTS and path.name.isdecimal() and path.is_dir():
        return path
    if steps := list_steps(path):
        return checkpoint_directory(path, steps[-1])
    raise InputError(
        f"{path} is neither an upjax model ({MODEL_FILE}) nor a run with a checkpoint ({CHECKPOINTS}/STEP)"
    )


def _check_stored(place: Path, stored: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    problems = Problems(f"the parameters in {place} do not fit the config beside them")
    for path in sorted(wanted.keys() - stored.keys()):
        problems.add(f"{path}: missing")
    for path in sorted(stored.keys() - wanted.keys()):
        problems.add(f"{path}: not a parameter of this config")
    for path in sorted(wanted.keys() & stored.keys()):
        if tuple(stored[path].shape) != wanted[path].shape:
            problems.add(f"{path}: {list(stored[path].shape)} where the config needs {list(wanted[path].shape)}")
    problems.raise_if_any()


def _clear(directory: Path) -> None:
    """Removes what is unfinished, also while threads of a save that failed still write into it."""
    for _ in range(100):
        unfinished = [entry for entry in directory.glob("*") if entry.name.endswith(UNFINISHED)]
        if not unfinished:
            break
        for entry in unfinished:
            shutil.rmtree(entry, ignore_errors=True)
        time.sleep(0.02)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax's threads from logging the traceback of what they raise, each its own."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        absl.setLevel(level)


def _context() -> ocp.Context:
    context = ocp.Context()
    # Weights hardly shrink: zstd saves 8 % of float32 and takes seven times as long.
    context.array_options.saving.use_compression = False
    # Replicas share the writing of large arrays; cutting a small one up costs a compilation and saves nothing.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 1 << 20
    return context


@contextlib.contextmanager
def _errors(verb: str, place: Path) -> Iterator[None]:
    """Turns what Orbax raises on a full disk, a missing file or a damaged one into InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # Orbax raises OSError, ValueError, KeyError and, for a damaged array, bare Exception
        cause = error
        while cause.__cause__:
            cause = cause.__cause__
        raise InputError(f"cannot {verb} {place}: {str(cause).partition(chr(10))[0]}") from error


@contextlib.contextmanager
def _writes_checkpoint(run: Path, step: int) -> Iterator[None]:
    """Names the last good checkpoint when this one fails, and leaves nothing of it."""
    try:
        with _errors("write", checkpoint_directory(run, step)):
            yield
    except InputError as error:
        clear_unfinished(run)
        raise InputError(f"{error.summary}; {last_good(run)}") from error


def _to_json(record: ModelRecord | RunRecord) -> dict[str, Any]:
    return pydantic.TypeAdapter(type(record)).dump_python(record, mode="json")
