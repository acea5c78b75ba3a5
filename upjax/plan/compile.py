"""The compiler, in a process of its own: what it says of a step."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from upjax.config import Config, config_to_dict
from upjax.errors import InputError
from upjax.plan.topology import Topology

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server where there is no TPU
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may hold libtpu's lock: a test, a second plan, a run
}
SCHEDULED = "after_optimizations"
CHILD = (sys.executable, "-m", "upjax.plan.child")
Progress = Callable[[str], None]


class PlanError(RuntimeError):
    """The compiler could not compile the step, for another reason than memory. The message is the compiler's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came out of the compiler, one device's bytes."""

    text: str
    """The scheduled program."""
    assignment: str
    live_ranges: str
    arguments: dict[str, int]
    places: list[tuple[int, ...]]
    seconds: dict[str, float]
    """Of each stage."""
    refused: str | None
    """The compiler's words when the program needs more memory than there is."""
    memory: dict[str, int] | None
    """The compiler's memory analysis; None where it refused or was not let finish."""
    cost: dict[str, float] | None
    """The compiler's cost analysis, likewise."""


def compile_step(
    config: Config,
    topology: Topology,
    *,
    progress: Progress = lambda stage: None,
    schedule_only: bool = False,
    command: Sequence[str] = CHILD,
) -> Compiled:
    """Returns what the TPU compiler makes of the step of `config`, whose mesh and decoder are those to compile for.

    With `schedule_only` it is stopped once the program is scheduled and its memory assigned: memory, collectives and
    traffic are known by then, and the code for the cores, most of the time, is not made. Raises InputError where there
    is no libtpu, PlanError where the compiler fails. `command` is what runs `child.main`.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "plan needs the TPU compiler, libtpu, which needs no TPU: pip install 'upjax[tpu]' (or the test extra)"
        )
    with (
        tempfile.TemporaryDirectory(prefix="upjax-plan-") as scratch,
        _child(config, topology, Path(scratch), command) as child,
    ):
        dump, answer, began = Path(scratch) / "dump", Path(scratch) / "answer.json", time.perf_counter()
        while child.poll() is None:
            scheduled = any(dump.glob(f"*.{SCHEDULED}_after_buffer_assignment.txt"))  # written after what is read below
            coding = "scheduled" if schedule_only else "generating code"
            progress(coding if scheduled else "optimising" if dump.exists() else "tracing")
            if scheduled and schedule_only:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=2)  # one that refuses ends by itself
                child.kill()
                break
            time.sleep(0.2)
        code = child.wait()
        said = _answer(answer, code, Path(scratch) / "log", stopped=schedule_only, dumped=_read(dump, SCHEDULED))
        return Compiled(
            text=_read(dump, SCHEDULED) or "",
            assignment=_read(dump, f"{SCHEDULED}-buffer-assignment") or "",
            live_ranges=_read(dump, f"{SCHEDULED}-live-range") or "",
            arguments=said["arguments"],
            places=[tuple(place) for place in said["places"]],
            seconds=said["seconds"] | {"all": time.perf_counter() - began},
            refused=said.get("refused"),
            memory=said.get("memory"),
            cost=said.get("cost"),
        )


Compile = Callable[..., Compiled]
"""`compile_step`, or a function like it."""


@contextlib.contextmanager
def _child(config: Config, topology: Topology, scratch: Path, command: Sequence[str]) -> Iterator[subprocess.Popen]:
    request = {"config": config_to_dict(config), "topology": topology.name, "dump": str(scratch / "dump")}
    (scratch / "request.json").write_text(json.dumps(request))
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with (scratch / "log").open("wb") as log:
        child = subprocess.Popen(
            [*command, str(scratch / "request.json"), str(scratch / "answer.json")],
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": paths},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def _answer(answer: Path, code: int, log: Path, *, stopped: bool, dumped: str | None) -> dict[str, Any]:
    if answer.exists() and (code == 0 or (stopped and dumped)):
        return json.loads(answer.read_text())
    lines = log.read_text(errors="replace").strip().splitlines()
    raise PlanError("\n".join(["the TPU compiler did not compile the step:", *lines[-12:]]))


def _read(dump: Path, name: str) -> str | None:
    """Returns the dump of that name of the one module that was compiled."""
    found = list(dump.glob(f"*.{name}.txt"))
    return found[0].read_text() if found else None
