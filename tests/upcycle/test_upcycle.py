"""Upcycling keeps the function of the dense model, and its rules leave nothing over."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upjax import verify
from upjax.errors import InputError
from upjax.mesh import make_mesh
from upjax.model import Decoder, DecoderConfig, Dtypes, abstract_params, build, flat_params
from upjax.upcycle import Rule, apply_rules, moe_config, upcycle
from upjax.upcycle.dense_to_moe import COPY
from upjax.upcycle.experts import keep

CONFIG = DecoderConfig(
    vocab_size=61,
    embed_dim=32,
    hidden_dim=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_sequence_length=64,
    qkv_bias=True,
)
TOKENS = np.random.default_rng(0).integers(0, 61, (8, 24)).astype(np.int32)


def dense(dtypes=Dtypes()) -> Decoder:  # noqa: B008
    return Decoder(CONFIG, dtypes, key=jax.random.key(0))


@pytest.mark.parametrize("router", ("softmax_topk_renormalized", "topk_softmax"))
@pytest.mark.parametrize("moe_layers", (None, (1, 3), (0, 2, 3)))
@pytest.mark.parametrize(("num_experts", "experts_per_token"), ((8, 2), (5, 3), (1, 1)))
def test_the_moe_computes_what_the_dense_model_did(num_experts, experts_per_token, moe_layers, router):
    moe = upcycle(
        dense(), num_experts=num_experts, experts_per_token=experts_per_token, moe_layers=moe_layers, router=router
    )
    agreement = verify(dense(), moe, TOKENS)
    assert agreement.max_abs_logit_diff < 1e-5
    assert agreement.top1_agreement == 1.0


def test_gates_that_are_not_renormalised_scale_the_output_and_verify_sees_it():
    moe = upcycle(dense(), num_experts=8, experts_per_token=2, router="softmax_topk")
    assert verify(dense(), moe, TOKENS).max_abs_logit_diff > 1e-3


def test_every_parameter_is_a_copy_or_a_new_router():
    source, made = flat_params(dense()), flat_params(upcycle(dense(), num_experts=3, experts_per_token=2))
    for path, value in made.items():
        if path.endswith("router"):
            assert value.dtype == jnp.float32
            assert 0.015 < float(jnp.std(value)) < 0.025
            assert len(np.unique(value)) == value.size  # no two layers, dims or experts share a draw
        elif "/moe/" in path:
            expected = np.broadcast_to(source[path.replace("/moe/", "/mlp/")][:, None], value.shape)
            np.testing.assert_array_equal(value, expected)
        else:
            np.testing.assert_array_equal(value, source[path])


def test_bfloat16_stays_bfloat16():
    moe = upcycle(dense(Dtypes("bfloat16", "bfloat16")), num_experts=4, experts_per_token=2)
    dtypes = {path.rpartition("/")[2]: value.dtype for path, value in flat_params(moe).items()}
    assert dtypes.pop("router") == jnp.float32
    assert set(dtypes.values()) == {jnp.dtype("bfloat16")}


def test_the_seed_draws_the_routers():
    router = lambda seed: flat_params(upcycle(dense(), num_experts=4, experts_per_token=2, seed=seed))[
        "segments/0/0/moe/router"
    ]
    np.testing.assert_array_equal(router(0), router(0))
    assert (router(0) != router(1)).all()


@pytest.mark.parametrize("shape", [(1, 2, 4), (1, 1, 8)])
def test_on_a_mesh_each_device_makes_its_own_experts(shape):
    alone = flat_params(upcycle(dense(), num_experts=8, experts_per_token=2))
    with jax.set_mesh(make_mesh(*shape)):
        wanted = abstract_params(CONFIG, Dtypes())
        flat = {path: jax.device_put(np.asarray(x), wanted[path].sharding) for path, x in flat_params(dense()).items()}
        source = build(CONFIG, Dtypes(), flat)
        moe = upcycle(source, num_experts=8, experts_per_token=2)
        assert verify(source, moe, TOKENS, batch_size=8).max_abs_logit_diff < 1e-5
    for path, value in flat_params(moe).items():
        np.testing.assert_allclose(value, alone[path], rtol=1e-6, atol=1e-8, err_msg=path)
    gate = flat_params(moe)["segments/0/0/moe/gate"]
    assert gate.addressable_shards[0].data.shape == (4, 8 // shape[2], 32 // shape[1], 48)


def test_what_rules_leave_over_is_listed_at_once():
    config = moe_config(CONFIG, num_experts=4, experts_per_token=2)
    rules = [rule for rule in COPY if rule.target != r"layers/\d+/moe/router" and "attention" not in str(rule.source)]
    rules.append(Rule("embedding", "embedding", keep))
    with pytest.raises(InputError) as error:
        apply_rules(rules, dense(), config, seed=0)
    said = "\n".join(error.value.problems)
    for layer in range(4):
        assert f"layers/{layer}/attention/query: no rule takes it" in said
        assert f"layers/{layer}/attention/query: no rule makes it" in said
        assert f"layers/{layer}/moe/router: no rule makes it" in said
    assert "embedding: made by 2 rules" in said


def test_all_that_cannot_be_is_listed_at_once():
    with pytest.raises(InputError) as error:
        biased = Decoder(dataclasses.replace(CONFIG, mlp_bias=True), key=jax.random.key(0))
        upcycle(biased, num_experts=2, experts_per_token=3, moe_layers=[2, 9])
    assert len(error.value.problems) == 3
    moe = upcycle(dense(), num_experts=2, experts_per_token=1)
    with pytest.raises(InputError, match="2 experts already"):
        upcycle(moe, num_experts=4, experts_per_token=1)
    with pytest.raises(InputError, match="'mix' is not one of copy"):
        upcycle(dense(), num_experts=4, experts_per_token=1, method="mix")


def test_models_of_other_vocabularies_are_not_compared():
    other = Decoder(dataclasses.replace(CONFIG, vocab_size=60), key=jax.random.key(0))
    with pytest.raises(InputError) as error:
        verify(dense(), other, TOKENS)
    assert "61" in error.value.problems[0] and "60" in error.value.problems[0]


def test_verify_measures_what_it_says():
    first, second = dense(), Decoder(CONFIG, key=jax.random.key(1))
    agreement = verify(first, second, TOKENS, batch_size=4)
    p, q = (np.asarray(model(TOKENS).logits, np.float64) for model in (first, second))
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    np.testing.assert_allclose(agreement.max_abs_logit_diff, np.abs(p - q).max(), rtol=1e-5)
    np.testing.assert_allclose(agreement.kl, (np.exp(log_p) * (log_p - log_q)).sum(-1).mean(), rtol=1e-4)
    np.testing.assert_allclose(agreement.top1_agreement, (p.argmax(-1) == q.argmax(-1)).mean())
