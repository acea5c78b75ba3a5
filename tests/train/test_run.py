"""Runs: resumed, branched, stopped and broken ones end where undisturbed ones do, or say why not."""

import dataclasses
import json
import math
import os
import resource
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from upjax.checkpoint import checkpoint_directory, list_steps, load_model, read_model, read_run
from upjax.config import MeshConfig, load_config
from upjax.errors import InputError
from upjax.evaluate import evaluate
from upjax.model import flat_params
from upjax.train import TrainingError, loop, start, train
from upjax.train.metrics import METRICS_FILE, read_metrics
from upjax.train.start import branch

DECAY_OF_2 = {"warmup_steps": 2, "decay_steps": 2}
RESULTS = ("step", "loss", "grad_norm", "learning_rate")


def results(run):
    return [[metrics[name] for name in RESULTS] for metrics in read_metrics(run)]


def params_of(run):
    return {path: np.asarray(p) for path, p in flat_params(load_model(run)).items()}


def assert_equal(got, wanted):
    for path in wanted:
        np.testing.assert_array_equal(got[path], wanted[path], err_msg=path)


class Interrupted(Exception):
    pass


@pytest.fixture
def at_step(monkeypatch):
    """A function that has something done when a step has been made: `at_step(5, act)`."""
    asked = {}

    def settle(meter, step, metrics, settle=loop._settle):
        if step in asked:
            asked.pop(step)()
        return settle(meter, step, metrics)

    monkeypatch.setattr(loop, "_settle", settle)
    return lambda step, act: asked.update({step: act})


def interrupt():
    raise Interrupted


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory):
    """A run that nothing happens to, and what it came to."""
    from conftest import make_tiny_config

    config = make_tiny_config(dataset, tmp_path_factory.mktemp("undisturbed") / "run")
    train(config, progress=False)
    return config.output


def test_a_run_learns_and_reports_each_step_once(undisturbed):
    steps, losses, *_ = zip(*results(undisturbed), strict=True)
    assert list(steps) == list(range(1, 13))
    assert losses[-1] < losses[0] - 0.5
    assert list_steps(undisturbed) == [4, 8, 12]
    assert load_config(undisturbed / "config.yaml").output == undisturbed


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(make_config, undisturbed, at_step):
    config = make_config()
    for step in (3, 7, 11):
        at_step(step, interrupt)
        with pytest.raises(Interrupted):
            train(config, progress=False)
    with (config.output / METRICS_FILE).open("a") as file:
        file.write('{"step": 11, "lo')  # as a kill may leave it
    result = train(config, progress=False)
    assert result.finished
    assert results(config.output) == results(undisturbed)
    assert_equal(params_of(config.output), params_of(undisturbed))
    records = [read_run(checkpoint_directory(run, 12)) for run in (config.output, undisturbed)]
    assert records[0].data_state == records[1].data_state


def test_a_finished_run_is_left_as_it_is(make_config, undisturbed, at_step):
    before = results(undisturbed)
    at_step(1, interrupt)
    result = train(make_config(output=undisturbed), progress=False)
    assert (result.finished, result.step, result.metrics["step"]) == (True, 12, 12)
    assert results(undisturbed) == before


def test_sigterm_saves_and_the_run_goes_on_from_there(make_config, undisturbed, at_step):
    config = make_config()
    at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    stopped = train(config, progress=False)
    assert not stopped.finished
    assert list_steps(config.output)[-1] == stopped.step < 8
    assert signal.getsignal(signal.SIGTERM) == handler
    train(config, progress=False)
    assert results(config.output) == results(undisturbed)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_data_on_another_mesh(make_config, undisturbed, at_step):
    config = make_config()
    at_step(6, interrupt)
    with pytest.raises(Interrupted):
        train(config, progress=False)
    train(dataclasses.replace(config, mesh=MeshConfig(fsdp=2)), progress=False)
    np.testing.assert_allclose(results(config.output), results(undisturbed), rtol=1e-5)


def test_a_branch_is_the_run_that_always_meant_to_decay_there(make_config, tmp_path, undisturbed):
    # The trunk's own decay begins at 8; a branch from 4 with two steps of decay is a run of six.
    short = make_config(output=tmp_path / "short", train={"steps": 6, "log_every": 1}, schedule=DECAY_OF_2)
    train(short, progress=False)
    config = make_config(output=tmp_path / "branch", schedule=DECAY_OF_2)
    result = train(config, branch_from=checkpoint_directory(undisturbed, 4), progress=False)
    assert result.step == 6
    assert results(config.output) == results(short.output)[4:]
    assert_equal(params_of(config.output), params_of(short.output))
    provenance = read_model(config.output).provenance
    assert provenance["parent"] == {"checkpoint": str(checkpoint_directory(undisturbed, 4)), "step": 4}
    assert load_config(config.output / "config.yaml").train.steps == 6


def test_a_step_alone_branches_off_the_run_of_the_config(make_config, undisturbed):
    config, parent = branch(make_config(output=undisturbed, schedule=DECAY_OF_2), 4)
    assert parent == checkpoint_directory(undisturbed, 4)
    assert config.output == undisturbed.with_name("run-4-2")
    assert config.train.steps == 6


@pytest.mark.parametrize(
    ("step", "problem"), [(12, "step 12 lies in the run's decay; its stable phase is 2 to 8"), (5, "has steps")]
)
def test_a_branch_starts_in_the_stable_phase_of_a_run(make_config, tmp_path, undisturbed, step, problem):
    config = make_config(output=tmp_path / "branch", schedule=DECAY_OF_2)
    with pytest.raises(InputError, match=problem):
        train(config, branch_from=checkpoint_directory(undisturbed, step), progress=False)
    assert not config.output.exists()


def test_a_branch_needs_a_decay_and_a_directory_of_its_own(make_config, undisturbed):
    config = make_config(output=undisturbed, schedule={"warmup_steps": 2})
    with pytest.raises(InputError) as caught:
        train(config, branch_from=checkpoint_directory(undisturbed, 4), progress=False)
    assert len(caught.value.problems) == 2


def test_a_run_is_not_resumed_with_another_config(make_config, undisturbed):
    config = make_config(output=undisturbed, optimizer={"learning_rate": 3e-2, "b1": 0.8}, train={"steps": 20})
    with pytest.raises(InputError) as caught:
        train(config, progress=False)
    assert caught.value.problems == (
        "optimizer.b1: 0.9 then, 0.8 now",
        "optimizer.learning_rate: 0.01 then, 0.03 now",
        "train.steps: 12 then, 20 now",  # the decay is over: more steps would not be those of a longer run
    )


def test_what_the_decay_is_may_change_until_it_begins(make_config, undisturbed):
    began = read_run(checkpoint_directory(undisturbed, 4)).config
    longer = make_config(schedule=DECAY_OF_2 | {"decay": "cosine"}, train={"steps": 90, "log_every": 3})
    start.check_same(longer, began, checkpoint_directory(undisturbed, 8), branches=False)
    with pytest.raises(InputError) as caught:
        start.check_same(longer, began, checkpoint_directory(undisturbed, 12), branches=False)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "schedule.decay",
        "schedule.decay_steps",
        "train.steps",
    ]


def test_a_branch_may_go_on_with_other_data_from_its_beginning(make_config, undisturbed, tmp_path):
    began = read_run(checkpoint_directory(undisturbed, 4)).config
    other = {"path": tmp_path / "other", "sequence_length": 16, "batch_size": 8}
    place = checkpoint_directory(undisturbed, 4)
    assert start.check_same(make_config(), began, place, branches=True)
    assert not start.check_same(make_config(data=other), began, place, branches=True)
    with pytest.raises(InputError, match=r"data.path: .* then, .*other' now"):
        start.check_same(make_config(data=other), began, place, branches=False)


def test_old_checkpoints_go_and_branch_points_stay(make_config, tmp_path):
    every_third = {"steps": 12, "checkpoint_every": 3, "log_every": 12}  # and 8, where the decay begins
    kept, pruned = tmp_path / "kept", tmp_path / "pruned"
    train(make_config(output=kept, train=every_third | {"keep_checkpoints": 1}), progress=False)
    assert list_steps(kept) == [3, 6, 8, 12]
    train(make_config(output=pruned, train=every_third | {"keep_branch_points": False}), progress=False)
    assert list_steps(pruned) == [9, 12]


def test_a_loss_that_is_no_number_stops_the_run(make_config):
    config = make_config(
        optimizer={"learning_rate": 1e38, "clip_norm": 1e30},
        train={"steps": 9, "checkpoint_every": 1, "log_every": 1},
        schedule={},
    )
    with pytest.raises(TrainingError, match=r"(loss|grad_norm) is (nan|inf) at step 2; .*checkpoints/1$"):
        train(config, progress=False)
    assert list_steps(config.output) == [1]
    assert all(np.isfinite(row).all() for row in results(config.output))


def test_a_full_disk_leaves_the_last_good_checkpoint(make_config, undisturbed, at_step):
    config = make_config()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_up():  # once step 4 is saved, no file may grow beyond this: writes fail as they do on a full disk
        while list_steps(config.output) != [4]:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))

    at_step(6, fill_up)
    try:
        with pytest.raises(
            InputError, match=r"cannot write .*checkpoints/8: .*last good checkpoint is .*checkpoints/4"
        ):
            train(config, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.name for entry in (config.output / "checkpoints").iterdir()] == ["4"]
    train(config, progress=False)
    assert results(config.output) == results(undisturbed)


def test_an_output_that_is_no_run_is_not_touched(make_config, tmp_path):
    config = make_config(output=tmp_path / "mine")
    config.output.mkdir()
    (config.output / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="is not a run"):
        train(config, progress=False)
    assert [entry.name for entry in config.output.iterdir()] == ["thesis.txt"]


def test_a_run_starts_from_a_model_or_another_run_and_says_so(make_config, undisturbed):
    config = make_config(model={"init_from": undisturbed, "decoder": None})
    train(config, progress=False)
    assert results(config.output)[0][1] < results(undisturbed)[0][1] - 0.5
    provenance = read_model(config.output).provenance
    assert provenance["source"] == str(undisturbed)
    assert provenance["made_from"]["source"] == "random parameters"
    assert provenance["software"]["packages"]["jax"] == jax.__version__


def test_held_out_loss_is_reported_where_asked(make_config, capsys):
    config = make_config(
        train={"steps": 12, "log_every": 4, "checkpoint_every": 9, "evaluate_every": 5, "evaluate_tokens": 300}
    )
    train(config)
    reported = {metrics["step"]: metrics.get("held_out_loss") for metrics in read_metrics(config.output)}
    assert reported.keys() == {4, 5, 8, 10, 12}
    assert reported[12] < reported[10] < reported[5] < math.log(48) + 0.1
    assert reported[4] is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("step 12/12  loss ")


def test_a_capacity_is_of_the_run_and_not_of_the_model_and_what_it_drops_is_reported(make_config, moe):
    short = {"steps": 2, "log_every": 1, "checkpoint_every": 2, "evaluate_every": 2, "evaluate_tokens": 300}
    config = make_config(decoder=moe, train={**short, "capacity_factor": 0.5}, schedule={})
    train(config, progress=False)
    dropped = [metrics["dropped_fraction"] for metrics in read_metrics(config.output)]
    assert len(dropped) == 2 and all(0.3 < share < 1 for share in dropped)  # half of the even share: half at least
    model = load_model(config.output)
    assert model.config == moe  # which takes all that come, and did so where it was evaluated
    score = evaluate(model, config.data.path, sequence_length=16, batch_size=8, max_tokens=300)
    np.testing.assert_allclose(read_metrics(config.output)[-1]["held_out_loss"], score.loss, rtol=1e-6)
    with pytest.raises(InputError) as caught:
        train(make_config(decoder=moe, train={**short, "steps": 3}, schedule={}), progress=False)
    assert "train.capacity_factor: 0.5 then, None now" in caught.value.problems


def test_reports_are_json_and_events(undisturbed):
    line = json.loads((undisturbed / METRICS_FILE).read_text().splitlines()[-1])
    assert line["gigaflops_per_second"] > 0  # a CPU has no peak to relate to
    assert line["tokens_per_second"] > 0
    events = list((undisturbed / "tensorboard").iterdir())
    assert b"grad_norm" in events[0].read_bytes()


def test_paths_may_be_relative(make_config, undisturbed, tmp_path, monkeypatch, at_step):
    monkeypatch.chdir(tmp_path)
    config = make_config(output=Path("runs/here"))
    at_step(6, interrupt)
    with pytest.raises(Interrupted):
        train(config, progress=False)
    train(config, progress=False)
    assert results(config.output) == results(undisturbed)
    assert_equal(params_of(Path("runs/here/checkpoints/12")), params_of(undisturbed))
