"""What a decoder must be whatever its weights: causal, blind across documents, bounded by its window."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from upjax.errors import InputError
from upjax.mesh import make_mesh
from upjax.model import Decoder, DecoderConfig, Dtypes, MoEConfig, abstract_params, build, flat_params, num_params
from upjax.model.loss import cross_entropy_sum

BASE = DecoderConfig(
    vocab_size=61,
    embed_dim=32,
    hidden_dim=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_sequence_length=64,
    tied_embeddings=True,
)
MIXED = dataclasses.replace(
    BASE,
    moe=MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=16),
    moe_layers=(1, 3),
    sliding_window=4,
    window_layers=(0, 1, 2, 3),
    qk_norm=True,
    qkv_bias=True,
)
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 24)).astype(np.int32)


@pytest.mark.parametrize("config", [BASE, MIXED], ids=["dense", "mixed"])
def test_no_position_hears_of_later_ones(config):
    decoder = Decoder(config, key=jax.random.key(0))
    changed = TOKENS.copy()
    changed[:, 13:] = (changed[:, 13:] + 1) % 61
    moved = np.abs(decoder(TOKENS).logits - decoder(changed).logits).max(axis=-1)
    # With experts not to the bit: how many rows share a product, and so how it is rounded, hangs on all tokens.
    assert moved[:, :13].max() <= (0.0 if config.moe is None else 5e-7)
    assert moved[:, 13:].min() > 1e-3


def test_documents_packed_in_a_row_are_read_as_if_alone():
    decoder = Decoder(MIXED, key=jax.random.key(0))
    cut = 9
    segment_ids = np.where(np.arange(24) < cut, 1, 2)[None].repeat(2, axis=0).astype(np.int32)
    positions = np.where(np.arange(24) < cut, np.arange(24), np.arange(24) - cut)[None].repeat(2, axis=0)
    packed = decoder(TOKENS, positions.astype(np.int32), segment_ids).logits
    np.testing.assert_allclose(packed[:, :cut], decoder(TOKENS[:, :cut]).logits, atol=1e-5)
    np.testing.assert_allclose(packed[:, cut:], decoder(TOKENS[:, cut:]).logits, atol=1e-5)


def test_a_window_of_one_layer_sees_its_own_length():
    config = dataclasses.replace(BASE, num_layers=1, sliding_window=4, window_layers=(0,))
    decoder = Decoder(config, key=jax.random.key(0))
    changed = TOKENS.copy()
    changed[:, 10] = (changed[:, 10] + 1) % 61
    differs = np.abs(decoder(TOKENS).logits - decoder(changed).logits).max(axis=(0, 2)) > 1e-6
    assert list(np.flatnonzero(differs)) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("moe_layers", "segments"),
    [
        ((), [(1, 6)]),
        (range(6), [(1, 6)]),
        ((1, 3, 5), [(2, 3)]),
        ((1, 2, 3, 4), [(1, 1), (1, 4), (1, 1)]),
        ((2, 5), [(3, 2)]),
        ((5,), [(1, 5), (1, 1)]),
    ],
)
def test_layers_are_run_by_few_scans_and_each_has_one_place(moe_layers, segments):
    moe = MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=16) if moe_layers else None
    config = dataclasses.replace(BASE, num_layers=6, moe=moe, moe_layers=tuple(moe_layers))
    assert [(len(segment.pattern), segment.repeats) for segment in config.segments] == segments
    places = [config.place(layer) for layer in range(6)]
    assert len(set(places)) == 6
    for layer, (segment, position, _) in enumerate(places):
        assert config.segments[segment].pattern[position] == config.layers[layer]


def test_how_layers_are_stacked_changes_nothing():
    # The same four layers as two scans of two kinds and, with a window as long as the text, as one scan.
    windowed = dataclasses.replace(BASE, sliding_window=64, window_layers=(0, 1))
    plain = Decoder(BASE, key=jax.random.key(0))
    flat = flat_params(plain)
    split = {}
    for path, value in flat.items():
        if path.startswith("segments/0/0"):
            split[path], split[path.replace("segments/0", "segments/1")] = value[:2], value[2:]
        else:
            split[path] = value
    assert len(windowed.segments) == 2
    np.testing.assert_allclose(build(windowed, Dtypes(), split)(TOKENS).logits, plain(TOKENS).logits, atol=1e-6)


def test_cross_entropy_in_chunks_is_cross_entropy(monkeypatch):
    decoder = Decoder(BASE, key=jax.random.key(0))
    weights = np.random.default_rng(1).integers(0, 2, TOKENS.shape).astype(np.float32)

    def loss(decoder):
        hidden, _ = decoder.hidden(TOKENS)
        return cross_entropy_sum(decoder, hidden, TOKENS, weights)

    def plainly(decoder):
        log_probs = jax.nn.log_softmax(decoder(TOKENS).logits)
        return -jnp.sum(weights * jnp.take_along_axis(log_probs, TOKENS[..., None], axis=-1)[..., 0])

    expected, expected_gradients = jax.value_and_grad(plainly)(decoder)
    monkeypatch.setattr("upjax.model.loss.CHUNK_TOKENS", 8)
    actual, gradients = jax.value_and_grad(loss)(decoder)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    for path, gradient in flat_params(gradients).items():
        np.testing.assert_allclose(gradient, flat_params(expected_gradients)[path], atol=1e-5, err_msg=path)


def test_bfloat16_compute_is_near_float32():
    decoder = Decoder(MIXED, key=jax.random.key(0))
    low = build(MIXED, Dtypes("float32", "bfloat16"), flat_params(decoder))
    exact, rounded = decoder(TOKENS).logits, low(TOKENS).logits
    assert rounded.dtype == jnp.float32
    assert np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


def test_an_absent_pod_gets_shapes_and_shardings():
    pod = jax.sharding.AbstractMesh((2, 16, 4), ("data", "fsdp", "expert"), (jax.sharding.AxisType.Explicit,) * 3)
    config = dataclasses.replace(MIXED, embed_dim=128)
    with jax.sharding.use_abstract_mesh(pod):
        leaves = abstract_params(config, Dtypes("bfloat16", "bfloat16"))
    assert leaves["segments/0/1/moe/gate"].sharding.spec == jax.P(None, "expert", "fsdp", None)
    assert leaves["segments/0/1/moe/gate"].dtype == jnp.bfloat16
    assert leaves["segments/0/1/moe/router"].dtype == jnp.float32


def test_parameters_that_do_not_fit_are_all_named():
    flat = flat_params(Decoder(BASE, key=jax.random.key(0)))
    del flat["final_norm"]
    flat["head"] = flat["embedding"]
    flat["embedding"] = flat["embedding"][:-1]
    with pytest.raises(InputError) as error:
        build(BASE, Dtypes(), flat)
    assert [problem.split(":")[0] for problem in error.value.problems] == ["final_norm", "head", "embedding"]


def test_active_parameters_leave_out_the_other_experts():
    config = dataclasses.replace(
        BASE, moe=MoEConfig(num_experts=8, experts_per_token=2, hidden_dim=48), moe_layers=(0,)
    )
    routed = 8 * 3 * 32 * 48
    assert num_params(config) - num_params(config, active=True) == routed * 6 // 8


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="fsdp=4.*8 devices"):
        make_mesh(data=4, fsdp=4)
