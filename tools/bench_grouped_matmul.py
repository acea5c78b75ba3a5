"""The grouped matmul on this machine's CPU against one dense matmul of the same FLOPs and against jax.lax.ragged_dot.

    python tools/bench_grouped_matmul.py --json

Ratios are rates, above 1 is faster than the other; both are timed in turn, in one process, and medians compared. These
are CPU timings: they say nothing of a TPU, where the Pallas kernels run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cases import Case
from upjax.model.linear import linear

CASES = [
    Case(name=f"{groups}_experts_{pattern}", m=4096, k=512, n=1408, num_groups=groups, pattern=pattern)
    for groups in (8, 64)
    for pattern in ("even", "skewed")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    cases = [
        measure(case, jnp.dtype(options.dtype), options.rounds)
        for case in track(CASES, console=Console(stderr=True), description="timing")
    ]
    if options.json:
        print(json.dumps({"dtype": options.dtype, "cases": cases}))
        return
    table = Table(title=f"Rates as ratios, {options.dtype}, M 4096, K 512, N 1408; above 1 is faster")
    for column in (
        "case",
        "forward / dense",
        "with backward / dense",
        "forward / ragged_dot",
        "with backward / ragged_dot",
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in cases:
        table.add_row(case["name"], *(f"{case[name]:.2f}" for name in RATIOS))
    Console().print(table)


RATIOS = ("forward_vs_dense", "forward_backward_vs_dense", "forward_vs_ragged_dot", "forward_backward_vs_ragged_dot")


def measure(case: Case, dtype, rounds: int) -> dict:
    lhs, rhs, group_sizes = case.arrays(jax.random.key(0), dtype)
    cotangent = jax.random.normal(jax.random.key(1), (case.m, case.n)).astype(dtype)
    ours = partial(grouped_matmul, group_sizes=group_sizes)
    ragged = lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, group_sizes)
    # `linear` is the dense product at its best here: in bfloat16 twice and more as fast as what `lhs @ rhs` becomes.
    dense = lambda lhs, rhs: linear(lhs[None], rhs)[0]
    seconds = {}
    for kind, wrap in (
        ("forward", lambda f: jax.jit(f)),
        ("forward_backward", partial(with_backward, cotangent=cotangent)),
    ):
        runs: dict[str, Callable] = {
            "ours": partial(wrap(ours), lhs, rhs),
            "dense": partial(wrap(dense), lhs, rhs[0]),
        }
        seconds[kind] = time_in_turn(runs, rounds) | time_in_turn({"ragged_dot": partial(wrap(ragged), lhs, rhs)}, 3)
    ratios = {
        f"{kind}_vs_{other}": times[other] / times["ours"]
        for kind, times in seconds.items()
        for other in ("dense", "ragged_dot")
    }
    return {"name": case.name, **ratios, "seconds": seconds}


def with_backward(function: Callable, *, cotangent: jax.Array) -> Callable:
    """Returns a jitted function that makes the value and both gradients."""

    @jax.jit
    def run(lhs, rhs):
        value, vjp = jax.vjp(function, lhs, rhs)
        return value, vjp(cotangent)

    return run


def time_in_turn(runs: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Returns the median seconds of each, run one after the other so that a drift of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
