"""The decoder: embedding, scanned segments of layers, final norm, head.

Dims: B batch, T time, D embed, V vocab, R stacked layers (one scan runs them).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from upjax.mesh import BATCH, SHARDED, has_mesh, replicated
from upjax.model.attention import Attention
from upjax.model.config import DecoderConfig, LayerKind, Segment
from upjax.model.linear import linear
from upjax.model.mlp import MLP
from upjax.model.moe import MoE
from upjax.model.norms import rms_norm
from upjax.model.parameters import Dtypes, constant, normal
from upjax.model.rope import rope_angles
from upjax.model.router import RouterStats

FLOAT32 = Dtypes()

Remat = Callable[[Callable], Callable]
"""Wraps the function of one layer pattern: `jax.checkpoint` to recompute it in the backward pass."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderOutput:
    """The logits [B, T, V] in float32, and what the routers did (None for a dense model)."""

    logits: jax.Array
    router: RouterStats | None


class Layer(nnx.Module):
    """Attention and an MLP (dense or routed), each after an RMSNorm and added to what came in."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, dtypes: Dtypes, stack: int, *, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.window, self.epsilon = kind.window, config.norm_epsilon
        self.attention_norm = constant(1.0, (stack, config.embed_dim), dtypes.parameters)
        self.attention = Attention(config, dtypes, stack, key=attention_key)
        self.mlp_norm = constant(1.0, (stack, config.embed_dim), dtypes.parameters)
        if kind.moe:
            self.moe = MoE(config, dtypes, stack, key=mlp_key)
        else:
            self.mlp = MLP(config, dtypes, stack, key=mlp_key)

    def __call__(self, x_BTD, rope, segment_ids_BT) -> tuple[jax.Array, RouterStats | None]:
        normed = rms_norm(x_BTD, self.attention_norm[...], self.epsilon)
        x_BTD = x_BTD + self.attention(normed, rope, segment_ids_BT, self.window)
        normed = rms_norm(x_BTD, self.mlp_norm[...], self.epsilon)
        if hasattr(self, "moe"):
            update, stats = self.moe(normed, segment_ids_BT > 0)
            return x_BTD + update, stats
        return x_BTD + self.mlp(normed), None


class Decoder(nnx.Module):
    """A decoder-only language model, dense or with routed experts; a plain pytree of its parameters."""

    def __init__(self, config: DecoderConfig, dtypes: Dtypes = FLOAT32, *, key: jax.Array):
        embedding_key, head_key, *segment_keys = jax.random.split(key, 2 + len(config.segments))
        self.config, self.dtypes = config, dtypes
        V, D, dtype = config.vocab_size, config.embed_dim, dtypes.parameters
        self.embedding = normal(embedding_key, (V, D), dtype, P(None, SHARDED))
        self.segments = nnx.List(
            [_segment(config, segment, dtypes, key) for segment, key in zip(config.segments, segment_keys, strict=True)]
        )
        self.final_norm = constant(1.0, (D,), dtype)
        if not config.tied_embeddings:
            self.head = normal(head_key, (D, V), dtype, P(SHARDED, None))

    def __call__(self, tokens_BT, positions_BT=None, segment_ids_BT=None) -> DecoderOutput:
        """Returns the logits of each position's next token, and the routers' stats.

        `positions_BT` count from 0 in each document and `segment_ids_BT` name the document, 0 for padding; by default
        a row is one document without padding.
        """
        hidden_BTD, router = self.hidden(tokens_BT, positions_BT, segment_ids_BT)
        return DecoderOutput(self.logits(hidden_BTD), router)

    def hidden(
        self, tokens_BT, positions_BT=None, segment_ids_BT=None, *, remat: Remat = lambda run: run
    ) -> tuple[jax.Array, RouterStats | None]:
        """Returns the final hidden states [B, T, D], normed, in the compute dtype, and the routers' stats."""
        if positions_BT is None:
            positions_BT = jnp.zeros_like(tokens_BT) + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :]
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones_like(tokens_BT)
        rope = rope_angles(self.config.rope, self.config.head_dim, positions_BT)
        x_BTD = self._embed(tokens_BT)
        stats = []
        for segment in self.segments:
            run = remat(lambda x, layers: _run_pattern(x, layers, rope, segment_ids_BT))
            x_BTD, of_segment = jax.lax.scan(run, x_BTD, segment)
            stats.append(of_segment)
        x_BTD = rms_norm(x_BTD, self.final_norm[...], self.config.norm_epsilon)
        return x_BTD, _in_layer_order(stats)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V] of hidden states, in float32."""
        return linear(hidden_BTD, self.head_weight).astype(jnp.float32)

    @property
    def head_weight(self) -> jax.Array:
        """The matrix [D, V] that hidden states meet: the head, or the embedding transposed when they are tied."""
        return self.embedding[...].T if self.config.tied_embeddings else self.head[...]

    def _embed(self, tokens_BT):
        table_VD = replicated(self.embedding[...].astype(self.dtypes.compute))
        sharding = P(BATCH, None, None) if has_mesh() else None
        return table_VD.at[tokens_BT].get(out_sharding=sharding)


def _segment(config: DecoderConfig, segment: Segment, dtypes: Dtypes, key: jax.Array) -> nnx.List:
    keys = jax.random.split(key, len(segment.pattern))
    return nnx.List(
        [Layer(config, kind, dtypes, segment.repeats, key=k) for kind, k in zip(segment.pattern, keys, strict=True)]
    )


def _run_pattern(x_BTD, layers, rope, segment_ids_BT):
    stats = []
    for layer in layers:
        x_BTD, of_layer = layer(x_BTD, rope, segment_ids_BT)
        if of_layer is not None:
            stats.append(of_layer)
    return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats) if stats else None


def _in_layer_order(stats: list) -> RouterStats | None:
    """Joins the segments' stats, each [R, MoE layers of its pattern, ...], to [L, ...]."""
    flat = [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), s) for s in stats if s is not None]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *flat) if flat else None
