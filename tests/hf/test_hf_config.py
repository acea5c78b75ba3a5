"""config.json is read strictly: both generations of spelling, every unsupported value named."""

import json
import logging

import hf_checkpoints as hf
import pytest

from upjax.errors import InputError, Problems
from upjax.hf.families import decoder_config
from upjax.model import DecoderConfig, MoEConfig, RopeConfig

LLAMA = dict(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=128,
)
MISTRAL = LLAMA | dict(model_type="mistral", num_key_value_heads=2)
QWEN2 = MISTRAL | dict(model_type="qwen2")
QWEN3 = MISTRAL | dict(model_type="qwen3")
MIXTRAL = MISTRAL | dict(model_type="mixtral", num_local_experts=8)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
QWEN2_MOE = MISTRAL | EXPERTS | dict(model_type="qwen2_moe", shared_expert_intermediate_size=0)
QWEN3_MOE = MISTRAL | EXPERTS | dict(model_type="qwen3_moe")
FAMILIES = dict(
    llama=LLAMA, mistral=MISTRAL, qwen2=QWEN2, qwen3=QWEN3, mixtral=MIXTRAL, qwen2_moe=QWEN2_MOE, qwen3_moe=QWEN3_MOE
)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


def parse(values: dict) -> DecoderConfig:
    problems = Problems("bad")
    described = decoder_config(values, "config.json", problems)
    problems.raise_if_any()
    return described[0]


def faults(values: dict) -> list[str]:
    with pytest.raises(InputError) as error:
        parse(values)
    return list(error.value.problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_absent_key_means_is_what_transformers_means(family):
    """The class that transformers has for the family fills the same gaps with the same values."""
    values, config = FAMILIES[family], parse(FAMILIES[family])
    theirs = hf.transformers.AutoConfig.for_model(**values)
    assert config.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert config.norm_epsilon == theirs.rms_norm_eps
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 32 // 4)
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert (config.sliding_window or None) == (theirs.sliding_window or None if family != "llama" else None)
    if config.moe:
        assert config.moe.experts_per_token == theirs.num_experts_per_tok
        renormalized = getattr(theirs, "norm_topk_prob", True)
        assert config.moe.router == ("softmax_topk_renormalized" if renormalized else "softmax_topk")


@pytest.mark.parametrize("name", hf.CASES)
def test_the_spelling_of_v4_means_the_same_as_that_of_v5(name, tmp_path):
    family, settings = hf.CASES[name]
    config = getattr(hf.transformers, f"{family}Config")(**(hf.BASE | settings))
    config.save_pretrained(tmp_path)
    current = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in current.items() if key != "rope_parameters"}
    scaling = dict(current["rope_parameters"])
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling if scaling["type"] != "default" else None
    old["torch_dtype"] = "bfloat16"
    if family == "Qwen3Moe":
        old["num_experts"] = old.pop("num_local_experts")
    assert parse(old) == parse(current) == parse(old | current)


def test_every_field_arrives():
    values = QWEN3_MOE | dict(
        head_dim=24,
        rms_norm_eps=1e-5,
        rope_theta=1000,
        rope_scaling=dict(rope_type="llama3", **LLAMA3),
        tie_word_embeddings=True,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=7,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    )
    assert parse(values) == DecoderConfig(
        vocab_size=64,
        embed_dim=32,
        hidden_dim=48,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        max_sequence_length=128,
        rope=RopeConfig(theta=1000.0, scaling="llama3", factor=8.0, original_max_sequence_length=32),
        norm_epsilon=1e-5,
        qkv_bias=True,
        attention_out_bias=True,
        qk_norm=True,
        tied_embeddings=True,
        sliding_window=7,
        window_layers=(0, 1, 2, 3),
        moe=MoEConfig(num_experts=8, experts_per_token=2, hidden_dim=16),
        moe_layers=(3,),
    )


def test_smollm2s_own_config_is_understood():
    """The keys of the published model, with the odd ones that its authors added."""
    odd = dict(is_llama_config=True, rope_interleaved=False, **{"transformers.js_config": {"dtype": "q4"}})
    config = parse(LLAMA | odd | dict(pretraining_tp=1, rope_scaling=None, rope_theta=100000, torch_dtype="bfloat16"))
    assert config.rope.theta == 100_000.0


BAD = {
    "activation": (LLAMA, dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "missing": (LLAMA, dict(hidden_size=None), "hidden_size is missing"),
    "kind": (LLAMA, dict(num_hidden_layers="4"), "num_hidden_layers is '4'"),
    "negative": (LLAMA, dict(rms_norm_eps=-1e-6), "rms_norm_eps is -1e-06"),
    "unknown": (LLAMA, dict(mixture_of_depths=True), "mixture_of_depths is True; unknown"),
    "heads": (LLAMA, dict(num_attention_heads=5), "hidden_size is 32"),
    "groups": (LLAMA, dict(num_key_value_heads=3), "num_heads 4 is not a multiple of num_kv_heads 3"),
    "rope type": (LLAMA, dict(rope_scaling=dict(type="yarn", factor=4.0)), "rope_scaling is {'type': 'yarn'"),
    "rope type v5": (LLAMA, dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "rope_parameters is"),
    "rope factor": (LLAMA, dict(rope_scaling=dict(type="linear")), "a positive number for factor"),
    "rope extra": (LLAMA, dict(rope_scaling=dict(type="linear", factor=2.0, beta_fast=1)), "without beta_fast"),
    "rope nested": (LLAMA, dict(rope_parameters=dict(full_attention=dict(rope_theta=1.0))), "without full_attention"),
    "rope twice": (LLAMA, dict(rope_theta=1.0, rope_parameters=dict(rope_theta=2.0)), "rope_theta is 1.0"),
    "rope scaled twice": (
        LLAMA,
        dict(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(rope_type="linear", factor=4.0)),
        "rope_scaling is",
    ),
    "partial rotary": (LLAMA, dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "soft cap": (LLAMA, dict(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
    "quantized": (LLAMA, dict(quantization_config=dict(quant_method="gptq")), "quantization_config is"),
    "own code": (LLAMA, dict(auto_map=dict(AutoModel="x.Y")), "auto_map is"),
    "interleaved": (LLAMA, dict(rope_interleaved=True), "rope_interleaved is True"),
    "layer types": (QWEN2, dict(layer_types=["full_attention"] * 3), "layer_types is"),
    "layer kind": (QWEN2, dict(layer_types=["chunked_attention"] * 4), "layer_types is"),
    "shared expert": (QWEN2_MOE, dict(shared_expert_intermediate_size=64), "shared_expert_intermediate_size is 64"),
    "default shared": (
        QWEN2_MOE,
        dict(shared_expert_intermediate_size=None),
        "shared_expert_intermediate_size is None",
    ),
    "old window": (QWEN2_MOE, dict(use_sliding_window=True), "layer_types is None"),
    "no experts": (QWEN3_MOE, dict(mlp_only_layers=[0, 1, 2, 3]), "decoder_sparse_step is None"),
    "dense layer": (QWEN3_MOE, dict(mlp_only_layers=[4]), "mlp_only_layers is [4]"),
    "two counts": (QWEN3_MOE, dict(num_local_experts=4), "num_local_experts is 4"),
    "no count": (MIXTRAL, dict(num_local_experts=None), "num_experts is missing"),
    "top-k": (MIXTRAL, dict(num_experts_per_tok=9), "experts_per_token=9"),
    "family": (LLAMA, dict(model_type="gemma3"), "model_type is 'gemma3'; supported: llama, mistral"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_supported_is_said(name):
    base, change, told = BAD[name]
    (problem,) = faults(base | change)
    assert problem.startswith("config.json: ") and told in problem


def test_all_faults_are_listed_at_once():
    changes = [BAD[name][1] for name in ("activation", "kind", "unknown", "rope type", "soft cap", "quantized")]
    assert len(faults(LLAMA | {key: value for change in changes for key, value in change.items()})) == len(changes)


def test_noise_in_training_is_not_applied_and_that_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        parse(LLAMA | dict(attention_dropout=0.0))
        assert not caplog.records
        parse(LLAMA | dict(attention_dropout=0.1))
    assert "attention_dropout is 0.1" in caplog.text
