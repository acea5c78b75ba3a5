"""A Decoder into a Hugging Face checkpoint that transformers and vLLM load, written tensor by tensor."""

import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from upjax.errors import InputError, Problems
from upjax.files import staged_directory
from upjax.hf import safetensors
from upjax.hf.families import choose_family, family_named, hf_config
from upjax.hf.families.common import Family
from upjax.hf.files import CONFIG, INDEX, SINGLE, SPECIAL_TOKENS, copy_tokenizer, special_tokens
from upjax.hf.layout import Entry, lay_out, uncovered
from upjax.model import Decoder, DecoderConfig, flat_params

log = logging.getLogger(__name__)

LAYOUT_OF = "5.24.0"
"""The version of transformers whose layout is written; v4 and vLLM read it too."""

STORED = {"float32": "F32", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """A tensor to write: the part of our parameters that `entry` names, or zeros where it is None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    entry: Entry | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * safetensors.ITEM_BYTES[self.dtype]


def export_hf(
    decoder: Decoder,
    path: Path | str,
    *,
    family: str | None = None,
    vocab_size: int | None = None,
    tokenizer_files: Path | str | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> str:
    """Returns the model_type of the Hugging Face directory that it writes: `family`, or the first that fits.

    Embedding and head are cut to `vocab_size`, the tokenizer's files are copied from the directory `tokenizer_files`,
    and weights keep the parameters' dtype, in files of at most `shard_bytes`. Raises InputError naming everything that
    the format cannot express; `path` appears only when it is whole.
    """
    tokenizer = Path(tokenizer_files) if tokenizer_files else None
    config = _cut(decoder.config, vocab_size or decoder.config.vocab_size)
    chosen = family_named(family or choose_family(config))
    dtype = decoder.dtypes.parameters
    values = hf_config(config, chosen) | _common_values(config, dtype, tokenizer)
    params = flat_params(decoder)
    outputs = _outputs(params, config, chosen, STORED[dtype])
    _check_room(Path(path), sum(output.nbytes for output in outputs))
    for difference in chosen.differs(config):
        log.warning("%s as %s: %s", path, chosen.model_type, difference)

    with staged_directory(path, overwrite=overwrite) as directory:
        _write_weights(directory, outputs, params, shard_bytes)
        (directory / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if tokenizer:
            copy_tokenizer(tokenizer, directory)
    return chosen.model_type


def _cut(config: DecoderConfig, vocab_size: int) -> DecoderConfig:
    if not 1 <= vocab_size <= config.vocab_size:
        raise InputError(f"vocab_size {vocab_size} to export is not within the model's {config.vocab_size}")
    return dataclasses.replace(config, vocab_size=vocab_size)


def _common_values(config: DecoderConfig, dtype: str, tokenizer: Path | None) -> dict[str, Any]:
    """Returns the keys of config.json that no family decides; `torch_dtype` is what v4 calls `dtype`."""
    problems = Problems(f"special tokens of {tokenizer} do not fit the model")
    tokens = special_tokens(tokenizer, problems) if tokenizer else dict.fromkeys(SPECIAL_TOKENS)
    for key, value in tokens.items():
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < config.vocab_size:
                problems.add(f"{key} {token} is not below vocab_size {config.vocab_size}")
    problems.raise_if_any()
    return {"dtype": dtype, "torch_dtype": dtype, "transformers_version": LAYOUT_OF, **tokens}


def _outputs(params: dict[str, jax.Array], config: DecoderConfig, family: Family, dtype: str) -> list[Output]:
    shapes = {path: array.shape for path, array in params.items()}
    shapes["embedding"] = (config.vocab_size, config.embed_dim)
    if "head" in shapes:
        shapes["head"] = (config.embed_dim, config.vocab_size)
    entries = lay_out(family.layouts[0], config, shapes, prefix="model.")
    assert not uncovered(entries, shapes)
    written = [Output(name=entry.name, dtype=dtype, shape=entry.shape, entry=entry) for entry in entries]
    zeros = [Output(name=zero.name, dtype=dtype, shape=zero.shape, entry=None) for zero in family.zeros(config)]
    return written + zeros


def _check_room(path: Path, nbytes: int) -> None:
    """Raises InputError when the disk cannot hold the weights, before anything is written."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise InputError(f"{path} needs {nbytes:,} bytes; the disk has {free:,} free")


def _write_weights(directory: Path, outputs: Sequence[Output], params: dict[str, jax.Array], shard_bytes: int) -> None:
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        size += output.nbytes
        if shards[-1] and size > shard_bytes:
            shards.append([])
            size = output.nbytes
        shards[-1].append(output)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        safetensors.write(directory / name, [(o.name, o.dtype, o.shape) for o in shard], _arrays(shard, params))
    if len(shards) > 1:
        index = {
            "metadata": {
                "total_parameters": sum(math.prod(output.shape) for output in outputs),
                "total_size": sum(output.nbytes for output in outputs),
            },
            "weight_map": {output.name: name for name, shard in zip(names, shards, strict=True) for output in shard},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _arrays(outputs: Sequence[Output], params: dict[str, jax.Array]) -> Iterator[np.ndarray]:
    for output in outputs:
        dtype = safetensors.DTYPES[output.dtype]
        if output.entry is None:
            yield np.zeros(output.shape, dtype)
            continue
        array = _fetch(params[output.entry.path], output.entry.index)
        if output.entry.transposed:
            array = array.swapaxes(-1, -2)
        if output.entry.path in ("embedding", "head"):
            array = array[: output.shape[0]]
        yield array.astype(dtype, copy=False)


def _fetch(array: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Returns `array[index]` on the host, from the shards that hold it and from nothing else."""
    if not array.is_fully_addressable:
        raise NotImplementedError(
            "export from several processes: restore the checkpoint in one process and export there"
        )
    out = np.empty(array.shape[len(index) :], array.dtype)
    for shard in array.addressable_shards:
        starts = [s.indices(size)[0] for s, size in zip(shard.index, array.shape, strict=True)]
        local = tuple(i - start for i, start in zip(index, starts, strict=False))
        within = all(0 <= i < size for i, size in zip(local, shard.data.shape, strict=False))
        if shard.replica_id == 0 and within:
            # The shard is on one device, so it cannot be sliced under the mesh that the caller may have set.
            with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
                part = shard.data[local] if local else shard.data
            out[shard.index[len(index) :]] = np.asarray(part)
    return out
