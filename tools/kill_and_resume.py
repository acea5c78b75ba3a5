"""Kills a training run at random moments, some of them while it saves, and checks that nothing is lost.

    python tools/kill_and_resume.py --kills 20 --json

A small run is made twice: once undisturbed, and once by processes that get SIGKILL while they start, train or save,
each going on where the last whole checkpoint was. After each kill every checkpoint there is must load; at the end the
losses, gradient norms and learning rates of all steps and the final parameters must be those of the undisturbed run, to
the bit.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from upjax.checkpoint import UNFINISHED, checkpoint_directory, list_steps, load_model
from upjax.config import Config, DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig, config_to_yaml
from upjax.data.dataset import INFO_FILE, DatasetInfo, SplitName, info_json
from upjax.data.shards import SplitWriter
from upjax.model import DecoderConfig, MoEConfig, flat_params
from upjax.train.metrics import METRICS_FILE, read_metrics

VOCAB = 64
STEPS_A_KILL = 40
CHECKPOINT_EVERY = 10
COMPARED = ("loss", "grad_norm", "learning_rate", "load_balance_loss", "z_loss")
TRAIN = (
    "import sys; from upjax.config import load_config; from upjax.train import train; train(load_config(sys.argv[1]))"
)


def kill_and_resume(directory: Path, num_kills: int, seed: int) -> dict:
    """Returns how many kills hit what, and what differs from the undisturbed run."""
    rng = random.Random(seed)
    write_dataset(directory / "dataset")
    num_steps = STEPS_A_KILL * (num_kills + 1)
    runs = [directory / name for name in ("undisturbed", "killed")]
    for run in runs:
        config = make_config(run, directory / "dataset", num_steps)
        run.with_suffix(".yaml").write_text(config_to_yaml(config))
    began = time.monotonic()
    if (code := launch(runs[0]).wait()) != 0:
        raise SystemExit(f"the undisturbed run ended with exit code {code}")
    seconds = time.monotonic() - began
    counts = {"starting": 0, "training": 0, "saving": 0, "damaged_checkpoints": 0}
    for number in range(num_kills):
        wish = ("training", "saving", "saving", "starting")[number % 4]
        before = unfinished(runs[1])
        process = launch(runs[1])
        wait_for(wish, process, runs[1], rng, seconds)
        process.kill()
        if process.wait() == 0:
            raise SystemExit(f"the run was over before kill {number + 1} of {num_kills}")
        # What was hit is what is found afterwards: a save may begin or end between the look and the kill.
        hit = "saving" if unfinished(runs[1]) - before else "training" if wish == "saving" else wish
        counts[hit] += 1
        counts["damaged_checkpoints"] += damaged(runs[1])
        print(f"kill {number + 1}: {hit}, checkpoints {list_steps(runs[1])}", file=sys.stderr)
    if (code := launch(runs[1]).wait()) != 0:
        raise SystemExit(f"the last run ended with exit code {code}")
    return {"kills": num_kills, "steps": num_steps} | counts | compare(*runs)


def launch(run: Path) -> subprocess.Popen:
    """Returns a process that trains the run, from wherever it stands to its end."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(run.parent / "compilation_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", TRAIN, str(run.with_suffix(".yaml"))]
    return subprocess.Popen(command, env=os.environ | cache, stderr=subprocess.DEVNULL)


def wait_for(wish: str, process: subprocess.Popen, run: Path, rng: random.Random, seconds: float) -> None:
    """Returns at a random moment of what is wished for, or when the process ends."""
    if wish == "starting":
        time.sleep(rng.uniform(0, min(seconds, 8.0)))
        return
    before, lines, wanted = unfinished(run), num_lines(run), rng.randint(1, STEPS_A_KILL - CHECKPOINT_EVERY)
    while process.poll() is None and num_lines(run) < lines + wanted:
        time.sleep(0.001)
    while process.poll() is None and bool(unfinished(run) - before) != (wish == "saving"):
        time.sleep(0.0005)
    if wish == "saving":
        time.sleep(rng.uniform(0, 0.02))


def num_lines(run: Path) -> int:
    path = run / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def unfinished(run: Path) -> set[tuple[str, int]]:
    """Returns the checkpoints that are being written or deleted, each told from later ones of its name."""
    found = set()
    for entry in (run / "checkpoints").glob("*"):
        if entry.name.endswith(UNFINISHED):
            try:
                found.add((entry.name, entry.stat().st_ino))
            except FileNotFoundError:  # renamed since it was listed
                continue
    return found


def damaged(run: Path) -> int:
    """Returns how many of the run's checkpoints do not load."""
    count = 0
    for step in list_steps(run):
        try:
            load_model(checkpoint_directory(run, step))
        except Exception as error:
            print(f"checkpoint {step} does not load: {error}", file=sys.stderr)
            count += 1
    return count


def compare(undisturbed: Path, killed: Path) -> dict:
    """Returns the number of steps reported otherwise, and of parameters that differ at the end."""
    wanted, got = (
        [[m["step"], *(m[name] for name in COMPARED)] for m in read_metrics(run)] for run in (undisturbed, killed)
    )
    first, second = (flat_params(load_model(run)) for run in (undisturbed, killed))
    different = [path for path in first if not np.array_equal(np.asarray(first[path]), np.asarray(second[path]))]
    rows = sum(a != b for a, b in zip(wanted, got, strict=False)) + abs(len(wanted) - len(got))
    return {"differing_steps": rows, "differing_parameters": len(different), "final_loss": wanted[-1][1]}


def make_config(run: Path, dataset: Path, num_steps: int) -> Config:
    decoder = DecoderConfig(
        vocab_size=VOCAB,
        embed_dim=32,
        hidden_dim=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_sequence_length=64,
        moe=MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=64),
        moe_layers=(0,),
    )
    return Config(
        output=run,
        model=ModelConfig(decoder=decoder),
        data=DataConfig(path=dataset, sequence_length=64, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        schedule=ScheduleConfig(warmup_steps=10, decay_steps=num_steps // 2),
        train=TrainConfig(
            steps=num_steps,
            log_every=1,
            checkpoint_every=CHECKPOINT_EVERY,
            keep_checkpoints=2,
            keep_branch_points=False,
        ),
    )


def write_dataset(path: Path) -> None:
    """Writes documents whose tokens count upwards by a step of their own."""
    path.mkdir()
    rng = np.random.default_rng(0)
    names: tuple[SplitName, ...] = ("train", "held_out")
    writers = {name: SplitWriter(path, name, dtype="uint16", shard_size=1 << 14) for name in names}
    for length in rng.integers(10, 100, 300):
        tokens = 1 + np.cumsum(np.full(length, rng.integers(1, 9))) % (VOCAB - 1)
        writers["train"].write([*tokens.tolist(), 0], num_bytes=int(length))
    info = DatasetInfo(
        tokenizer_sha256="0" * 64,
        vocab_size=VOCAB,
        end_of_text=0,
        max_token_id=VOCAB - 1,
        dtype="uint16",
        seed=0,
        held_out=0.0,
        splits={name: writer.finish() for name, writer in writers.items()},
        duplicates=0,
        empty=0,
        unreadable=(),
    )
    (path / INFO_FILE).write_text(info_json(info))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for scripts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = kill_and_resume(Path(directory), arguments.kills, arguments.seed)
    print(json.dumps(result) if arguments.json else "\n".join(f"{name}: {value}" for name, value in result.items()))
    return int(bool(result["damaged_checkpoints"] or result["differing_steps"] or result["differing_parameters"]))


if __name__ == "__main__":
    sys.exit(main())
