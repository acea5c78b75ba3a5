"""What a training step takes and gives back."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from upjax.mesh import has_mesh, replicated
from upjax.model import DecoderConfig, Dtypes, abstract_params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes; with the position in the data it is the run."""

    params: dict[str, jax.Array]
    """By path, as `flat_params` gives them."""
    opt_state: optax.OptState
    step: jax.Array
    """int32: the updates made so far."""
    key: jax.Array
    """The run's random key; what draws at a step folds `step` into it."""


def init_state(params: dict[str, jax.Array], optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Returns the state before the first step; the moments are float32, laid out as the parameters are."""

    @jax.jit
    def rest(params, key):
        opt_state = optimizer.init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        # Moments lie as their parameters do; a constant, such as a count, lies nowhere until told.
        return jax.tree.map(lambda x: x if x.ndim else replicated(x), (opt_state, jnp.int32(0), key))

    opt_state, step, key = rest(params, key)
    return TrainState(params=params, opt_state=opt_state, step=step, key=key)


def abstract_state(config: DecoderConfig, dtypes: Dtypes, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state on the mesh that is set; makes no array."""
    params = abstract_params(config, dtypes)
    state = jax.eval_shape(lambda params: init_state(params, optimizer, jax.random.key(0)), params)
    if has_mesh():
        return state
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), state)
