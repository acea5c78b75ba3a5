"""Tiny random checkpoints made by transformers, and what torch says they compute."""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import pytest

if sys.version_info >= (3, 12):  # the test extra installs the oracle for 3.11 alone; there a missing one is an error
    pytest.importorskip("torch", reason="the oracle, transformers with torch, is installed on Python 3.11 alone")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

transformers.utils.logging.disable_progress_bar()

BASE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
DENSE_CASES = {
    "llama": ("Llama", {}),
    "llama_tied_biased": ("Llama", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama_rope_llama3": ("Llama", dict(rope_parameters=LLAMA3, head_dim=12)),
    "llama_rope_linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=100.0, factor=2.0))),
    "mistral_window": ("Mistral", dict(sliding_window=5)),
    "mistral_global": ("Mistral", dict(sliding_window=None, head_dim=16)),
    "qwen2_tied": ("Qwen2", dict(tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "qwen2_window": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3_biased_window": (
        "Qwen3",
        dict(
            head_dim=8,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}
MOE_CASES = {
    "mixtral": ("Mixtral", dict(num_local_experts=3)),
    "mixtral_window_tied": ("Mixtral", dict(num_local_experts=4, sliding_window=5, tie_word_embeddings=True)),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | dict(shared_expert_intermediate_size=0)),
    "qwen2_moe_mixed": (
        "Qwen2Moe",
        EXPERTS
        | dict(shared_expert_intermediate_size=0, norm_topk_prob=True, qkv_bias=False, decoder_sparse_step=2)
        | dict(use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2)
        | dict(num_hidden_layers=4),
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | dict(head_dim=16, norm_topk_prob=True)),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        EXPERTS
        | dict(num_hidden_layers=5, mlp_only_layers=[0, 3], attention_bias=True)
        | dict(use_sliding_window=True, sliding_window=6, tie_word_embeddings=True),
    ),
}
CASES = DENSE_CASES | MOE_CASES


def model_of(name: str, seed: int = 0, **changes):
    """Returns the torch model of a case with every parameter random, norms and biases included."""
    family, settings = CASES[name]
    config = getattr(transformers, f"{family}Config")(**(BASE | settings | changes))
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # Qwen2-MoE's shared expert of no width.
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        center = 1.0 if "norm" in name else 0.0
        parameter.data = center + 0.15 * torch.randn(parameter.shape)
    return model.eval()


def save(name: str, directory: Path, dtype: str = "float32", **options) -> Path:
    """Returns the directory of a case's checkpoint, written by transformers."""
    changes = options.pop("changes", {})
    model_of(name, **changes).to(getattr(torch, dtype)).save_pretrained(directory, **options)
    return directory


def tokens(length: int = 24, vocab_size: int = 97, batch: int = 2) -> np.ndarray:
    """Returns random tokens [B, T]."""
    return np.random.default_rng(0).integers(0, vocab_size, (batch, length), dtype=np.int32)


def torch_logits(source, tokens_BT: np.ndarray) -> np.ndarray:
    """Returns the logits of a torch model, or of a directory loaded by transformers, in float32."""
    if isinstance(source, Path):
        source = reload(source)[0]
    with torch.no_grad():
        return source.float()(torch.from_numpy(tokens_BT).long()).logits.numpy()


def reload(directory: Path):
    """Returns the model that transformers loads from a directory, and what it says was missing or left over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    return model.eval(), info


def edit_config(directory: Path, remove: tuple[str, ...] = (), **changes) -> Path:
    """Returns the directory after its config.json has changed."""
    file = directory / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in (values | changes).items() if key not in remove}))
    return directory
