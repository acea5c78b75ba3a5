"""The step is the same whatever the mesh, the microbatches, the padding and what is recomputed."""

import contextlib
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import VOCAB
from jax.sharding import PartitionSpec as P

from upjax.config import OptimizerConfig, ScheduleConfig
from upjax.mesh import AXES, BATCH, make_mesh
from upjax.model import Dtypes, abstract_params, build
from upjax.train.optimizer import make_optimizer
from upjax.train.schedule import make_schedule
from upjax.train.state import abstract_state, init_state
from upjax.train.step import make_train_step

slow = pytest.mark.slow
ONE_DEVICE = None
B, T, HALF = 8, 16, 8
SCHEDULE = make_schedule(ScheduleConfig(warmup_steps=4, decay_steps=6), peak=1e-2, num_steps=20)


def remember_gradients() -> optax.GradientTransformation:
    """Passes the gradients on, and keeps them as its state."""
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformation(zeros, lambda gradients, *_: (gradients, gradients))


OPTIMIZER = optax.chain(remember_gradients(), make_optimizer(OptimizerConfig(learning_rate=1e-2), SCHEDULE))


def on(shape):
    return jax.set_mesh(make_mesh(*shape)) if shape else contextlib.nullcontext()


@functools.cache
def make_step(config, shape=ONE_DEVICE, dtypes=Dtypes(), **options):  # noqa: B008 (it is frozen)
    options = {"load_balance_coefficient": 0.02, "z_loss_coefficient": 0.01} | options
    return make_train_step(config, dtypes, OPTIMIZER, SCHEDULE, **options)


def make_params(config):
    """Parameters on the mesh that is set, the same on any."""
    rng = np.random.default_rng(0)
    return {
        path: jax.device_put(rng.normal(0, 0.05, leaf.shape).astype(leaf.dtype), leaf.sharding)
        for path, leaf in abstract_params(config, Dtypes()).items()
    }


def make_batch(vocab_size, seed=0):
    """Two documents of half a row each, without padding."""
    rng = np.random.default_rng(seed)
    place = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    return {
        "tokens": rng.integers(0, vocab_size, (B, T), dtype=np.int32),
        "targets": rng.integers(0, vocab_size, (B, T), dtype=np.int32),
        "segment_ids": 1 + place // HALF,
        "positions": place % HALF,
        "loss_weights": rng.integers(0, 2, (B, T)).astype(np.float32),
    }


def put(batch):
    mesh = jax.sharding.get_mesh()
    return jax.device_put(batch, None if mesh.empty else jax.NamedSharding(mesh, P(BATCH, None)))


class Taken(NamedTuple):
    """What a first step found, and the metrics of all steps taken."""

    gradients: dict
    metrics: dict
    history: list


def take(config, *batches, shape=ONE_DEVICE, **options) -> Taken:
    with on(shape):
        step = make_step(config, shape, **options)
        state = init_state(make_params(config), OPTIMIZER, jax.random.key(0))
        history, first = [], None
        for batch in batches:
            state, metrics = step(state, put(batch))
            first = first or jax.tree.map(np.array, state.opt_state[0])
            history.append({name: float(value) for name, value in metrics.items()})
    return Taken(first, history[0], history)


def same(got: Taken, wanted: Taken, rtol, ignoring=()):
    """The same gradients and metrics; entries of a gradient are compared by the largest of its array."""
    for path, gradient in wanted.gradients.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(got.gradients[path], gradient, rtol=0, atol=rtol * scale, err_msg=path)
    for name in wanted.metrics.keys() - set(ignoring):
        np.testing.assert_allclose(got.metrics[name], wanted.metrics[name], rtol=rtol, err_msg=name)


MESHES = [(2, 2, 2), *(pytest.param(shape, marks=slow) for shape in ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8)))]


@pytest.mark.parametrize("shape", MESHES)
def test_a_mesh_changes_nothing(moe, shape):
    batches = [make_batch(moe.vocab_size, number % 3) for number in range(20)]
    wanted, got = take(moe, *batches), take(moe, *batches, shape=shape)
    same(got, wanted, 1e-5)
    for name in ("loss", "load_balance_loss", "z_loss", "grad_norm", "learning_rate"):
        values = [[metrics[name] for metrics in taken.history] for taken in (got, wanted)]
        np.testing.assert_allclose(*values, rtol=1e-5, err_msg=name)
    assert wanted.history[-1]["loss"] < wanted.history[0]["loss"] - 0.05  # it is training that was compared


def test_the_number_of_microbatches_changes_nothing(dense):
    batch = make_batch(dense.vocab_size)
    batch["loss_weights"][:3] = 0  # microbatches differ in what they weigh
    same(take(dense, batch, num_microbatches=2), take(dense, batch), 1e-6)


@slow
@pytest.mark.parametrize("shape", [ONE_DEVICE, (2, 2, 1)])
def test_the_number_of_microbatches_changes_nothing_of_experts(moe, shape):
    batch = make_batch(moe.vocab_size)
    batch["loss_weights"][:3] = 0
    batch["segment_ids"][5:7] = 0  # microbatches differ in the tokens they hold
    options = {"load_balance_coefficient": 0.0, "shape": shape}
    got = take(moe, batch, num_microbatches=2, **options)
    same(got, take(moe, batch, **options), 1e-6, ignoring=["load_balance_loss"])


@slow
def test_the_balance_loss_of_microbatches_is_the_mean_of_theirs_by_tokens(moe):
    batch = make_batch(moe.vocab_size)
    batch["segment_ids"][0] = 0
    # Rows are dealt out in turn. A batch of rows that come twice has the balance of the rows.
    parts = [take(moe, {name: np.concatenate([x[start::2]] * 2) for name, x in batch.items()}) for start in (0, 1)]
    expected = np.average([p.metrics["load_balance_loss"] for p in parts], weights=[p.metrics["tokens"] for p in parts])
    got = take(moe, batch, num_microbatches=2, load_balance_coefficient=0.0).metrics["load_balance_loss"]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_padding_and_what_lies_under_it_change_nothing(moe):
    full = make_batch(moe.vocab_size)
    twice = {name: np.concatenate([x[: B // 2]] * 2) for name, x in full.items()}
    # The same documents, once: each alone in its row, and padding after it that holds tokens nobody must see.
    first, second = ({name: x[: B // 2, part] for name, x in full.items()} for part in (slice(HALF), slice(HALF, T)))
    alone = {name: np.concatenate([first[name], second[name]]) for name in full}
    noise = {
        name: np.full((B, T - HALF), 5 if name in ("tokens", "targets") else 0, x.dtype) for name, x in full.items()
    }
    padded = {name: np.concatenate([alone[name], noise[name]], axis=1) for name in full}
    same(take(moe, padded), take(moe, twice), 1e-5, ignoring=["tokens"])


@slow
@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_recomputing_changes_nothing_and_counts_no_token_twice(request, kind, remat):
    config = request.getfixturevalue(kind)
    batch = make_batch(config.vocab_size)
    same(take(config, batch, remat=remat), take(config, batch), 1e-6)


def test_metrics_are_what_the_model_says(moe):
    batch = make_batch(moe.vocab_size)
    batch["segment_ids"][:, -3:] = 0
    batch["loss_weights"] *= np.arange(B, dtype=np.float32)[:, None] * (batch["segment_ids"] > 0)
    metrics = take(moe, batch).metrics
    decoder = build(moe, Dtypes(), make_params(moe))
    output = jax.jit(lambda d, *args: d(*args))(decoder, batch["tokens"], batch["positions"], batch["segment_ids"])
    logits = np.asarray(output.logits, np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    of_targets = np.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(metrics["loss"], -np.average(of_targets, weights=batch["loss_weights"]), rtol=1e-5)
    counts = np.asarray(output.router.expert_counts)
    assert counts.sum() == 2 * 2 * (batch["segment_ids"] > 0).sum()  # two layers, two experts a token
    np.testing.assert_allclose(metrics["max_expert_load"], (counts.max(1) / counts.mean(1)).max(), rtol=1e-6)
    np.testing.assert_allclose(metrics["dead_experts"], (counts == 0).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["z_loss"], np.mean(output.router.z_loss), rtol=1e-6)
    np.testing.assert_allclose(metrics["load_balance_loss"], np.mean(output.router.load_balance_loss), rtol=1e-6)
    assert metrics["tokens"] == (batch["segment_ids"] > 0).sum()


def test_the_state_keeps_its_shardings_and_gives_its_memory(moe):
    shape = (2, 2, 2)
    with on(shape):
        state = init_state(make_params(moe), OPTIMIZER, jax.random.key(0))
        after, _ = make_step(moe, shape)(state, put(make_batch(moe.vocab_size)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state[1])))
        facts = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype.name, x.sharding.spec), tree)
        assert facts(after) == facts(abstract_state(moe, Dtypes(), OPTIMIZER))
        assert after.params["segments/0/0/moe/gate"].sharding.spec == P(None, "expert", "fsdp", None)
        assert int(after.step) == 1


def test_bfloat16_compute_keeps_float32_parameters_and_gradients(dense):
    batch = make_batch(dense.vocab_size)
    exact, got = take(dense, batch), take(dense, batch, dtypes=Dtypes("float32", "bfloat16"))
    assert {gradient.dtype.name for gradient in got.gradients.values()} == {"float32"}
    np.testing.assert_allclose(got.metrics["loss"], exact.metrics["loss"], rtol=1e-2)
    np.testing.assert_allclose(got.metrics["grad_norm"], exact.metrics["grad_norm"], rtol=3e-2)
    gradient = got.gradients["segments/0/0/mlp/gate"]
    rounded = np.asarray(jnp.asarray(gradient, jnp.bfloat16), np.float32)
    assert (gradient != rounded).mean() > 0.9  # no gradient was rounded to bfloat16 on its way


def test_the_step_lowers_for_256_absent_devices(moe):
    pod = jax.sharding.AbstractMesh((8, 4, 8), AXES, (jax.sharding.AxisType.Explicit,) * 3)
    wide = dataclasses.replace(moe, embed_dim=64, hidden_dim=64)
    with jax.sharding.use_abstract_mesh(pod):
        state = abstract_state(wide, Dtypes(), OPTIMIZER)
        sharding = jax.NamedSharding(pod, P(BATCH, None))
        batch = {
            name: jax.ShapeDtypeStruct((512, T), x.dtype, sharding=sharding) for name, x in make_batch(VOCAB).items()
        }
        traced = make_step(wide, (8, 4, 8), num_microbatches=2).trace(state, batch)
        after, metrics = traced.out_info
        assert after.params["segments/0/0/moe/up"].sharding.spec == P(None, "expert", "fsdp", None)
        assert metrics["loss"].shape == ()
        traced.lower(lowering_platforms=("tpu",))
