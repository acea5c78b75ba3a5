"""What lies at a path: a Hugging Face checkpoint, an upjax model, a run, a dataset."""

import dataclasses
from pathlib import Path
from typing import Any

from upjax.checkpoint import CHECKPOINTS, MODEL_FILE, list_steps, load_model, read_model
from upjax.data import load_info
from upjax.errors import InputError
from upjax.hf import import_hf, read_config
from upjax.model import Decoder, DecoderConfig, Dtypes, num_params

HF_CONFIG, DATASET = "config.json", "dataset.json"


def kind_of(path: Path | str) -> str:
    """Returns "hf", "model", "run" (also for one checkpoint of it) or "dataset"; raises InputError for all else."""
    path = Path(path)
    if (path / MODEL_FILE).is_file():
        return "model"
    if (path / CHECKPOINTS).is_dir() or path.parent.name == CHECKPOINTS:
        return "run"
    if (path / DATASET).is_file():
        return "dataset"
    if (path / HF_CONFIG).is_file():
        return "hf"
    looked = [MODEL_FILE, f"{CHECKPOINTS}/", DATASET, HF_CONFIG]
    raise InputError(
        f"{path} is no model, run, dataset or Hugging Face checkpoint", [f"no {name} in it" for name in looked]
    )


def load(path: Path | str, *, compute: str | None = None) -> Decoder:
    """Returns the model at `path`: a Hugging Face checkpoint, an upjax model, a run's latest checkpoint or one of them.

    Parameters keep the dtype that they are stored in; the layers compute in `compute`, by default the same. Raises
    InputError as `import_hf` and `load_model` do.
    """
    kind = kind_of(path)
    if kind == "dataset":
        raise InputError(f"{path} is a dataset, not a model")
    stored = read_config(path)[2] if kind == "hf" else read_model(path).parameters_dtype
    dtypes = Dtypes(parameters=stored, compute=compute or stored)
    return import_hf(path, dtypes=dtypes) if kind == "hf" else load_model(path, dtypes=dtypes)


def inspect(path: Path | str) -> dict[str, Any]:
    """Returns what lies at `path` as plain data; reads no weights."""
    kind = kind_of(path)
    if kind == "dataset":
        return {"kind": kind, **dataclasses.asdict(load_info(path))}
    if kind == "hf":
        config, family, dtype = read_config(path)
        return {"kind": kind, "family": family, **_model_facts(config, dtype)}
    record = read_model(path)
    facts = {"kind": kind, **_model_facts(record.config, record.parameters_dtype), "provenance": record.provenance}
    return facts | ({"checkpoints": list_steps(Path(path))} if (Path(path) / CHECKPOINTS).is_dir() else {})


def _model_facts(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    return {
        "parameters": num_params(config),
        "active_parameters": num_params(config, active=True),
        "parameters_dtype": dtype,
        "config": dataclasses.asdict(config),
    }
