"""Plans of a tiny model by the real TPU compiler: memory against its own analysis and by hand, refusals, sweeps."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
import yaml
from tiny_run import TINY, tiny_config

from upjax import Decoder, InputError, PlanError, cli, plan, save_model
from upjax.config import config_to_dict
from upjax.plan import compile as compiling
from upjax.plan import planning, report
from upjax.plan.topology import parse_topology

SLICE = "v5p:2x2x1"
PROMISED = {
    "fits",
    "peak_bytes_per_chip",
    "hbm_bytes_per_chip",
    "flops_per_step",
    "step_seconds_estimate",
    "mfu_estimate",
    "collectives",
}


@pytest.fixture(scope="module")
def planned():
    return plan(tiny_config(), SLICE, tokens=1e9)


def bytes_by_hand() -> int:
    """The float32 parameters that one of two times two devices holds."""
    D, V, F, E = 256, 512, 512, 4
    attention = D * 256 + 2 * D * 128 + 256 * D
    a_layer = (attention + 3 * E * D * F) // 4 + 2 * D + D * E  # the norms and the router lie whole on each device
    return 4 * ((2 * V * D) // 4 + D + 2 * a_layer)


@pytest.mark.slow
def test_memory_is_that_of_the_compilers_own_analysis(planned):
    said, memory = planned.compiled.memory, planned.memory
    whole = said["argument"] + said["output"] - said["alias"] + said["temp"]
    assert planned.fits
    assert 0 <= memory.total - whole < 1e6  # constants are not in that analysis
    temporary = memory.activations + memory.temporaries + memory.gaps
    assert 0 <= said["temp"] - temporary < 1e5  # where some constants are counted
    assert memory.activations > 0 and memory.temporaries > 0
    assert memory.largest_buffers[0].bytes <= memory.activations + memory.temporaries


@pytest.mark.slow
def test_the_state_is_what_its_shapes_say(planned):
    memory = planned.memory
    assert memory.parameters == bytes_by_hand()
    assert 2 * memory.parameters < memory.optimizer < 2 * memory.parameters + 100  # two moments and the counts
    assert memory.batch == 5 * 4 * 128 * 4 // 4


@pytest.mark.slow
def test_the_collectives_are_those_of_the_model(planned):
    moe = [c for c in planned.collectives if c.axes == ("expert",) and c.count == 2]
    assert moe, planned.collectives  # two layers: the tokens' way to the experts and back lies in the scan
    gathers = [c for c in planned.collectives if "fsdp" in c.axes]
    assert sum(c.bytes_sent * c.count for c in gathers) > 0
    assert all(c.seconds > 0 for c in planned.collectives if c.bytes_sent)


@pytest.mark.slow
def test_what_is_promised_is_there_and_is_json(planned):
    told = json.loads(json.dumps(planned.to_dict()))
    assert told.keys() >= PROMISED
    assert told["peak_bytes_per_chip"] == planned.memory.total
    assert told["estimate"]["chip_hours"] > 0
    assert 0 < told["mfu_estimate"] < 1


@pytest.mark.slow
def test_the_plot_is_a_png(planned, tmp_path):
    report.plot(planned, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Returns a function that plans a config by the command and returns its exit code, stdout and stderr."""
    monkeypatch.setattr(cli, "_prepare_process", lambda: None)  # of a process of its own

    def run(config, *arguments) -> tuple[int, str, str]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config_to_dict(config)))
        monkeypatch.setattr(sys, "argv", ["upjax", "plan", str(path), *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        said = capsys.readouterr()
        return exit_.value.code or 0, said.out, said.err

    return run


@pytest.mark.slow
def test_the_command_prints_json_of_another_mesh(run):
    code, out, err = run(
        tiny_config(), "--topology", SLICE, "--mesh", "data=2,fsdp=1,expert=2", "--schedule-only", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told.keys() >= PROMISED
    assert told["mesh"] == {"data": 2, "fsdp": 1, "expert": 2}
    assert not told["compiler"]["finished"]
    assert "optimising" in err


@pytest.mark.slow
def test_what_does_not_fit_is_an_answer_with_the_largest_buffers(run):
    large = tiny_config(data={"sequence_length": 128, "batch_size": 65536})
    code, out, err = run(large, "--topology", "v5e:2x2")
    assert code == 1, err
    words = " ".join(out.replace("│", " ").split())
    assert "refused the program" in words
    assert "does not fit" in words and "15.8 GiB a chip" in words and "too much" in words
    assert "Largest buffers" in words and "bf16[" in words
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_sweep_ranks_the_meshes_that_can_be():
    one_expert = dataclasses.replace(TINY.moe, num_experts=1, experts_per_token=1)
    # One expert lies on no axis: three of the six meshes can be.
    plans = planning.sweep(tiny_config(dataclasses.replace(TINY, moe=one_expert)), "v5e:2x2")
    assert {report.mesh_name(p) for p in plans} == {"data=4", "fsdp=4", "data=2,fsdp=2"}
    assert all(p.fits for p in plans)
    seconds = [p.roofline.step_seconds for p in plans]
    assert seconds == sorted(seconds)
    replicated = next(p for p in plans if report.mesh_name(p) == "data=4")
    assert replicated.memory.parameters == max(p.memory.parameters for p in plans)


def test_everything_that_does_not_go_together_is_listed_before_compiling():
    config = tiny_config(mesh={"fsdp": 3}, data={"sequence_length": 512, "batch_size": 4})
    with pytest.raises(InputError) as caught:
        plan(config, "v5p:2x2x2")
    problems = "\n".join(caught.value.problems)
    for expected in (
        "has 3 devices, v5p:2x2x2 has 8: give --mesh, or --sweep",
        "data.batch_size 4 is not a multiple of 3",
        "data.sequence_length 512 is more than the model's max_sequence_length 256",
        "embedding has a dim of 256, which mesh fsdp x expert = 3 does not divide",
    ):
        assert expected in problems


def test_a_sweep_without_a_possible_mesh_says_why():
    with pytest.raises(InputError, match="no mesh of 4 devices") as caught:
        planning.sweep(tiny_config(data={"batch_size": 6}), SLICE)
    assert "data.batch_size 6 is not a multiple of 4" in caught.value.problems[0]


def test_mistakes_end_the_command_with_code_2(run):
    code, out, err = run(tiny_config(), "--topology", "v5q:2x2")
    assert (code, out) == (2, "")
    assert "'v5q' is not one of v4, v5p, tpu7x, v5e, v6e" in " ".join(err.split())
    code, _, err = run(tiny_config(), "--topology", SLICE, "--sweep", "--mesh", "fsdp=4")
    assert code == 2 and "--sweep tries every mesh" in err


def test_without_a_model_or_an_architecture_both_ways_are_named(tmp_path):
    config = tiny_config(model={"decoder": None, "init_from": tmp_path / "absent"})
    with pytest.raises(InputError) as caught:
        plan(config, SLICE)
    problems = "\n".join(caught.value.problems)
    assert "absent" in problems and "model.decoder" in problems


def test_a_model_that_is_there_must_have_the_stated_architecture(tmp_path):
    save_model(tmp_path / "model", Decoder(TINY, key=jax.random.key(0)), provenance={})
    wider = dataclasses.replace(TINY, hidden_dim=1024)
    with pytest.raises(InputError, match="model.decoder.hidden_dim is 1024, in the model .* it is 512"):
        plan(tiny_config(model={"decoder": wider, "init_from": tmp_path / "model"}), SLICE)


def test_without_the_compiler_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'upjax\[tpu\]'"):
        plan(tiny_config(), SLICE)


def test_a_compiler_that_fails_is_quoted():
    failing = lambda *given, **named: compiling.compile_step(
        *given, **named, command=(sys.executable, "-c", "raise SystemExit('no such instruction')")
    )
    with pytest.raises(PlanError, match="no such instruction"):
        plan(tiny_config(), SLICE, compile_=failing)


def test_chip_hours_count_a_chip_of_two_devices_once():
    config, moved = tiny_config(mesh={"fsdp": 4, "expert": 2}, data={"batch_size": 8}), 10**9
    estimates = {
        name: planning.roofline(config, TINY, parse_topology(name), hbm_bytes=moved, collectives=())
        for name in ("v4:2x2x1", "v5p:2x2x2")
    }
    v4 = estimates["v4:2x2x1"]
    assert v4.hbm_seconds == moved / (1228e9 / 2)  # a device has half of the chip's bandwidth
    assert v4.chip_hours(v4.tokens_per_step) == pytest.approx(v4.step_seconds * 4 / 3600)
    v5p = estimates["v5p:2x2x2"]
    assert v5p.chip_hours(v5p.tokens_per_step) == pytest.approx(v5p.step_seconds * 8 / 3600)
    needed = v5p.model_flops_per_step + v5p.recomputed_flops_per_step
    assert v5p.compute_seconds == pytest.approx(needed / (8 * 459e12))
    assert np.isclose(v5p.mfu, v5p.model_flops_per_step / v5p.step_seconds / (8 * 459e12))
