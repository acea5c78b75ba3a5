"""Hugging Face checkpoints into a Decoder: checked from the headers, then read straight to the shards that need them.

Peak memory is about the shards that live on this host plus the largest tensor.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from upjax.errors import InputError, Problems
from upjax.hf.families import decoder_config
from upjax.hf.families.common import Family
from upjax.hf.files import CONFIG, read_json, stored_tensors
from upjax.hf.layout import Entry, lay_out, uncovered
from upjax.hf.safetensors import DTYPES, StoredTensor, has_nonfinite
from upjax.model import Decoder, DecoderConfig, Dtypes, abstract_params, build

KEPT = {"F32": "float32", "BF16": "bfloat16", "F16": "float32"}
"""The parameter dtype that holds a checkpoint's without loss; there are no float16 parameters."""

ALIGNMENT = 64
"""Host arrays that begin at such an address become device arrays of the CPU as they are, without a copy."""

BLOCK_BYTES = 1 << 20
"""How much of a tensor is checked and converted at a time."""


def import_hf(path: Path | str, *, dtypes: Dtypes | None = None, allow_nonfinite: bool = False) -> Decoder:
    """Returns the model of a Hugging Face directory, laid out on the mesh that `jax.set_mesh` has set.

    Parameters keep the checkpoint's dtype unless `dtypes` says otherwise. Raises InputError with every problem of the
    config and the files before the first tensor is read, and with every tensor that holds a NaN or an infinity after.
    """
    config, family, tensors = _read_headers(Path(path), dtypes)
    dtypes = dtypes or Dtypes(parameters=_parameters_dtype(tensors))
    leaves = abstract_params(config, dtypes)
    entries = _matching_layout(family, config, leaves, tensors)
    assert not uncovered(entries, {name: leaf.shape for name, leaf in leaves.items()})

    by_leaf: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_leaf[entry.path].append(entry)
    nonfinite: set[str] = set()
    flat = {name: _read_leaf(leaf, by_leaf[name], tensors, nonfinite) for name, leaf in leaves.items()}
    if nonfinite and not allow_nonfinite:
        raise InputError(
            f"weights of {path} are not all finite", [f"{name}: NaN or infinity" for name in sorted(nonfinite)]
        )
    return build(config, dtypes, flat)


def read_config(path: Path | str) -> tuple[DecoderConfig, str, str]:
    """Returns what a Hugging Face directory holds: the model's config, its model_type, its parameters' dtype."""
    config, family, tensors = _read_headers(Path(path), None)
    return config, family.model_type, _parameters_dtype(tensors)


def _read_headers(directory: Path, dtypes: Dtypes | None) -> tuple[DecoderConfig, Family, dict[str, StoredTensor]]:
    """Returns config, family and tensors; raises InputError with every problem that shows without reading a tensor."""
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; download the model first, with `hf download` for example")
    problems = Problems(f"{directory} cannot be imported")
    values = read_json(directory / CONFIG, problems)
    described = decoder_config(values, directory / CONFIG, problems) if values is not None else None
    tensors, lost = stored_tensors(directory, problems)
    if described and tensors:
        config, family = described
        _check_tensors(family, config, tensors, lost, problems, dtypes)
    problems.raise_if_any()
    assert described
    return *described, tensors


def _check_tensors(
    family: Family,
    config: DecoderConfig,
    tensors: dict[str, StoredTensor],
    lost: set[str],
    problems: Problems,
    dtypes: Dtypes | None,
) -> None:
    """Adds the tensors that are missing (but not `lost`, reported before), left over, or wrong in shape or dtype."""
    entries = _matching_layout(family, config, abstract_params(config, Dtypes()), tensors)
    expected = {entry.name: entry for entry in entries}
    for name in expected:
        if name not in tensors and name not in lost:
            problems.add(f"{name}: missing")
    kept = _parameters_dtype(tensors)
    for name, tensor in tensors.items():
        if name not in expected:
            if not _ignored(family, config, tensor, tensors, problems):
                problems.add(f"{tensor.file}: {name} is not a tensor of this {family.model_type} model")
            continue
        if tensor.shape != expected[name].shape:
            problems.add(f"{tensor.file}: {name} has shape {list(tensor.shape)}, not {list(expected[name].shape)}")
        if tensor.dtype not in DTYPES:
            problems.add(f"{tensor.file}: {name} is {tensor.dtype}; supported: {', '.join(DTYPES)}")
        elif dtypes is None and KEPT[tensor.dtype] != kept == "bfloat16" and not expected[name].path.endswith("router"):
            problems.add(f"{tensor.file}: {name} is {tensor.dtype} among {kept}; name one dtype to convert all to it")


def _ignored(
    family: Family,
    config: DecoderConfig,
    tensor: StoredTensor,
    tensors: dict[str, StoredTensor],
    problems: Problems,
) -> bool:
    """Returns whether a tensor that the model has not may be there; adds a tied head that is not the embedding."""
    if tensor.name != "lm_head.weight" or not config.tied_embeddings:
        return bool(re.fullmatch(family.ignored, tensor.name))
    embedding = tensors.get(f"{_prefix(tensors)}embed_tokens.weight")
    same = embedding and (embedding.shape, embedding.dtype) == (tensor.shape, tensor.dtype)
    if same and tensor.dtype in DTYPES and not np.array_equal(_bits(embedding), _bits(tensor)):
        problems.add(f"{tensor.file}: {tensor.name} differs from the embedding, though tie_word_embeddings is true")
    elif not same:
        return False
    return True


def _bits(tensor: StoredTensor) -> np.ndarray:
    return tensor.read().view(f"u{DTYPES[tensor.dtype].itemsize}")


def _prefix(tensors: dict[str, StoredTensor]) -> str:
    return "" if "embed_tokens.weight" in tensors else "model."


def _matching_layout(family: Family, config: DecoderConfig, leaves, tensors) -> list[Entry]:
    """Returns the family's layout of which fewest tensors are missing."""
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    laid_out = [lay_out(rows, config, shapes, _prefix(tensors)) for rows in family.layouts]
    return min(laid_out, key=lambda entries: len({entry.name for entry in entries} - tensors.keys()))


def _parameters_dtype(tensors: dict[str, StoredTensor]) -> str:
    """Returns the dtype of most elements, as parameters keep it."""
    elements: Counter[str] = Counter()
    for tensor in tensors.values():
        elements[KEPT.get(tensor.dtype, "float32")] += int(np.prod(tensor.shape))
    return elements.most_common(1)[0][0]


def _read_leaf(
    leaf: jax.ShapeDtypeStruct, entries: Sequence[Entry], tensors: dict[str, StoredTensor], nonfinite: set[str]
) -> jax.Array:
    """Returns one parameter; each of its shards on this host is read once, however many devices have it."""
    shards: dict[tuple, np.ndarray] = {}

    def shard(index):
        slices = tuple(slice(*s.indices(size)) for s, size in zip(index, leaf.shape, strict=True))
        key = tuple((s.start, s.stop) for s in slices)
        if key not in shards:
            shards[key] = _read_shard(slices, leaf.dtype, entries, tensors, nonfinite)
        return shards[key]

    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(leaf.shape, sharding, shard, dtype=leaf.dtype)


def _read_shard(slices, dtype, entries, tensors, nonfinite) -> np.ndarray:
    out = _aligned_empty(tuple(s.stop - s.start for s in slices), np.dtype(dtype))
    for entry in entries:
        leading = slices[: len(entry.index)]
        if all(s.start <= i < s.stop for i, s in zip(entry.index, leading, strict=True)):
            part = tensors[entry.name].read(entry.source(slices[len(entry.index) :]))
            position = tuple(i - s.start for i, s in zip(entry.index, leading, strict=True))
            if not _copy(part, out[position], entry.transposed):
                nonfinite.add(entry.name)
    return out


def _copy(part: np.ndarray, out: np.ndarray, transposed: bool) -> bool:
    """Copies `part` to `out` and returns whether all of it is finite; a block at a time, so both happen in cache."""
    if part.ndim == 3:
        return all([_copy(part[i], out[i], transposed) for i in range(len(part))])
    out = out.swapaxes(-1, -2) if transposed else out
    step, finite = max(1, BLOCK_BYTES * len(part) // max(1, part.nbytes)), True
    for start in range(0, len(part), step):
        block = np.ascontiguousarray(part[start : start + step])
        finite &= not has_nonfinite(block)
        # Converted while contiguous: numpy is slow at converting bfloat16 as it transposes.
        out[start : start + step] = block.astype(out.dtype, copy=False)
    return finite


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
