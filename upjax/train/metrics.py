"""What a run reports while it trains: metrics.jsonl, TensorBoard, and the terminal."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from upjax.files import write_text
from upjax.train.flops import peak_flops

METRICS_FILE = "metrics.jsonl"
Log = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def open_metrics(run: Path, *, step: int, num_steps: int, progress: bool) -> Iterator[Log]:
    """Yields a function that reports the metrics of a step, a dict with its number under "step".

    The run goes on after `step`: what an earlier process reported of later steps is dropped, so that each step has one
    line in metrics.jsonl. With several processes the first reports for all.
    """
    if jax.process_index() > 0:
        yield lambda metrics: None
        return
    from tensorboardX import SummaryWriter  # here, because it imports torch, where there is one, which takes seconds

    _drop_after(run / METRICS_FILE, step)
    with (
        (run / METRICS_FILE).open("a", encoding="utf-8") as file,
        SummaryWriter(str(run / "tensorboard"), purge_step=step + 1, write_to_disk=True) as board,
        _terminal(step, num_steps, shown=progress) as show,
    ):

        def log(metrics: dict[str, Any]) -> None:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            for name in metrics.keys() - {"step"}:
                board.add_scalar(name, metrics[name], metrics["step"])
            show(metrics)

        yield log


def read_metrics(run: Path | str) -> list[dict[str, Any]]:
    """Returns what a run reported, step by step; a line that a killed process left unfinished is not among it."""
    path = Path(run) / METRICS_FILE
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _drop_after(path: Path, step: int) -> None:
    kept = [metrics for metrics in read_metrics(path.parent) if metrics["step"] <= step]
    write_text(path, "".join(json.dumps(metrics) + "\n" for metrics in kept))


@contextlib.contextmanager
def _terminal(step: int, num_steps: int, *, shown: bool) -> Iterator[Log]:
    """Yields a function that shows metrics as a line on stderr, with a bar below where that is a terminal."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda metrics: print(_line(metrics, num_steps), file=sys.stderr, flush=True) if shown else None
        return
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("train", total=num_steps, completed=step)

        def show(metrics: dict[str, Any]) -> None:
            bar.console.print(_line(metrics, num_steps), highlight=False, soft_wrap=True)
            bar.update(task, completed=metrics["step"])

        yield show


FORMATS = {
    "loss": "loss {:.4f}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "gradient {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "gigaflops_per_second": "{:,.1f} GFLOP/s",
    "seconds_left": "{:,.0f} s left",
    "held_out_loss": "held-out loss {:.4f}",
}


def _line(metrics: dict[str, Any], num_steps: int) -> str:
    parts = [text.format(metrics[name]) for name, text in FORMATS.items() if name in metrics]
    return "  ".join([f"step {metrics['step']}/{num_steps}", *parts])


class Meter:
    """Counts tokens and the seconds spent on them, from one report to the next."""

    def __init__(self, flops_per_token: float, devices: Sequence[jax.Device]):
        self._flops_per_token = flops_per_token
        peak = peak_flops(devices[0].device_kind)
        self._peak = peak and peak * len(devices)
        self._tokens, self._steps, self._since = 0.0, 0, time.perf_counter()

    def count(self, tokens: float) -> None:
        self._tokens += tokens
        self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the seconds of what is not training."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def rates(self, steps_left: int) -> dict[str, float]:
        """Returns the rates since the last call, and the time left at them."""
        seconds = time.perf_counter() - self._since
        flops = self._tokens * self._flops_per_token / seconds
        utilisation = {"mfu": flops / self._peak} if self._peak else {"gigaflops_per_second": flops / 1e9}
        rates = {"tokens_per_second": self._tokens / seconds, "seconds_left": steps_left * seconds / self._steps}
        self._tokens, self._steps, self._since = 0.0, 0, time.perf_counter()
        return rates | utilisation
