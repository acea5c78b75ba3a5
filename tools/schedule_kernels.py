"""What `kernel_schedule.py` compiles: our kernels and those of the peers, by the names that its command line takes.

Dims: M rows, D embed, F hidden, E experts.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from pallas_kernels.expert_mlp import pallas_tpu as expert_mlp
from pallas_kernels.expert_mlp.cases import Case
from pallas_kernels.grouped_matmul import pallas_tpu as grouped_matmul
from pallas_kernels.grouped_matmul.tiling import Tiling
from pallas_kernels.tpu_chips import TpuChip

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Tiled:
    """One of our kernels as it is tiled: [rows, k] by [k, n], `products` times over, or over the rows of each group."""

    name: str
    tile: Tiling
    k: int
    n: int
    products: int = 1
    over_rows: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of (group_sizes, *operands), the FLOPs that it means, and our kernels in it (none in a peer's)."""

    function: Callable[..., Any]
    operands: tuple[Shape, ...]
    flops: float
    tiled: tuple[Tiled, ...] = ()
    name: str = ""


def ours(kernel: str, case: Case, chip: TpuChip, weights_dtype: str) -> Program:
    """Returns one of our kernels, compiled alone."""
    M, D, F, E = case.M, case.D, case.F, case.E
    flops = 2.0 * M * D * F
    if kernel.startswith("grouped_matmul"):
        tilings = grouped_matmul.choose_tilings(M, D, F, E, "bfloat16", chip)
        options = {"chip": chip}
        lhs, rhs, dout = _bf16(M, D), _bf16(E, D, F), _bf16(M, F)
        if kernel == "grouped_matmul":
            tile = tilings.forward
            run = lambda sizes, lhs, rhs: grouped_matmul.forward(lhs, rhs, sizes, tile=tile, **options)
            return Program(run, (lhs, rhs), flops, (Tiled("grouped_matmul_forward", tile, D, F),))
        if kernel == "grouped_matmul_dlhs":
            tile = dataclasses.replace(tilings.lhs_grad, k=tilings.lhs_grad.n, n=tilings.lhs_grad.k)
            run = lambda sizes, dout, rhs: grouped_matmul.lhs_grad(dout, rhs, sizes, tile=tilings.lhs_grad, **options)
            return Program(run, (dout, rhs), flops, (Tiled("grouped_matmul_lhs_grad", tile, F, D),))
        tile = tilings.rhs_grad
        run = lambda sizes, lhs, dout: grouped_matmul.rhs_grad(
            lhs, dout, E, sizes, tile=tile, dtype=jnp.bfloat16, **options
        )
        return Program(run, (lhs, dout), flops, (Tiled("grouped_matmul_rhs_grad", tile, D, F, over_rows=True),))

    tilings = expert_mlp.choose_tilings(M, D, F, E, "bfloat16", weights_dtype, chip)
    rows, gate, up, down, _ = case.shapes("bfloat16", weights_dtype).values()
    if kernel == "swiglu_experts":
        tiled = (
            Tiled("expert_mlp_gate_up", tilings.gate_up, D, F, products=2),
            Tiled("expert_mlp_down", tilings.down, F, D),
        )
        run = lambda sizes, *operands: expert_mlp.forward(*operands, sizes, tilings=tilings, chip=chip)
        return Program(run, (rows, gate, up, down), 3 * flops, tiled)
    tiled = (
        Tiled("expert_mlp_gate_up_grad", tilings.d_gate_up, D, F),
        Tiled("expert_mlp_rows_grad", tilings.d_rows, F, D, products=2),
        Tiled("expert_mlp_gate_weights_grad", tilings.d_gate, D, F, over_rows=True),
        Tiled("expert_mlp_up_weights_grad", tilings.d_gate, D, F, over_rows=True),
        Tiled("expert_mlp_down_weights_grad", tilings.d_down, F, D, over_rows=True),
    )
    product = Shape((M, F), jnp.uint16)

    def backward(sizes, rows, gate, up, down, gate_MF, up_MF, d_out):
        return expert_mlp.backward(rows, gate, up, down, sizes, (gate_MF, up_MF), d_out, tilings=tilings, chip=chip)

    return Program(backward, (rows, gate, up, down, product, product, rows), 6 * flops, tiled)


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """A peer's grouped matmul and its two gradients: (lhs, rhs, sizes), (dout, rhs, sizes), (lhs, dout, sizes)."""

    forward: Callable
    lhs_grad: Callable
    rhs_grad: Callable


def peer(name: str, kernel: str, case: Case, tiling: tuple[int, int, int]) -> tuple[list[tuple[int, Program]], int]:
    """Returns how often which of a peer's kernels do the same work, and the bytes that pass between them.

    The fused kernels are set against grouped matmuls and, between those, fusions that read and write each array once:
    the activation, its derivative, and the sum of the two ways back to the rows. Raises NotImplementedError where the
    peer is not installed.
    """
    of = PEERS[name](tiling)
    M, D, F, E = case.M, case.D, case.F, case.E
    flops, by_embed, by_hidden = 2.0 * M * D * F, 2 * M * D, 2 * M * F

    def forward(k: int, n: int) -> Program:
        run = lambda sizes, lhs, rhs: of.forward(lhs, rhs, sizes)
        return Program(run, (_bf16(M, k), _bf16(E, k, n)), flops, name=f"forward {k} x {n}")

    def lhs_grad(k: int, n: int) -> Program:
        run = lambda sizes, dout, rhs: of.lhs_grad(dout, rhs, sizes)
        return Program(run, (_bf16(M, n), _bf16(E, k, n)), flops, name=f"lhs gradient {k} x {n}")

    def rhs_grad(k: int, n: int) -> Program:
        run = lambda sizes, lhs, dout: of.rhs_grad(lhs, dout, sizes)
        return Program(run, (_bf16(M, k), _bf16(M, n)), flops, name=f"rhs gradient {k} x {n}")

    match kernel:
        case "grouped_matmul":
            return [(1, forward(D, F))], 0
        case "grouped_matmul_dlhs":
            return [(1, lhs_grad(D, F))], 0
        case "grouped_matmul_drhs":
            return [(1, rhs_grad(D, F))], 0
        case "swiglu_experts":
            return [(2, forward(D, F)), (1, forward(F, D))], 3 * by_hidden
    parts = [(1, lhs_grad(F, D)), (2, lhs_grad(D, F)), (2, rhs_grad(D, F)), (1, rhs_grad(F, D))]
    return parts, (3 + 5) * by_hidden + 3 * by_embed


def composed(kernel: str, case: Case, chip: TpuChip) -> tuple[list[tuple[int, Program]], int]:
    """Returns what `peer` does, of our own grouped matmuls: what fusing them saves."""
    M, D, F = case.M, case.D, case.F
    wide = dataclasses.replace(case, D=F, F=D)
    of = lambda kernel, case: ours(kernel, case, chip, "bfloat16")
    by_embed, by_hidden = 2 * M * D, 2 * M * F
    if kernel == "swiglu_experts":
        return [(2, of("grouped_matmul", case)), (1, of("grouped_matmul", wide))], 3 * by_hidden
    parts = [(1, of("grouped_matmul_dlhs", wide)), (2, of("grouped_matmul_dlhs", case))]
    parts += [(2, of("grouped_matmul_drhs", case)), (1, of("grouped_matmul_drhs", wide))]
    return parts, (3 + 5) * by_hidden + 3 * by_embed


def _megablox(tiling: tuple[int, int, int]) -> Matmuls:
    options = {"preferred_element_type": jnp.bfloat16, "tiling": tiling}
    by_rows, over_rows = partial(gmm.__wrapped__, **options), partial(tgmm.__wrapped__, **options)
    return Matmuls(
        forward=by_rows,
        lhs_grad=partial(by_rows, transpose_rhs=True),
        rhs_grad=lambda lhs, dout, sizes: over_rows(lhs.T, dout, sizes),
    )


def _tokamax(tiling: tuple[int, int, int]) -> Matmuls:
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("tokamax is not installed: pip install tokamax")
    kernel = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel")
    precision = (jax.lax.Precision.DEFAULT,) * 2
    options = {"precision": precision, "out_dtype": jnp.dtype("bfloat16"), "tiling": tiling}
    by_rows, over_rows = (partial(getattr(f, "__wrapped__", f), **options) for f in (kernel.gmm, kernel.tgmm))
    return Matmuls(
        forward=by_rows,
        lhs_grad=partial(by_rows, transpose_rhs=True),
        rhs_grad=lambda lhs, dout, sizes: over_rows(lhs.T, dout, sizes),
    )


def _ragged_dot(tiling: tuple[int, int, int]) -> Matmuls:
    dims = jax.lax.RaggedDotDimensionNumbers
    transposed = dims((((1,), (2,)), ((), ())), [0], [0])
    over_rows = dims((((0,), (0,)), ((), ())), [0], [])
    run = partial(jax.lax.ragged_dot_general, preferred_element_type=jnp.bfloat16)
    return Matmuls(
        forward=partial(jax.lax.ragged_dot, preferred_element_type=jnp.bfloat16),
        lhs_grad=lambda dout, rhs, sizes: run(dout, rhs, sizes, transposed),
        rhs_grad=lambda lhs, dout, sizes: run(lhs, dout, sizes, over_rows),
    )


PEERS: dict[str, Callable[[tuple[int, int, int]], Matmuls]] = {
    "megablox": _megablox,
    "tokamax": _tokamax,
    "ragged_dot": _ragged_dot,
}

KERNELS = ("grouped_matmul", "grouped_matmul_dlhs", "grouped_matmul_drhs", "swiglu_experts", "swiglu_experts_backward")


def _bf16(*shape: int) -> Shape:
    return Shape(shape, jnp.bfloat16)
