"""Warmup-stable-decay: one long run at a constant learning rate, and short decays that branch off it.

With W warm-up steps, D decay steps, N steps in all, peak P and final fraction f, step s (the first is 0) has

    s < W           P * (s + 1) / W
    W <= s < N - D  P
    N - D <= s < N  P * shape(x, f) with x = (s - (N - D)) / D, which would be 1 at step N

    linear          1 - (1 - f) * x
    cosine          f + (1 - f) * (1 + cos(pi * x)) / 2
    1-sqrt          f + (1 - f) * (1 - sqrt(x))
    exponential     f ** x
"""

import jax
import jax.numpy as jnp
import optax

from upjax.config import ScheduleConfig

SHAPES = {
    "linear": lambda x, f: 1 - (1 - f) * x,
    "cosine": lambda x, f: f + (1 - f) * (1 + jnp.cos(jnp.pi * x)) / 2,
    "1-sqrt": lambda x, f: f + (1 - f) * (1 - jnp.sqrt(x)),
    "exponential": lambda x, f: f**x,
}


def make_schedule(config: ScheduleConfig, *, peak: float, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates made before this one."""
    W, D = config.warmup_steps, config.decay_steps
    shape = SHAPES[config.decay]

    def warm_up(step: jax.Array) -> jax.Array:
        return peak * (step + 1) / max(W, 1)

    def decay(step: jax.Array) -> jax.Array:
        return peak * shape(step / max(D, 1), config.final_fraction)

    return optax.join_schedules([warm_up, optax.constant_schedule(peak), decay], [W, num_steps - D])


def branch_points(config: ScheduleConfig, num_steps: int) -> range:
    """Returns the steps whose checkpoints a decay can branch from: warmed up, and not a step of the decay made."""
    return range(config.warmup_steps, num_steps - config.decay_steps + 1)
