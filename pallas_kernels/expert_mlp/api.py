"""The one entrance: checks the arguments and picks who computes.

Dims: M rows, D embed, F hidden, E experts.
"""

from functools import partial
from typing import Literal, get_args

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_mlp import composed, pallas_tpu, reference, xla
from pallas_kernels.varying import vary_together

Implementation = Literal["reference", "xla", "pallas_tpu", "composed"]


def expert_mlp(
    rows: Float[Array, "M D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    group_sizes: Int[Array, "E"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "M D"]:
    """Returns each row through its expert, down(silu(row @ gate) * (row @ up)), in the dtype of the rows.

    Args:
        rows: Sorted by expert: the first `group_sizes[0]` belong to expert 0, and so on.
        gate, up, down: The weights of each expert. They are used in the dtype of the rows, with products accumulated
            in float32; their gradients come in their own dtype.
        group_sizes: How many rows each expert has, none or more; their sum is at most M.
        implementation: Who computes it. None takes the kernels where the program is compiled for a TPU and the fused
            `xla` elsewhere; `composed` is three grouped matmuls. One asked for by name runs or fails.

    Returns:
        [M, D], with zeros in the rows past the sum of the groups; rows there get zero gradient and give none, whatever
        lies in them.
    """
    _check(rows, gate, up, down, group_sizes)
    operands = vary_together(rows, gate, up, down, group_sizes)
    if implementation == "reference":
        return reference.expert_mlp(*operands)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation is one of {sorted(IMPLEMENTATIONS)} or None, got {implementation!r}")
    return _with_rules(*operands, implementation)


IMPLEMENTATIONS = get_args(Implementation)


def _check(rows, gate, up, down, group_sizes) -> None:
    (_, D), (E, _, F) = rows.shape, gate.shape
    wanted = {"gate": (gate, (E, D, F)), "up": (up, (E, D, F)), "down": (down, (E, F, D))}
    wrong = [f"{name} {jax.typeof(w)}, needed {shape}" for name, (w, shape) in wanted.items() if w.shape != shape]
    if group_sizes.shape != (E,):
        wrong.append(f"group_sizes {jax.typeof(group_sizes)}, needed {(E,)}")
    if wrong:
        raise ValueError(f"rows {jax.typeof(rows)} with " + "; ".join(wrong))


# One rule for all platforms and implementations: what is saved is the same, so the platform can be picked inside.
@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _with_rules(rows, gate, up, down, group_sizes, implementation):
    return _forward(rows, gate, up, down, group_sizes, implementation)[0]


def _forward(rows, gate, up, down, group_sizes, implementation):
    operands = (rows, gate, up, down, group_sizes)
    out, products = _run(implementation, "forward", *operands)
    return out, (*operands, products)


def _backward(implementation, residuals, d_out):
    return *_run(implementation, "backward", *residuals, d_out), None


def _run(implementation, direction: str, *args):
    of = lambda module: getattr(module, direction)
    if implementation is None:
        return jax.lax.platform_dependent(*args, tpu=of(pallas_tpu), default=of(xla))
    return of({"xla": xla, "pallas_tpu": pallas_tpu, "composed": composed}[implementation])(*args)


_with_rules.defvjp(_forward, _backward)
