"""A training step on this machine's CPU against transformers' Mixtral with its fastest experts, in one run.

    python tools/bench_train.py --json

8 experts, top-2, d 512, d_ff 1408, 4 layers, vocabulary 8192, 8 x 256 tokens, AdamW. Each side runs in processes of its
own, in turn, with the same cores and environment; tokens/s are medians over steps. Ours clips by the global norm and in
bfloat16 keeps float32 parameters and moments; transformers' step does neither. CPU timings: they say nothing of a TPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

V, D, F, LAYERS, HEADS, EXPERTS, K = 8192, 512, 1408, 4, 8, 8, 2
B, T = 8, 256
DTYPES = ("float32", "bfloat16")
SIDES = ("upjax", "transformers")
# Both sides fill gigabytes of fresh memory a step; this asks the C library for huge pages, as `upjax train` does.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each process")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, dtype = options.side
        print(json.dumps({"upjax": run_upjax, "transformers": run_transformers}[side](dtype, options.steps)))
        return

    console = Console(stderr=True)
    results = {dtype: {side: {"step": [], "matmul": []} for side in SIDES} for dtype in DTYPES}
    for dtype in DTYPES:
        for round_ in range(options.rounds):
            for side in SIDES:
                console.print(f"{dtype}, round {round_ + 1} of {options.rounds}: {side}", highlight=False)
                measured = in_own_process(side, dtype, options.steps)
                results[dtype][side]["step"].append(measured["seconds_per_step"])
                results[dtype][side]["matmul"].append(measured["matmul_flops_per_second"])
    report = {dtype: summarize(results[dtype]) for dtype in DTYPES}
    report["tokens_per_second_ratio_vs_transformers"] = report["float32"]["ratio"]
    report["tokens_per_second_ratio_vs_transformers_bfloat16"] = report["bfloat16"]["ratio"]
    if options.json:
        print(json.dumps(report))
        return
    table = Table(title="Tokens/s of a training step, and the share of the machine's matmul rate")
    for column in ("dtype", *SIDES, "ratio", "matmul rate"):
        table.add_column(column, justify="left" if column == "dtype" else "right")
    for dtype in DTYPES:
        row = report[dtype]
        shown = [f"{row[side]['tokens_per_second']:.0f} ({row[side]['share_of_matmul_rate']:.2f})" for side in SIDES]
        table.add_row(dtype, *shown, f"{row['ratio']:.2f}", f"{row['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s")
    Console().print(table)


def summarize(measured: dict) -> dict:
    """Returns tokens/s of both sides; the machine's matmul rate is the best that either library reached."""
    rate = max(max(measured[side]["matmul"]) for side in SIDES)
    tokens = {side: B * T / statistics.median(measured[side]["step"]) for side in SIDES}
    return {
        **{
            side: {
                "tokens_per_second": tokens[side],
                "share_of_matmul_rate": tokens[side] * flops_per_token() / rate,
                "seconds_per_step": measured[side]["step"],
            }
            for side in SIDES
        },
        "matmul_flops_per_second": rate,
        "ratio": tokens["upjax"] / tokens["transformers"],
    }


def flops_per_token() -> float:
    """Returns the FLOPs of the matrix products, forward and backward, that a token needs at least."""
    attention = 4 * D * D + 2 * D * T / 2  # causal: half of the scores and of the weighted sums
    return 6 * (LAYERS * (attention + K * 3 * D * F + D * EXPERTS) + V * D)


def in_own_process(side: str, dtype: str, steps: int) -> dict:
    command = [sys.executable, __file__, "--side", side, dtype, "--steps", str(steps)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def median_seconds(run: Callable[[], object], steps: int) -> float:
    for _ in range(2):
        run()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def run_upjax(dtype: str, steps: int) -> dict:
    import jax
    import jax.numpy as jnp

    from upjax.config import OptimizerConfig, ScheduleConfig
    from upjax.mesh import make_mesh
    from upjax.model import Decoder, DecoderConfig, Dtypes, MoEConfig, flat_params
    from upjax.train.optimizer import make_optimizer
    from upjax.train.schedule import make_schedule
    from upjax.train.state import init_state
    from upjax.train.step import make_train_step

    config = DecoderConfig(
        vocab_size=V,
        embed_dim=D,
        hidden_dim=F,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=D // HEADS,
        max_sequence_length=T,
        moe=MoEConfig(num_experts=EXPERTS, experts_per_token=K, hidden_dim=F),
        moe_layers=tuple(range(LAYERS)),
    )
    dtypes = Dtypes(parameters="float32", compute=dtype)
    with jax.set_mesh(make_mesh()):
        schedule = make_schedule(ScheduleConfig(), peak=1e-4, num_steps=1000)
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4), schedule)
        state = init_state(flat_params(Decoder(config, dtypes, key=jax.random.key(0))), optimizer, jax.random.key(1))
        tokens = jax.random.randint(jax.random.key(2), (B, T), 0, V)
        ones = jnp.ones((B, T), jnp.int32)
        batch = {
            "tokens": tokens,
            "targets": jnp.roll(tokens, -1, axis=1),
            "segment_ids": ones,
            "positions": ones * jnp.arange(T)[None, :],
            "loss_weights": ones.astype(jnp.float32),
        }
        batch = jax.device_put(
            batch, jax.NamedSharding(jax.sharding.get_mesh(), jax.P(("data", "fsdp", "expert"), None))
        )
        train_step = make_train_step(
            config, dtypes, optimizer, schedule, load_balance_coefficient=0.01, z_loss_coefficient=0.001
        )

        def step() -> None:
            nonlocal state
            state, metrics = train_step(state, batch)
            assert jnp.isfinite(metrics["loss"])

        seconds = median_seconds(step, steps)
    n = 2048
    x = jnp.ones((n, n), dtype)
    matmul = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32))
    rate = 2 * n**3 / median_seconds(lambda: jax.block_until_ready(matmul(x)), 10)
    return {"seconds_per_step": seconds, "matmul_flops_per_second": rate}


def run_transformers(dtype: str, steps: int) -> dict:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=K,
        max_position_embeddings=T,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).to(getattr(torch, dtype))
    model.set_experts_implementation("grouped_mm")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, V, (B, T))

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)

    seconds = median_seconds(step, steps)
    n = 2048
    x = torch.ones((n, n), dtype=getattr(torch, dtype))
    rate = 2 * n**3 / median_seconds(lambda: x @ x, 10)
    return {"seconds_per_step": seconds, "matmul_flops_per_second": rate}


if __name__ == "__main__":
    main()
