"""The MoE layer: router, tokens to expert order, exchange, grouped matmuls, exchange, back.

Dropless by default: every token meets its k experts. With the experts sharded over the mesh axis `expert`, a device
sends each row to the device that holds its expert, and the outputs come back the same way. With a capacity factor an
expert takes only so many rows of each device, and the exchange has the same shapes whatever the routing.

Dims: B batch, T time, D embed, E experts, K experts per token, M tokens of one device, R stacked layers.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from pallas_kernels import token_exchange
from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.token_exchange import capacity
from pallas_kernels.varying import vary_together
from upjax.mesh import axis_size, per_device, reshard
from upjax.model.config import DecoderConfig, MoEConfig
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
            weights = (w[...] for w in (self.gate, self.up, self.down))
            y_BTD, dropped = _experts(self.config, x_BTD, routing, *weights)
        return y_BTD, dataclasses.replace(stats, dropped_pairs=jnp.sum(dropped))


def _is_kept(primitive, *_, **__) -> bool:
    """Says what is kept for the backward pass: all but gathered weights, which a scan would stack for all layers."""
    return primitive.name not in ("reshard", "convert_element_type")


@partial(jax.checkpoint, policy=_is_kept, prevent_cse=False, static_argnums=0)
def _experts(config: MoEConfig, x_BTD, routing: Routing, *weights) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, D], and the token-expert pairs that each device dropped, [devices]."""
    experts = per_device(partial(_apply_experts, config=config, num_shards=axis_size("expert")))
    return experts(x_BTD, routing, *(_gathered(w, x_BTD.dtype) for w in weights))


def _gathered(weight, dtype):
    """Returns a weight whole but for its experts; one that has to travel does so in the compute dtype."""
    return reshard(weight.astype(dtype) if axis_size("fsdp") > 1 else weight, P("expert", None, None))


def _apply_experts(x_BTD, routing: Routing, *weights, config: MoEConfig, num_shards: int):
    """Returns what one device's tokens get from all experts, and how many pairs it dropped; the weights are its own."""
    B, T, D = x_BTD.shape
    x_MD, experts_MK, gates_MK = (x.reshape(B * T, -1) for x in (x_BTD, routing.experts_BTK, routing.gates_BTK))
    dropped = jnp.zeros(1, jnp.int32)
    if config.capacity_factor is not None:
        y_MD, dropped = run_with_capacity(x_MD, experts_MK, gates_MK, *weights, config=config, num_shards=num_shards)
    elif num_shards > 1:
        # In chunks, so that the rows of one can travel while another's are multiplied.
        chunks = zip(*(jnp.split(x, num_chunks(B * T)) for x in (x_MD, experts_MK, gates_MK)), strict=True)
        y_MD = jnp.concatenate([run_exchanged(*chunk, *weights, num_shards=num_shards) for chunk in chunks])
    else:
        y_MD = run_experts(x_MD, experts_MK, gates_MK, *weights)
    return y_MD.astype(x_BTD.dtype).reshape(B, T, D), *vary_together(dropped, y_MD)[:1]


def num_chunks(num_tokens: int) -> int:
    """Returns in how many chunks a device exchanges its tokens: two where that divides them, for one to hide the other.

    A chunk's buffer holds any routing, so they bound that too; but each chunk reads the experts' weights again.
    """
    return 2 if num_tokens % 2 == 0 else 1


def run_experts(x_MD, experts_MK, gates_MK, gate_EDF, up_EDF, down_EFD) -> jax.Array:
    """Returns the gate-weighted sum of each token's experts, [M, D] float32; expert ids of E and above give nothing."""
    order, inverse, group_sizes = expert_order(experts_MK, gate_EDF.shape[0])
    rows = dispatch(x_MD, order, inverse)
    return combine(expert_mlp(rows, gate_EDF, up_EDF, down_EFD, group_sizes), gates_MK, order, inverse)


def run_exchanged(x_MD, experts_MK, gates_MK, gate_EDF, up_EDF, down_EFD, *, num_shards: int) -> jax.Array:
    """Returns what `run_experts` does, with the experts spread over the mesh axis `expert`; no row is ever dropped."""
    order, inverse, group_sizes = expert_order(experts_MK, num_shards * gate_EDF.shape[0])
    sizes_PE = token_exchange.all_group_sizes(group_sizes, "expert")
    num_rows = experts_MK.size
    # The devices of the axis may all send all of their rows to this one.
    rows = token_exchange.send(dispatch(x_MD, order, inverse), sizes_PE, "expert", num_received=num_shards * num_rows)
    y = expert_mlp(rows, gate_EDF, up_EDF, down_EFD, token_exchange.received_group_sizes(sizes_PE, "expert"))
    return combine(token_exchange.give_back(y, sizes_PE, "expert", num_sent=num_rows), gates_MK, order, inverse)


def run_with_capacity(
    x_MD, experts_MK, gates_MK, gate_EDF, up_EDF, down_EFD, *, config: MoEConfig, num_shards: int
) -> tuple[jax.Array, jax.Array]:
    """Returns what `run_experts` does but for rows above an expert's capacity, which add nothing, and their number.

    An expert takes the rows of a device in the order of their tokens, and in that of its choices for the rows of one
    token. The gates of the choices that are left are not raised, as in Switch (Fedus et al. 2021, section 2.2).
    """
    E, num_rows = config.num_experts, experts_MK.size
    slots_of_expert = capacity.expert_capacity(num_rows, E, config.capacity_factor)
    order, inverse, group_sizes = expert_order(experts_MK, E)
    slots = capacity.to_slots(dispatch(x_MD, order, inverse), group_sizes, slots_of_expert)
    if num_shards > 1:
        slots = capacity.swap_slots(slots, "expert")
    filled = jnp.full(slots.shape[0], slots.shape[1], jnp.int32)  # empty slots are rows of zeros
    y = expert_mlp(slots.reshape(-1, x_MD.shape[1]), gate_EDF, up_EDF, down_EFD, filled).reshape(slots.shape)
    if num_shards > 1:
        y = capacity.swap_slots_back(y, "expert")
    rows = capacity.from_slots(y, group_sizes, num_rows)
    return combine(rows, gates_MK, order, inverse), capacity.num_dropped(group_sizes, slots_of_expert)[None]
