"""The dense gated MLP (SwiGLU). Dims: B batch, T time, D embed, F hidden, R stacked layers."""

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from upjax.mesh import SHARDED
from upjax.model.config import DecoderConfig
from upjax.model.linear import add_bias, linear
from upjax.model.parameters import Dtypes, constant, normal


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) of R stacked layers."""

    def __init__(self, config: DecoderConfig, dtypes: Dtypes, stack: int, *, key: jax.Array):
        D, F, R, dtype = config.embed_dim, config.hidden_dim, stack, dtypes.parameters
        keys = jax.random.split(key, 3)
        self.gate = normal(keys[0], (R, D, F), dtype, P(None, SHARDED, None))
        self.up = normal(keys[1], (R, D, F), dtype, P(None, SHARDED, None))
        self.down = normal(keys[2], (R, F, D), dtype, P(None, None, SHARDED))
        self.biased = config.mlp_bias
        if config.mlp_bias:
            self.gate_bias = constant(0.0, (R, F), dtype)
            self.up_bias = constant(0.0, (R, F), dtype)
            self.down_bias = constant(0.0, (R, D), dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the MLP's output, [B, T, D]."""
        gate, up = linear(x_BTD, self.gate[...]), linear(x_BTD, self.up[...])
        if self.biased:
            gate, up = add_bias(gate, self.gate_bias[...]), add_bias(up, self.up_bias[...])
        down = linear(jax.nn.silu(gate) * up, self.down[...])
        return add_bias(down, self.down_bias[...]) if self.biased else down
