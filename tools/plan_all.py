"""Plans the pod runs in configs/ with the TPU compiler and prints the README's tables of them.

    python tools/plan_all.py                        # every run of PODS, compiled to the end: some minutes each
    python tools/plan_all.py --schedule-only        # the same numbers, without making code: half a minute each
    python tools/plan_all.py mixtral_8x7b_v5p --megablox      # beside the same step with JAX's megablox
    python tools/plan_all.py --readme               # writes both tables into README.md, between its markers

Memory and bytes are the compiler's; seconds of a step, MFU and tokens a day are estimates at published peak rates.
"""

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from upjax import Plan, load_config, plan  # noqa: E402
from upjax.plan.compile import compile_step  # noqa: E402
from upjax.plan.report import GB, GIB, mesh_name  # noqa: E402
from upjax.terminal import stages  # noqa: E402

PODS = {
    "mixtral_8x7b_v5p": "v5p:4x4x4",
    "qwen3_8x8b_v5p": "v5p:4x4x4",
    "qwen3_64x1b7_v5p": "v5p:2x2x4",
    "llama32_8x1b_v5e": "v5e:4x4",
    "llama32_8x1b_v6e": "v6e:4x4",
    "smollm2_8x135m_v5p": "v5p:2x2x1",
}
COMPARED = "mixtral_8x7b_v5p"
MEGABLOX = functools.partial(compile_step, command=(sys.executable, str(ROOT / "tools" / "megablox_child.py")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PODS)}; default: all")
    parser.add_argument("--schedule-only", action="store_true", help="do not make code: no time to compile is given")
    parser.add_argument("--megablox", action="store_true", help=f"also compare {COMPARED} with megablox")
    parser.add_argument("--readme", action="store_true", help="write the tables into README.md; implies --megablox")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - PODS.keys())
    if unknown:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(PODS)}")
    jax.config.update("jax_platforms", "cpu")  # the compiler has a process of its own
    plans = {name: _plan(name, schedule_only=asked.schedule_only) for name in asked.names or PODS}
    tables = {"pods": pods_table(plans)}
    if asked.megablox or asked.readme:
        ours = plans.get(COMPARED) or _plan(COMPARED, schedule_only=asked.schedule_only)
        theirs = _plan(COMPARED, schedule_only=asked.schedule_only, compile_=MEGABLOX)
        tables["megablox"] = megablox_table(ours, theirs)
    for name, table in tables.items():
        print(f"\n{table}")
        if asked.readme:
            write_between(ROOT / "README.md", f"plan_all: {name}", table)


def _plan(name: str, **given) -> Plan:
    with stages() as say:
        return plan(
            load_config(ROOT / "configs" / f"{name}.yaml"), PODS[name], progress=lambda s: say(f"{name}: {s}"), **given
        )


def pods_table(plans: dict[str, Plan]) -> str:
    """Returns one row a run."""
    head = ("config", "slice", "mesh", "parameters, active", "peak / usable, GiB a chip", "sent, GB a device and step")
    estimates = ("step, s", "MFU", "bound by", "tokens a day", "compiler, s (CPU s)")
    rows = []
    for name, made in plans.items():
        of, chip = made.roofline, made.topology.devices_per_chip / GIB
        told = made.to_dict()
        rows.append(
            (
                f"[{name}](configs/{name}.yaml)",
                made.topology.name,
                mesh_name(made),
                f"{told['parameters'] / 1e9:.1f} B, {told['active_parameters'] / 1e9:.1f} B",
                f"{made.memory.total * chip:.1f} / {made.topology.available_bytes_per_device * chip:.1f}"
                + ("" if made.fits else ", does not fit"),
                f"{_sent(made):.1f}",
                f"{of.step_seconds:.2f}",
                f"{of.mfu:.0%}",
                of.bound_by,
                f"{of.tokens_per_day / 1e9:.1f} B",
                _compile_seconds(made),
            )
        )
    return markdown((*head, *estimates), rows)


def megablox_table(ours: Plan, theirs: Plan) -> str:
    """Returns the same step with our kernels and with megablox, one row each."""
    head = ("experts by", "peak, GiB a chip", "temporaries, GiB", "sent, GB a device and step", "compiler, s (CPU s)")
    rows = [
        (
            name,
            f"{made.memory.total / GIB:.3f}",
            f"{made.memory.temporaries / GIB:.3f}",
            f"{_sent(made):.2f}",
            _compile_seconds(made),
        )
        for name, made in {"our kernels": ours, "megablox": theirs}.items()
    ]
    return markdown(head, rows)


def _sent(made: Plan) -> float:
    return sum(c.bytes_sent * c.count for c in made.collectives) / GB


def _compile_seconds(made: Plan) -> str:
    seconds = made.compiled.seconds
    return f"{seconds['all']:.0f} ({seconds['cpu']:.0f})" if made.compiled.memory else "-"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, without columns in which nothing stands."""
    kept = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    lines = [[line[i] for i in kept] for line in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_between(path: Path, marker: str, text: str) -> None:
    """Replaces what stands between the markers `<!-- MARKER -->` and `<!-- end -->` of a file."""
    marked = re.compile(rf"(<!-- {re.escape(marker)} -->\n).*?(<!-- end -->)", re.DOTALL)
    before = path.read_text(encoding="utf-8")
    if not marked.search(before):
        raise SystemExit(f"{path} has no <!-- {marker} --> ... <!-- end -->")
    path.write_text(marked.sub(lambda found: f"{found[1]}{text}\n{found[2]}", before), encoding="utf-8")


if __name__ == "__main__":
    main()
