"""A llama model in a GGUF file (llama.cpp's format, usually quantised) into a Hugging Face directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from upjax.errors import InputError, Problems
from upjax.files import staged_directory
from upjax.hf import safetensors
from upjax.hf.families import LLAMA, hf_config
from upjax.hf.files import CONFIG, SINGLE
from upjax.hf.gguf_tokenizer import write_tokenizer
from upjax.hf.layout import lay_out
from upjax.model import DecoderConfig, Dtypes, RopeConfig, abstract_params

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SIZES = {
    "embed_dim": "embedding_length",
    "hidden_dim": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "max_sequence_length": "context_length",
}
EPSILON = "attention.layer_norm_rms_epsilon"
STORED = {"bfloat16": "BF16", "float32": "F32"}


def convert_gguf(
    gguf_path: Path | str, output_dir: Path | str, dtype: str = "bfloat16", *, overwrite: bool = False
) -> None:
    """Writes the model and tokenizer of a GGUF file of architecture llama as a Hugging Face directory.

    Raises InputError with every problem: another architecture, unknown tensors, an unknown tokenizer.
    """
    if dtype not in STORED:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(STORED)}")
    reader = _open(Path(gguf_path))
    problems = Problems(f"{gguf_path} cannot be converted")
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    config = _config(reader.fields, tensors, problems)
    shapes = {path: leaf.shape for path, leaf in abstract_params(config, Dtypes()).items()}
    expected = {entry.name: entry.shape for entry in lay_out(LLAMA.layouts[0], config, shapes, prefix="model.")}
    for name in sorted(expected.keys() - tensors.keys()):
        problems.add(f"{name}: missing")
    for name, tensor in tensors.items():
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if expected.get(name) != shape:
            problems.add(f"{tensor.name} {list(shape)}: {list(expected[name]) if name in expected else 'unsupported'}")

    with staged_directory(output_dir, overwrite=overwrite) as directory:
        tokens = write_tokenizer(directory, reader.fields, config.max_sequence_length, problems)
        problems.raise_if_any()
        values = hf_config(config, LLAMA) | {"dtype": dtype, "torch_dtype": dtype, **tokens}
        (directory / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        names = sorted(expected)
        arrays = (_dequantized(tensors[name], name, config).astype(safetensors.DTYPES[STORED[dtype]]) for name in names)
        safetensors.write(directory / SINGLE, [(name, STORED[dtype], expected[name]) for name in names], arrays)


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path} is truncated or not a GGUF file: {error}") from error


def _config(fields: Mapping[str, Any], tensors: Mapping[str, Any], problems: Problems) -> DecoderConfig:
    """Returns the model's config; raises InputError with everything that is missing or unsupported."""
    architecture = fields["general.architecture"].contents() if "general.architecture" in fields else None
    if architecture != "llama":
        problems.add(f"general.architecture is {architecture!r}; supported: 'llama'")
        problems.raise_if_any()
    values = {name.removeprefix("llama."): f.contents() for name, f in fields.items() if name.startswith("llama.")}
    for key in (*SIZES.values(), EPSILON):
        if key not in values:
            problems.add(f"llama.{key} is missing")
    if "model.embed_tokens.weight" not in tensors:
        problems.add("token_embd.weight: missing")
    problems.raise_if_any()
    sizes = {name: values[key] for name, key in SIZES.items()}
    head_dim = values.get("attention.key_length", sizes["embed_dim"] // sizes["num_heads"])
    for key, only in (("rope.dimension_count", head_dim), ("rope.scaling.type", "none"), ("expert_count", 0)):
        if values.get(key, only) != only:
            problems.add(f"llama.{key} is {values[key]!r}; supported: {only!r}")
    problems.raise_if_any()
    return DecoderConfig(
        **sizes,
        vocab_size=int(tensors["model.embed_tokens.weight"].shape[1]),
        num_kv_heads=values.get("attention.head_count_kv", sizes["num_heads"]),
        head_dim=head_dim,
        rope=RopeConfig(theta=_shortest(values.get("rope.freq_base", 10_000.0))),
        norm_epsilon=_shortest(values[EPSILON]),
        tied_embeddings="lm_head.weight" not in tensors,
    )


def _hf_name(name: str) -> str:
    """Returns the Hugging Face name of a tensor; its own name where the table has none."""
    part, _, suffix = name.rpartition(".")
    if part.startswith("blk."):
        _, layer, inner = part.split(".", 2)
        return f"model.layers.{layer}.{LAYER_NAMES[inner]}.{suffix}" if inner in LAYER_NAMES else name
    return f"{NAMES[part]}.{suffix}" if part in NAMES else name


def _dequantized(tensor: gguf.ReaderTensor, name: str, config: DecoderConfig) -> np.ndarray:
    """Returns the weights in float32, with the rows of query and key in Hugging Face's order.

    llama.cpp rotates neighbouring rows of a head, Hugging Face rows half a head apart.
    """
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: float) -> float:
    """Returns a float32 as the float of its shortest decimal: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
