"""AdamW by Optax: gradients clipped by their global norm, weight decay on matrices, moments in float32."""

import jax
import jax.numpy as jnp
import optax

from upjax.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns AdamW at the learning rates of `schedule`."""
    return optax.chain(
        clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: {path: decays(path) for path in params},
        ),
    )


def decays(path: str) -> bool:
    """Says whether weight decay pulls on the parameter at `path`.

    It does on the matrices that layers multiply by: attention, MLPs, experts, embedding and head. Not on norms and
    biases, for which zero means nothing, nor on routers: pulled to zero they would route evenly whatever the token, and
    the z-loss already bounds their logits.
    """
    name = path.rpartition("/")[2]
    return not name.endswith(("_norm", "_bias")) and name != "router"


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns a transformation that scales gradients down to a global norm of `max_norm` where it is larger.

    Why not Optax's own: it divides every gradient by the norm, and XLA on the CPU writes the quotients out before the
    moments read them (as many bytes again as there are parameters). A product with one scalar is fused into its uses.
    """

    def scale(gradients, _):
        factor = jnp.minimum(1.0, max_norm / optax.tree.norm(gradients))
        return jax.tree.map(lambda g: g * factor, gradients)

    return optax.stateless(scale)
