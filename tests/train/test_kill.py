"""SIGKILL at random moments, some during a save: see tools/kill_and_resume.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "kill_and_resume.py"


@pytest.mark.slow
def test_killed_runs_lose_nothing():
    done = subprocess.run(
        [sys.executable, str(TOOL), "--kills", "4", "--json"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["starting"] + result["training"] + result["saving"] == 4
    assert result["saving"] >= 1
    assert (result["differing_steps"], result["differing_parameters"], result["damaged_checkpoints"]) == (0, 0, 0)
