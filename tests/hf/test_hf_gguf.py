"""A GGUF becomes the model and tokenizer that transformers makes of it."""

import json
from pathlib import Path

import gguf
import hf_checkpoints as hf
import numpy as np
import pytest
import safetensors.torch
import tokenizers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from upjax.errors import InputError
from upjax.hf import convert_gguf, export_hf, import_hf
from upjax.model import Dtypes
from upjax.upcycle import upcycle

TEXTS = [
    "Hello, world! It's 2024-01-05; we'll pay $1,234.56 (they've said so).",
    "<|im_start|>user\nWhat is 7*8?<|im_end|>\n<|im_start|>assistant\n",
    "Naïve façade — Ελληνικά, русский, 日本語のテキスト, 한국어, العربية 🙂👩‍👩‍👧‍👦",
    "def f(x):\n\treturn  x**2   # two  spaces\r\n\n\n    indented",
    "<|endoftext|>before<file_sep>after<gh_stars>12",
    "",
]


def write_llama(path: Path, pre: str = "smollm", **changes):
    """Writes a tiny float32 GGUF as llama.cpp's converter does; returns the torch model that is in it."""
    model = hf.model_of("llama", tie_word_embeddings=True, num_hidden_layers=2)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    if not changes.get("headless"):
        writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    if "scaling" in changes:
        writer.add_rope_scaling_type(changes["scaling"])
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", *letters[:95], "ab"]
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 96)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    names = {
        "embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "layers.": "blk.",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.": "",
    }
    for name, weight in weights.items():
        for theirs, llama_cpp in names.items():
            name = name.replace(theirs, llama_cpp)
        if "attn_q" in name or "attn_k" in name:
            heads = 4 if "attn_q" in name else 2
            weight = weight.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name, np.ascontiguousarray(weight))
    for name, weight in changes.get("tensors", {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_weights_and_logits_are_those_of_the_model_that_was_written(tmp_path):
    model = write_llama(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32")
    expected = hf.torch_logits(model, hf.tokens())
    np.testing.assert_array_equal(hf.torch_logits(tmp_path / "out", hf.tokens()), expected)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["rms_norm_eps"] == 1e-6 and values["eos_token_id"] == 0 and values["tie_word_embeddings"]
    assert import_hf(tmp_path / "out").config.num_layers == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(architecture="qwen2"), ["general.architecture is 'qwen2'"]),
        (dict(headless=True), ["llama.attention.head_count is missing"]),
        (dict(tokenizer="llama"), ["tokenizer.ggml.model is 'llama'"]),
        (dict(pre="qwen2"), ["tokenizer.ggml.pre is 'qwen2'"]),
        (dict(scaling=gguf.RopeScalingType.YARN), ["rope.scaling.type is 'yarn'"]),
        (
            dict(tensors={"rope_freqs.weight": np.ones(4, np.float32)}, pre="other"),
            ["rope_freqs.weight [4]: unsupported", "ggml.pre is 'other'"],
        ),
    ],
    ids=["architecture", "missing", "tokenizer", "pre-tokenizer", "rope", "several"],
)
def test_what_is_not_supported_is_said(changes, told, tmp_path):
    write_llama(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(InputError) as error:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert len(error.value.problems) == len(told)
    for part in told:
        assert any(part in problem for problem in error.value.problems)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


def test_files_that_are_no_gguf(tmp_path):
    write_llama(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    (tmp_path / "other.gguf").write_bytes(b"not a model at all, just text")
    for name in ("short", "other", "absent"):
        with pytest.raises(InputError, match=name):
            convert_gguf(tmp_path / f"{name}.gguf", tmp_path / "out")


@pytest.mark.slow
def test_smollm2_has_the_weights_that_transformers_reads(smollm2_gguf, smollm2, tmp_path):
    """transformers has its own reader of GGUF files; in float32 the two agree to the bit."""
    convert_gguf(smollm2_gguf, tmp_path / "out", dtype="float32")
    config = hf.transformers.AutoConfig.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    with hf.torch.device("meta"):
        model = hf.transformers.AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(smollm2_gguf, return_tensors=True, model_to_load=model)["tensors"]
    ours = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert len(ours) == 272 and ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert hf.torch.equal(weight, ours[name]), name
    assert (smollm2 / "model.safetensors").stat().st_size == 269_060_552


@pytest.mark.slow
def test_smollm2_tokenizes_as_transformers_does(smollm2_gguf, smollm2):
    theirs = hf.transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    ours = hf.transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == text
    assert (ours.eos_token, ours.bos_token, ours.pad_token) == ("<|im_end|>", "<|im_start|>", "<|im_end|>")
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


@pytest.mark.slow
def test_every_numeral_is_a_piece_of_its_own(smollm2):
    """SmolLM2 splits off whatever Unicode calls a number, which transformers' reader of GGUF files does not know."""
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("a12 \u0663\u0664 \u00bd")
    assert [span for _, span in pieces] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)]


@pytest.mark.slow
def test_smollm2_computes_what_transformers_computes(smollm2):
    tokens_BT = hf.tokens(length=48, vocab_size=49152, batch=1)
    decoder = import_hf(smollm2, dtypes=Dtypes(parameters="float32"))
    expected = hf.torch_logits(smollm2, tokens_BT)
    np.testing.assert_allclose(np.asarray(decoder(tokens_BT).logits), expected, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_smollm2_upcycled_and_exported_is_the_dense_model_to_transformers(smollm2, tmp_path):
    decoder = import_hf(smollm2, dtypes=Dtypes(parameters="float32"))
    moe = upcycle(decoder, num_experts=3, experts_per_token=2)
    assert export_hf(moe, tmp_path / "moe", tokenizer_files=smollm2) == "mixtral"
    tokens_BT = np.random.default_rng(0).integers(0, 49152, (1, 64))
    dense, routed = hf.torch_logits(smollm2, tokens_BT), hf.torch_logits(tmp_path / "moe", tokens_BT)
    assert np.abs(routed - dense).max() <= 1e-3
    assert np.abs(routed - np.asarray(moe(tokens_BT.astype(np.int32)).logits)).max() <= 1e-3
