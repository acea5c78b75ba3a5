"""Model FLOPs against counts by hand: active parameters, and positions that attention sees."""

import dataclasses

import numpy as np
import pytest

from upjax.model import MoEConfig
from upjax.train.flops import flops_per_token, mean_context, peak_flops, recomputed_flops_per_token

T = 32


@pytest.mark.parametrize("window", [None, 1, 5, 32, 100])
def test_the_mean_context_is_that_of_the_mask(window):
    position = np.arange(T)
    distance = position[:, None] - position[None, :]
    seen = (distance >= 0) & (distance < (window or T))
    assert mean_context(T, window) == seen.sum() / T


def test_a_dense_model_is_counted_by_hand(dense):
    # q 16x16, k and v 16x8, out 16x16, three 16x32 in the MLP, norms 2x16; two layers; final norm; head 16x48.
    params = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32 + 32) + 16 + 16 * 48
    # Two layers, 16 = heads x head dim, (T + 1) / 2 positions; 2 FLOPs, 2 products, 3 for forward and backward.
    attention = 2 * 16 * (T + 1) / 2 * 2 * 2 * 3
    assert flops_per_token(dense, T) == 6 * params + attention


def test_experts_that_a_token_does_not_meet_cost_nothing(moe):
    more = dataclasses.replace(moe, moe=dataclasses.replace(moe.moe, num_experts=16))
    routers = 6 * 2 * 16 * (16 - 8)
    assert flops_per_token(more, T) - flops_per_token(moe, T) == routers
    twice = dataclasses.replace(moe, moe=dataclasses.replace(moe.moe, experts_per_token=4))
    assert flops_per_token(twice, T) - flops_per_token(moe, T) == 6 * 2 * 2 * 3 * 16 * 16


def test_one_expert_costs_what_the_dense_model_costs(dense):
    one = MoEConfig(num_experts=1, experts_per_token=1, hidden_dim=dense.hidden_dim)
    moe = dataclasses.replace(dense, moe=one, moe_layers=(0, 1))
    assert flops_per_token(moe, T) - flops_per_token(dense, T) == 6 * 2 * 16  # the routers


def test_tied_embeddings_count_once_as_the_head(dense):
    tied = dataclasses.replace(dense, tied_embeddings=True)
    assert flops_per_token(tied, T) == flops_per_token(dense, T)


def test_the_rate_of_an_unknown_device_is_not_made_up():
    assert peak_flops("TPU v5p") == 459e12
    assert peak_flops("TPU v4") == 275e12
    assert peak_flops("cpu") is None


def test_what_remat_makes_again_is_the_forward_pass_of_what_it_does_not_keep(moe):
    layers = flops_per_token(moe, T) / 3 - 2 * 16 * 48  # without the head, 16 x 48
    assert recomputed_flops_per_token(moe, T, "none") == 0
    assert recomputed_flops_per_token(moe, T, "full") == layers
    # Two layers: attention's two products over 16 = heads x head dim, and two experts of three 16 x 16 products.
    attention, experts = 2 * 2 * 2 * 16 * (T + 1) / 2, 2 * 2 * 3 * 2 * 16 * 16
    assert recomputed_flops_per_token(moe, T, "dots") == attention + experts
