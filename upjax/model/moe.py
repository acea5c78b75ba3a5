"""The MoE layer: router, tokens to expert order, grouped matmuls, back. Dropless: every token meets its k experts.

With the experts sharded over the mesh axis `expert`, the devices of that axis gather each other's tokens, run their own
experts on them, and reduce-scatter the outputs.

Dims: B batch, T time, D embed, F hidden, E experts, K experts per token, M tokens of one device, R stacked layers.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from pallas_kernels.expert_mlp import expert_mlp
from upjax.mesh import axis_size, per_device, reshard
from upjax.model.config import DecoderConfig
from upjax.model.dispatch import combine, dispatch, expert_order
from upjax.model.parameters import Dtypes, normal
from upjax.model.router import RouterStats, Routing, route


class MoE(nnx.Module):
    """The routed experts of R stacked layers, each expert down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, dtypes: Dtypes, stack: int, *, key: jax.Array):
        D, E, F, R, dtype = config.embed_dim, config.moe.num_experts, config.moe.hidden_dim, stack, dtypes.parameters
        keys = jax.random.split(key, 4)
        self.config = config.moe
        self.router = normal(keys[0], (R, D, E), "float32", P(None, None, None))
        self.gate = normal(keys[1], (R, E, D, F), dtype, P(None, "expert", "fsdp", None))
        self.up = normal(keys[2], (R, E, D, F), dtype, P(None, "expert", "fsdp", None))
        self.down = normal(keys[3], (R, E, F, D), dtype, P(None, "expert", None, "fsdp"))

    def __call__(self, x_BTD: jax.Array, is_token_BT: jax.Array) -> tuple[jax.Array, RouterStats]:
        """Returns the layer's output [B, T, D] and what the router did; padding tokens give zeros."""
        routing, stats = route(x_BTD, self.router[...], self.config, is_token_BT)
        with jax.named_scope("experts"):
            return _experts(x_BTD, routing, *(w[...] for w in (self.gate, self.up, self.down))), stats


def _is_kept(primitive, *_, **__) -> bool:
    """Says what is kept for the backward pass: all but gathered weights, which a scan would stack for all layers."""
    return primitive.name not in ("reshard", "convert_element_type")


@partial(jax.checkpoint, policy=_is_kept, prevent_cse=False)
def _experts(x_BTD, routing: Routing, *weights) -> jax.Array:
    experts = per_device(partial(_apply_experts, num_shards=axis_size("expert")))
    return experts(x_BTD, routing, *(_gathered(w, x_BTD.dtype) for w in weights))


def _gathered(weight, dtype):
    """Returns a weight whole but for its experts; one that has to travel does so in the compute dtype."""
    return reshard(weight.astype(dtype) if axis_size("fsdp") > 1 else weight, P("expert", None, None))


def _apply_experts(x_BTD, routing: Routing, gate_EDF, up_EDF, down_EFD, *, num_shards: int):
    """Returns what one device's tokens get from all experts; the weights are those of this device's experts."""
    B, T, D = x_BTD.shape
    x_MD, experts_MK, gates_MK = (x.reshape(B * T, -1) for x in (x_BTD, routing.experts_BTK, routing.gates_BTK))
    if num_shards > 1:
        gather = lambda x: jax.lax.all_gather(x, "expert", tiled=True)
        x_MD, experts_MK, gates_MK = gather(x_MD), gather(experts_MK), gather(gates_MK)
        num_local = gate_EDF.shape[0]
        local = experts_MK - jax.lax.axis_index("expert") * num_local
        experts_MK = jnp.where((local >= 0) & (local < num_local), local, num_local)
    y_MD = run_experts(x_MD, experts_MK, gates_MK, gate_EDF, up_EDF, down_EFD)
    if num_shards > 1:
        y_MD = jax.lax.psum_scatter(y_MD, "expert", tiled=True)
    return y_MD.astype(x_BTD.dtype).reshape(B, T, D)


def run_experts(x_MD, experts_MK, gates_MK, gate_EDF, up_EDF, down_EFD) -> jax.Array:
    """Returns the gate-weighted sum of each token's experts, [M, D] float32; expert ids of E and above give nothing."""
    order, inverse, group_sizes = expert_order(experts_MK, gate_EDF.shape[0])
    rows = dispatch(x_MD, order, inverse)
    return combine(expert_mlp(rows, gate_EDF, up_EDF, down_EFD, group_sizes), gates_MK, order, inverse)
