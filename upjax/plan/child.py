"""The process that compiles: `python -m upjax.plan.child REQUEST ANSWER`, JSON files both.

A process of its own, because libtpu reads its settings once, when it is loaded; because what a compilation takes is
given back only when its process ends; and because a compiler that crashes then takes nothing with it.

The step is the one that `train` compiles on that mesh; but `train` sets no mesh for one device, and here it is one of
one device.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from upjax.config import parse_config
from upjax.files import write_text
from upjax.mesh import make_mesh
from upjax.train.program import Program, make_program

OUT_OF_HBM = ("CompileTimeHbmOom", "memory space hbm")
"""What libtpu says where a program needs too much, in 0.0.52 and before."""

MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def main(request: Path, answer: Path) -> None:
    """Compiles the step that a request asks for and writes what the compiler says, or what it refused."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    asked = json.loads(request.read_text())
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache is not dumped
    config = parse_config(asked["config"], str(request))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=asked["topology"]).devices
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.expert, devices=devices)
    said: dict[str, Any] = {"places": [list(device.coords) for device in mesh.devices.flat], "seconds": {}}
    with jax.set_mesh(mesh):
        program = make_program(config, config.model.decoder)
        said["arguments"] = _arguments(program)
        _write(answer, said)  # so that there is one when the compiler is stopped half-way
        _compile(program, said, asked["dump"])
    _write(answer, said)


def _end_with_parent(parent: int) -> None:
    """Ends this process when the one that started it has ended, even by a signal: a compilation takes minutes."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _compile(program: Program, said: dict[str, Any], dump: str) -> None:
    """Adds what the compiler says of the step, with the seconds that each stage took."""
    options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": False}
    began = time.perf_counter()
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    said["seconds"]["trace"] = time.perf_counter() - began
    began = time.perf_counter()
    lowered = traced.lower(lowering_platforms=("tpu",))
    said["seconds"]["lower"] = time.perf_counter() - began
    began = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:  # the answer that was asked for: it does not fit
        if not any(words in str(error) for words in OUT_OF_HBM):
            raise  # vector memory can be exhausted too: that is a kernel's fault
        said["refused"] = str(error)
        return
    finally:
        said["seconds"]["compile"] = time.perf_counter() - began
        said["seconds"]["cpu"] = time.process_time()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    said["memory"] = {name: getattr(memory, f"{name}_size_in_bytes") for name in MEMORY}
    said["cost"] = {name: cost.get(name) for name in ("flops", "bytes accessed", "transcendentals")}


def _write(answer: Path, said: dict[str, Any]) -> None:
    write_text(answer, json.dumps(said))


def _arguments(program: Program) -> dict[str, int]:
    """Returns the bytes that one device holds of each part of what the step takes, by their shapes and shardings."""
    state, batch = program.abstract_state(), program.abstract_batch()
    rest = (state.opt_state, state.step)
    return {"parameters": _held(state.params), "optimizer": _held(rest), "batch": _held(batch)}


def _held(tree: Any) -> int:
    shapes = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree)]
    return int(sum(np.prod(shape, dtype=np.int64) * size for shape, size in shapes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
