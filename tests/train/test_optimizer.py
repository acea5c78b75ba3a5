"""AdamW against its equations written out in NumPy, and what weight decay and clipping touch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from upjax.config import OptimizerConfig
from upjax.model import DecoderConfig, Dtypes, MoEConfig, abstract_params
from upjax.train.optimizer import decays, make_optimizer
from upjax.train.state import init_state

EVERYTHING = DecoderConfig(
    vocab_size=16,
    embed_dim=8,
    hidden_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_sequence_length=16,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    moe=MoEConfig(num_experts=2, experts_per_token=1, hidden_dim=8),
    moe_layers=(1,),
)
SETTINGS = {"learning_rate": 1e-2, "b1": 0.8, "b2": 0.9, "epsilon": 1e-6, "weight_decay": 0.3, "clip_norm": 1.0}


def test_decay_pulls_on_matrices_only():
    decayed = {path.rpartition("/")[2] for path in abstract_params(EVERYTHING, Dtypes()) if decays(path)}
    assert decayed == {"embedding", "head", "query", "key", "value", "out", "gate", "up", "down"}


def test_updates_are_those_of_adamw():
    lrs = [1e-2, 2e-2, 5e-3]
    optimizer = make_optimizer(OptimizerConfig(**SETTINGS), lambda step: jnp.array(lrs)[step])
    rng = np.random.default_rng(0)
    params = {"head": rng.normal(size=(4, 3)), "final_norm": rng.normal(size=4)}
    got = {path: jnp.asarray(p, jnp.float32) for path, p in params.items()}
    state = optimizer.init(got)
    m, v = ({path: np.zeros(p.shape) for path, p in params.items()} for _ in range(2))
    for t, lr in enumerate(lrs, start=1):
        gradients = {path: rng.normal(size=p.shape) for path, p in params.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        assert norm > 1  # so that clipping happens
        for path, g in gradients.items():
            g = g / norm
            m[path] = 0.8 * m[path] + 0.2 * g
            v[path] = 0.9 * v[path] + 0.1 * g**2
            step = m[path] / (1 - 0.8**t) / (np.sqrt(v[path] / (1 - 0.9**t)) + 1e-6)
            pull = 0.3 * params[path] if path == "head" else 0
            params[path] = params[path] - lr * (step + pull)
        updates, state = optimizer.update(jax.tree.map(jnp.float32, gradients), state, got)
        got = optax.apply_updates(got, updates)
    for path in params:
        np.testing.assert_allclose(got[path], params[path], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.5, 30.0])
def test_gradients_are_scaled_down_to_the_norm_and_never_up(size):
    from upjax.train.optimizer import clip_by_global_norm

    gradients = {"a": jnp.full((2, 2), size), "b": jnp.full(5, -size)}
    clipped, _ = clip_by_global_norm(1.0).update(gradients, optax.EmptyState())
    norm = 3 * size
    for path, g in gradients.items():
        np.testing.assert_allclose(clipped[path], g if norm <= 1 else g / norm, rtol=1e-6)


def test_moments_of_bfloat16_parameters_are_float32():
    optimizer = make_optimizer(OptimizerConfig(**SETTINGS), optax.constant_schedule(1e-2))
    params = {"head": jnp.ones((2, 2), jnp.bfloat16)}
    state = init_state(params, optimizer, jax.random.key(0))
    gradients = {"head": jnp.full((2, 2), 0.1, jnp.float32)}
    updates, opt_state = optimizer.update(gradients, state.opt_state, params)
    assert {x.dtype.name for x in jax.tree.leaves(opt_state) if x.ndim} == {"float32"}
    assert jax.tree.map(lambda x: x.dtype.name, opt_state) == jax.tree.map(lambda x: x.dtype.name, state.opt_state)
    assert optax.apply_updates(params, updates)["head"].dtype == jnp.bfloat16
