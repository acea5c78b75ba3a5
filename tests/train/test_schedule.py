"""Learning rates against their closed forms, in float64."""

import math

import jax
import numpy as np
import pytest

from upjax.config import ScheduleConfig
from upjax.train.schedule import branch_points, make_schedule

PEAK, W, D, N, F = 3e-4, 10, 20, 100, 0.1
FORMS = {
    "linear": lambda x: 1 - 0.9 * x,
    "cosine": lambda x: 0.1 + 0.9 * (math.cos(math.pi * x) + 1) / 2,
    "1-sqrt": lambda x: 1 - 0.9 * math.sqrt(x),
    "exponential": lambda x: math.exp(x * math.log(0.1)),
}


def rates(config, num_steps):
    return np.asarray(jax.vmap(make_schedule(config, peak=PEAK, num_steps=num_steps))(np.arange(num_steps)))


@pytest.mark.parametrize("decay", FORMS)
def test_each_step_has_the_rate_of_its_closed_form(decay):
    config = ScheduleConfig(warmup_steps=W, decay_steps=D, decay=decay, final_fraction=F)
    expected = [(s + 1) / W if s < W else 1.0 if s < N - D else FORMS[decay]((s - (N - D)) / D) for s in range(N)]
    np.testing.assert_allclose(rates(config, N), PEAK * np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("decay", FORMS)
def test_the_decay_ends_at_the_final_fraction_and_never_rises(decay):
    config = ScheduleConfig(warmup_steps=0, decay_steps=D, decay=decay, final_fraction=F)
    lrs = rates(config, N)
    assert (np.diff(lrs) <= 0).all()
    after_the_last = make_schedule(config, peak=PEAK, num_steps=N)(N)
    np.testing.assert_allclose(after_the_last, PEAK * F, rtol=1e-6)


def test_without_warm_up_or_decay_the_rate_is_the_peak():
    np.testing.assert_array_equal(rates(ScheduleConfig(), N), np.full(N, PEAK, np.float32))


@pytest.mark.parametrize("decay", FORMS)
def test_a_branch_has_the_rates_of_the_run_that_always_meant_to_decay_there(decay):
    trunk = ScheduleConfig(warmup_steps=W, decay_steps=D, decay=decay, final_fraction=F)
    branch = ScheduleConfig(warmup_steps=W, decay_steps=5, decay=decay, final_fraction=F)
    at = 40
    np.testing.assert_array_equal(rates(branch, at + 5)[:at], rates(trunk, N)[:at])


def test_branch_points_are_the_steps_whose_updates_were_all_warm_up_or_stable():
    config = ScheduleConfig(warmup_steps=W, decay_steps=D)
    lrs = rates(config, N)
    for step in range(N + 1):
        warm, undecayed = step >= W, (lrs[W:step] == lrs[W]).all() and step <= N - D
        assert (step in branch_points(config, N)) == (warm and undecayed)
