"""The MoE layer against the dense layer, NumPy, and closed forms."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from upjax.mesh import AXES, batch_sharded, make_mesh
from upjax.model import Decoder, DecoderConfig, Dtypes, MoEConfig, abstract_params, build, flat_params
from upjax.model.dispatch import expert_order
from upjax.model.loss import cross_entropy_sum
from upjax.model.moe import _experts, run_experts, run_with_capacity
from upjax.model.router import Routing, route

DENSE = DecoderConfig(
    vocab_size=61,
    embed_dim=32,
    hidden_dim=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_sequence_length=64,
)
B, T = 8, 24
TOKENS = np.random.default_rng(0).integers(0, 61, (B, T)).astype(np.int32)


def with_experts(**changes) -> DecoderConfig:
    moe = MoEConfig(**({"num_experts": 8, "experts_per_token": 2, "hidden_dim": 48} | changes))
    return dataclasses.replace(DENSE, moe=moe, moe_layers=(0, 1, 2))


def loss(decoder, tokens, segment_ids=None):
    hidden, router = decoder.hidden(tokens, None, segment_ids)
    weights = jnp.ones(tokens.shape, jnp.float32) if segment_ids is None else (segment_ids > 0).astype(jnp.float32)
    return cross_entropy_sum(decoder, hidden, tokens, weights), router


def test_one_expert_is_the_dense_model_in_loss_and_gradients():
    dense = Decoder(DENSE, key=jax.random.key(0))
    flat = flat_params(dense)
    config = with_experts(num_experts=1, experts_per_token=1)
    made = {
        path.replace("/mlp/", "/moe/"): value[:, None] if "/mlp/" in path else value for path, value in flat.items()
    }
    made["segments/0/0/moe/router"] = jax.random.normal(jax.random.key(1), (3, 32, 1))
    moe = build(config, Dtypes(), made)
    (dense_loss, _), dense_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(dense, TOKENS)
    (moe_loss, _), moe_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(moe, TOKENS)
    np.testing.assert_allclose(moe_loss, dense_loss, rtol=1e-6)
    moe_grads = flat_params(moe_grads)
    for path, gradient in flat_params(dense_grads).items():
        other = np.asarray(moe_grads[path.replace("/mlp/", "/moe/")]).reshape(gradient.shape)
        assert np.linalg.norm(other - gradient) <= 1e-6 * np.linalg.norm(gradient), path


@pytest.mark.parametrize("router", ("softmax_topk", "softmax_topk_renormalized", "topk_softmax"))
def test_gates_and_experts_are_those_of_a_sort(router):
    x, weight = np.random.default_rng(1).normal(size=(2, 5, 32)), np.random.default_rng(2).normal(size=(32, 8))
    config = MoEConfig(num_experts=8, experts_per_token=3, hidden_dim=4, router=router)
    ones = jnp.ones((2, 5), bool)
    routing, _ = route(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), config, ones)
    logits = x @ weight
    order = np.argsort(-logits, axis=-1)[..., :3]
    np.testing.assert_array_equal(routing.experts_BTK, order)
    chosen = np.exp(np.take_along_axis(logits, order, axis=-1))
    total = np.exp(logits).sum(-1, keepdims=True) if router == "softmax_topk" else chosen.sum(-1, keepdims=True)
    np.testing.assert_allclose(routing.gates_BTK, chosen / total, rtol=1e-5)


def test_router_logits_are_float32_whatever_the_compute_dtype():
    # Two experts whose logits differ by less than bfloat16 can tell: only float32 finds the larger.
    weight = jnp.stack([jnp.full(32, 1.0), jnp.full(32, 1.0 + 2**-12)], axis=1)
    config = MoEConfig(num_experts=2, experts_per_token=1, hidden_dim=4)
    routing, _ = route(jnp.ones((1, 4, 32), jnp.bfloat16), weight, config, jnp.ones((1, 4), bool))
    assert routing.gates_BTK.dtype == jnp.float32
    assert (routing.experts_BTK == 1).all()


def test_even_routing_has_a_balance_loss_of_one_and_one_sided_routing_of_num_experts():
    config = MoEConfig(num_experts=4, experts_per_token=1, hidden_dim=4)
    ones = jnp.ones((1, 8), bool)
    cycle = jax.nn.one_hot(jnp.arange(8) % 4, 4)[None]
    _, stats = route(cycle, 50.0 * jnp.eye(4), config, ones)
    np.testing.assert_allclose(stats.load_balance_loss, 1.0, rtol=1e-6)
    np.testing.assert_array_equal(stats.expert_counts, [2, 2, 2, 2])
    _, stats = route(jnp.ones((1, 8, 4)), jnp.zeros((4, 4)).at[:, 2].set(50.0), config, ones)
    np.testing.assert_allclose(stats.load_balance_loss, 4.0, rtol=1e-6)
    np.testing.assert_array_equal(stats.expert_counts, [0, 0, 8, 0])
    np.testing.assert_allclose(stats.z_loss, 200.0**2, rtol=1e-6)


def test_the_balance_loss_of_each_layer_is_its_closed_form():
    moe = Decoder(with_experts(), key=jax.random.key(0))
    router = jax.jit(lambda d: d(TOKENS).router)(moe)
    assert router.expert_counts.shape == (3, 8)
    assert (router.expert_counts.sum(axis=1) == 2 * B * T).all()
    assert router.load_balance_loss.shape == router.z_loss.shape == (3,)


def test_padding_is_counted_nowhere_and_changes_nothing():
    moe = Decoder(with_experts(), key=jax.random.key(0))
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (short, router), gradients = run(moe, TOKENS, np.ones((B, T), np.int32))
    padded = np.concatenate([TOKENS, np.full((B, 8), 7, np.int32)], axis=1)
    segment_ids = np.concatenate([np.ones((B, T)), np.zeros((B, 8))], axis=1).astype(np.int32)
    (long, padded_router), padded_gradients = run(moe, padded, segment_ids)
    np.testing.assert_allclose(long, short, rtol=1e-6)
    np.testing.assert_array_equal(padded_router.expert_counts, router.expert_counts)
    for name in ("load_balance_loss", "z_loss"):
        np.testing.assert_allclose(getattr(padded_router, name), getattr(router, name), rtol=1e-5)
    for path, gradient in flat_params(gradients).items():
        np.testing.assert_allclose(flat_params(padded_gradients)[path], gradient, rtol=1e-4, atol=1e-4, err_msg=path)


def test_permuting_the_experts_changes_nothing():
    moe = Decoder(with_experts(), key=jax.random.key(0))
    flat, order = flat_params(moe), np.random.default_rng(3).permutation(8)
    moved = {
        path: value[..., order] if path.endswith("router") else value[:, order] if "/moe/" in path else value
        for path, value in flat.items()
    }
    np.testing.assert_allclose(build(moe.config, Dtypes(), moved)(TOKENS).logits, moe(TOKENS).logits, atol=2e-6)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_a_mesh_changes_neither_logits_nor_gradients(shape):
    moe = Decoder(with_experts(), key=jax.random.key(0))
    (alone, _), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(moe, TOKENS)
    with jax.set_mesh(make_mesh(*shape)):
        wanted = abstract_params(moe.config, Dtypes())
        flat = {path: jax.device_put(np.asarray(x), wanted[path].sharding) for path, x in flat_params(moe).items()}
        sharded = build(moe.config, Dtypes(), flat)
        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (spread, _), spread_gradients = run(sharded, batch_sharded(jnp.asarray(TOKENS)))
    np.testing.assert_allclose(spread, alone, rtol=1e-5)
    for path, gradient in flat_params(spread_gradients).items():
        expected = np.asarray(flat_params(gradients)[path])
        assert gradient.sharding.spec == wanted[path].sharding.spec, path
        assert np.linalg.norm(np.asarray(gradient) - expected) <= 1e-5 * np.linalg.norm(expected), path


@pytest.mark.parametrize("shape", [None, (1, 2, 4)])
def test_a_capacity_that_holds_any_routing_drops_nothing_and_changes_nothing(shape):
    moe = Decoder(with_experts(), key=jax.random.key(0))
    (expected, _), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(moe, TOKENS)
    config, mesh = with_experts(capacity_factor=8.0), make_mesh(*shape) if shape else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        wanted, tokens = abstract_params(config, Dtypes()), jnp.asarray(TOKENS)
        flat = flat_params(moe)
        if mesh:
            flat = {path: jax.device_put(np.asarray(x), wanted[path].sharding) for path, x in flat.items()}
            tokens = batch_sharded(tokens)
        (found, router), roomy = jax.jit(jax.value_and_grad(loss, has_aux=True))(build(config, Dtypes(), flat), tokens)
    assert not np.any(router.dropped_pairs)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for path, gradient in flat_params(roomy).items():
        other = np.asarray(flat_params(gradients)[path])
        assert np.linalg.norm(np.asarray(gradient) - other) <= 1e-5 * np.linalg.norm(other), path


def test_what_is_above_an_experts_capacity_adds_nothing_and_is_counted():
    rng = np.random.default_rng(4)
    M, E, K, width = 20, 4, 2, 6
    config = MoEConfig(num_experts=E, experts_per_token=K, hidden_dim=5, capacity_factor=0.7)
    slots = 7  # 0.7 of the even share of 40 pairs
    x = rng.normal(size=(M, width)).astype("float32")
    experts = np.stack([rng.permutation(E)[:K] for _ in range(M)]).astype(np.int32)
    experts[3] = E  # a padding token: it takes no slot and is not counted
    gates = rng.uniform(size=(M, K)).astype("float32")
    gate, up, down = (rng.normal(size=s).astype("float32") for s in ((E, width, 5), (E, width, 5), (E, 5, width)))
    expected, taken, dropped = np.zeros((M, width)), np.zeros(E, int), 0
    for token in range(M):
        for choice in range(K):
            e = experts[token, choice]
            if e == E:
                continue
            if taken[e] == slots:
                dropped += 1
                continue
            taken[e] += 1
            g, u = x[token] @ gate[e], x[token] @ up[e]
            expected[token] += gates[token, choice] * ((g / (1 + np.exp(-g)) * u) @ down[e])
    assert dropped > 0
    y, counted = run_with_capacity(*map(jnp.asarray, (x, experts, gates, gate, up, down)), config=config, num_shards=1)
    assert counted.tolist() == [dropped]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [0.0, -1.0, np.inf, np.nan])
def test_a_capacity_factor_that_is_no_capacity_is_refused(factor):
    with pytest.raises(ValueError, match=f"capacity_factor must be above 0 and finite.*got {factor}"):
        MoEConfig(num_experts=4, experts_per_token=1, hidden_dim=4, capacity_factor=factor)


@pytest.mark.parametrize("factor", [None, 1.0])
def test_rows_move_without_a_scatter_forward_and_backward(factor):
    """By gathers through a permutation and its inverse: the scatter-add of autodiff is slow on every platform."""
    config = MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=5, capacity_factor=factor)
    experts = jnp.zeros((8, 2), jnp.int32).at[:, 1].set(3)
    weights = jnp.ones((4, 6, 5)), jnp.ones((4, 6, 5)), jnp.ones((4, 5, 6))

    def total(x, gates):
        if factor is None:
            return jnp.sum(run_experts(x, experts, gates, *weights))
        return jnp.sum(run_with_capacity(x, experts, gates, *weights, config=config, num_shards=1)[0])

    program = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(jnp.ones((8, 6)), jnp.ones((8, 2))))
    assert "sort" in program and "gather" in program and "scatter" not in program


def test_order_and_inverse_are_those_of_a_stable_sort():
    experts = np.random.default_rng(5).integers(0, 6, (40, 3)).astype(np.int32)  # 5 is no expert
    order, inverse, sizes = expert_order(jnp.asarray(experts), 5)
    pairs = experts.reshape(-1)
    expected = sorted(range(pairs.size), key=lambda pair: (pairs[pair], pair))
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(np.asarray(order)[np.asarray(inverse)], np.arange(pairs.size))
    np.testing.assert_array_equal(sizes, [np.sum(pairs == expert) for expert in range(5)])


def by_token(x, experts, gates, gate, up, down, cotangent):
    """Returns the outputs and the gradients of x, gates, gate, up and down, pair by pair in float64."""
    y, dx, dgates, dgate, dup, ddown = (np.zeros(a.shape) for a in (x, x, gates, gate, up, down))
    for *token, choice in np.ndindex(experts.shape):
        token, e = tuple(token), experts[*token, choice]
        if e == len(gate):
            continue
        row, g, u, g_y = x[token], x[token] @ gate[e], x[token] @ up[e], cotangent[token]
        sigmoid = 1 / (1 + np.exp(-g))
        hidden = g * sigmoid * u
        weighted = gates[*token, choice] * g_y
        y[token] += gates[*token, choice] * (hidden @ down[e])
        dgates[*token, choice] = hidden @ down[e] @ g_y
        dg, du = down[e] @ weighted * u * sigmoid * (1 + g * (1 - sigmoid)), down[e] @ weighted * g * sigmoid
        ddown[e] += np.outer(hidden, weighted)
        dgate[e] += np.outer(row, dg)
        dup[e] += np.outer(row, du)
        dx[token] += gate[e] @ dg + up[e] @ du
    return y, dx, dgates, dgate, dup, ddown


@pytest.mark.parametrize("num_tokens", (1, 3, 4))  # of a device: one, and what is exchanged in one chunk and in two
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2)])
def test_any_routing_over_a_mesh_is_that_of_a_loop_over_pairs(shape, num_tokens):
    rng = np.random.default_rng(6)
    E, K, D, F, batch = 8, 2, 6, 5, (8, num_tokens)
    config = MoEConfig(num_experts=E, experts_per_token=K, hidden_dim=F)
    drawn = np.argsort(rng.random((*batch, E)), axis=-1)[..., :K]
    padded = drawn.copy()
    padded[2] = padded[:, -1] = E  # a device without a token, the last of each
    routings = {
        "drawn": drawn,
        "padded": padded,
        "padding alone": np.full((*batch, K), E),
        "two experts": np.broadcast_to([5, 2], (*batch, K)),
        "the first two": np.broadcast_to([1, 0], (*batch, K)),
    }

    @jax.jit
    def run(x, experts, gates, gate, up, down, cotangent):
        y, vjp = jax.vjp(
            lambda x, gates, *w: _experts(config, x, Routing(experts, gates), *w)[0], x, gates, gate, up, down
        )
        return y, *vjp(cotangent)

    arrays = [rng.normal(size=(*batch, n)).astype("float32") for n in (D, K, D)]
    weights = [rng.normal(size=s).astype("float32") for s in ((E, D, F), (E, D, F), (E, F, D))]
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))
        for name, experts in routings.items():
            x, gates, cotangent = arrays
            operands = (x, experts.astype("int32"), gates, *weights, cotangent)
            placed = (
                [place(a, AXES) for a in operands[:3]]
                + [place(w, "expert") for w in weights]
                + [place(cotangent, AXES)]
            )
            for found, expected in zip(run(*placed), by_token(*operands), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
