"""One weight applied to activations: gathered for use, its gradient reduced and scattered back to where it lives.

Dims: B batch, T time, K input, N output.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.transposed_matmul import transposed_matmul
from upjax.mesh import replicated, spec_of


@jax.custom_vjp
def linear(x_BTK: jax.Array, w_KN: jax.Array) -> jax.Array:
    """Returns x @ w in the dtype of `x`, accumulated in float32. The gradient of `w` has the dtype and sharding of `w`.

    Why not plain `x @ w`: its gradient would be rounded to the compute dtype before it reaches float32 parameters, and
    the cotangent's float32 times a bfloat16 operand misses the fast units of every platform.
    """
    return _forward(x_BTK, w_KN)[0]


def _matmul(x, w, contract_w):
    dims = (((x.ndim - 1,), (contract_w,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32).astype(x.dtype)


def _forward(x_BTK, w_KN):
    return _matmul(x_BTK, replicated(w_KN.astype(x_BTK.dtype)), 0), (x_BTK, w_KN)


def _backward(residuals, g_BTN):
    x_BTK, w_KN = residuals
    d_x = _matmul(g_BTN, replicated(w_KN.astype(g_BTN.dtype)), 1)
    d_w = transposed_matmul(x_BTK, g_BTN, out_sharding=spec_of(w_KN))
    return d_x, d_w.astype(w_KN.dtype)


linear.defvjp(_forward, _backward)


def add_bias(x_BTN: jax.Array, bias_N: jax.Array) -> jax.Array:
    """Returns x + bias in the dtype of `x`."""
    return x_BTN + bias_N.astype(x_BTN.dtype)[None, None, :]
