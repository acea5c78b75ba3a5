"""Two processes train as one does, stop together, and leave a run that one process goes on with."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from upjax.checkpoint import list_steps
from upjax.config import MeshConfig, config_to_yaml
from upjax.train import train
from upjax.train.metrics import METRICS_FILE, read_metrics

WORKER = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_default_matmul_precision", "highest")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from upjax.config import load_config
from upjax.train import train
train(load_config(sys.argv[1]))
"""


def launch(config):
    file = config.output.with_suffix(".yaml")
    file.write_text(config_to_yaml(config))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WORKER, str(file), address]
    return [subprocess.Popen([*command, str(i)], env=environment, stderr=subprocess.PIPE, text=True) for i in range(2)]


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on(make_config, tmp_path):
    mesh = MeshConfig(data=2, fsdp=2, expert=2)
    sections = {"train": {"steps": 400, "log_every": 1, "checkpoint_every": 1000}, "schedule": {"warmup_steps": 2}}
    alone = dataclasses.replace(make_config(output=tmp_path / "alone", **sections), mesh=mesh)
    together = dataclasses.replace(alone, output=tmp_path / "together")
    processes = launch(together)
    while len(read_metrics(together.output)) < 5 and all(process.poll() is None for process in processes):
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)  # the one that reports nothing
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    (stopped,) = list_steps(together.output)
    assert 5 <= stopped < 400
    shorter = lambda config: dataclasses.replace(config, train=dataclasses.replace(config.train, steps=stopped + 3))
    train(shorter(together), progress=False)
    train(shorter(alone), progress=False)
    rows = [[[m["step"], m["loss"], m["grad_norm"]] for m in read_metrics(c.output)] for c in (together, alone)]
    np.testing.assert_allclose(*rows, rtol=1e-5)
    assert (together.output / METRICS_FILE).read_text().count("\n") == stopped + 3
