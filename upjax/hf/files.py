"""The files of a Hugging Face model directory: its config.json, and the headers of its safetensors."""

import json
import shutil
from pathlib import Path
from typing import Any

from upjax.errors import Problems
from upjax.hf.safetensors import StoredTensor, read_header

CONFIG = "config.json"
SINGLE = "model.safetensors"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)
"""What goes with a model unchanged from import to export, where it is there."""


SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_json(file: Path, problems: Problems) -> dict[str, Any] | None:
    """Returns the mapping in a JSON file; None, with the fault added to `problems`, where there is none."""
    if not file.is_file():
        problems.add(f"{file}: no such file")
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        problems.add(f"{file}: not JSON: {error}")
        return None
    if not isinstance(values, dict):
        problems.add(f"{file}: a mapping is expected, not {type(values).__name__}")
        return None
    return values


def stored_tensors(directory: Path, problems: Problems) -> tuple[dict[str, StoredTensor], set[str]]:
    """Returns the tensors of a model directory by name, from one file or from the shards that its index names.

    Also returns the names that the index gives and no shard has; those are among the `problems` already.
    """
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE, problems), set()
    if (directory / INDEX).is_file():
        return _indexed(directory, problems)
    problem = f"{directory}: neither {SINGLE} nor {INDEX}"
    pickled = sorted(file.name for pattern in PICKLED for file in directory.glob(pattern))
    if pickled:
        problem += (
            f"; {', '.join(pickled)} may be pickled weights, which upjax never loads since they can run code: "
            "convert them with transformers, save_pretrained(..., safe_serialization=True)"
        )
    problems.add(problem)
    return {}, set()


def _indexed(directory: Path, problems: Problems) -> tuple[dict[str, StoredTensor], set[str]]:
    index = directory / INDEX
    weight_map = (read_json(index, problems) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        problems.add(f"{index}: weight_map must map the name of each tensor to its file")
        return {}, set()
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            problems.add(f"{index}: {shard!r} is not the name of a file beside it")
            continue
        if not (directory / shard).is_file():
            count = sum(file == shard for file in weight_map.values())
            problems.add(f"{directory / shard}: no such file; {INDEX} places {count} tensors in it")
            continue
        stored = read_header(directory / shard, problems)
        placed = {name for name, file in weight_map.items() if file == shard}
        for name in sorted(placed - stored.keys() if stored else ()):
            problems.add(f"{directory / shard}: {name} is not in it, though {INDEX} places it there")
        for name in sorted(stored.keys() - placed):
            problems.add(f"{directory / shard}: {name} is in it, though {INDEX} does not place it there")
        tensors |= stored
    return tensors, weight_map.keys() - tensors.keys()


def copy_tokenizer(source: Path | str, target: Path | str) -> None:
    """Copies the files that go with a model unchanged.

    Where there is no generation_config.json, one is written with the special tokens that config.json names: an
    exported model must know where to stop.
    """
    source, target = Path(source), Path(target)
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if not (source / GENERATION).is_file() and (source / CONFIG).is_file():
        problems = Problems(f"the tokenizer of {source} cannot be copied")
        tokens = {key: token for key, token in special_tokens(source, problems).items() if token is not None}
        problems.raise_if_any()
        (target / GENERATION).write_text(json.dumps(tokens, indent=2) + "\n", encoding="utf-8")


def special_tokens(directory: Path, problems: Problems) -> dict[str, Any]:
    """Returns the ids of the special tokens by their names in config.json; None for those that no file names."""
    for file in (directory / GENERATION, directory / CONFIG):
        if file.is_file():
            values = read_json(file, problems) or {}
            return {key: values.get(key) for key in SPECIAL_TOKENS}
    return dict.fromkeys(SPECIAL_TOKENS)
