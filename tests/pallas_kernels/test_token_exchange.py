"""Rows reach the devices of their experts and come back: both ways and both gradients against a NumPy loop."""

from functools import partial
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.token_exchange import all_group_sizes, capacity, give_back, ragged, received_group_sizes, send

DEVICES, EXPERTS, ROWS, WIDTH = 4, 8, 12, 3
LOCAL = EXPERTS // DEVICES
ROOM = DEVICES * ROWS


def by_loop(rows, sizes):
    """Returns what each device receives, [DEVICES, ROOM, WIDTH]: by its expert, then by sender."""
    received = np.zeros((DEVICES, ROOM, WIDTH), rows.dtype)
    for device in range(DEVICES):
        filled = 0
        for expert in range(device * LOCAL, (device + 1) * LOCAL):
            for sender in range(DEVICES):
                start, size = sizes[sender, :expert].sum(), sizes[sender, expert]
                received[device, filled : filled + size] = rows[sender, start : start + size]
                filled += size
    return received


def on_devices(function):
    """Returns the function run by each of the devices on its part of arrays [DEVICES, ...]."""
    # Two groups that must not meet.
    mesh = jax.make_mesh((2, DEVICES), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @jax.jit
    def run(*arrays):
        local = lambda *parts: jax.tree.map(lambda x: x[None], function(*(part[0] for part in parts)))
        return jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=True)(*arrays)

    return run


@on_devices
def there_and_back(rows, sizes, cotangent_there, cotangent_back):
    sizes_PE = all_group_sizes(sizes, "expert")
    there, to_sender = jax.vjp(lambda rows: send(rows, sizes_PE, "expert", num_received=ROOM), rows)
    back, to_receiver = jax.vjp(lambda rows: give_back(rows, sizes_PE, "expert", num_sent=ROWS), there)
    counts = received_group_sizes(sizes_PE, "expert")
    return there, back, *to_sender(cotangent_there), *to_receiver(cotangent_back), counts


@st.composite
def some_sizes(draw):
    """Draws [DEVICES, EXPERTS] counts of which no device has more than ROWS: the gaps between sorted cuts."""
    cuts = draw(st.lists(st.lists(st.integers(0, ROWS), min_size=EXPERTS, max_size=EXPERTS), min_size=4, max_size=4))
    return np.diff(np.sort(np.array(cuts), axis=1), prepend=0, axis=1).astype(np.int32)


def one_expert_for_all():
    sizes = np.zeros((DEVICES, EXPERTS), np.int32)
    sizes[:, 5] = ROWS
    return sizes


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(sizes=some_sizes())
@hypothesis.example(sizes=np.zeros((DEVICES, EXPERTS), np.int32))
@hypothesis.example(sizes=one_expert_for_all())
@hypothesis.example(sizes=np.eye(DEVICES, EXPERTS, dtype=np.int32))
def test_rows_reach_their_experts_and_come_back_and_so_do_gradients(sizes):
    rng = np.random.default_rng(0)
    rows, g_back = (rng.normal(size=(DEVICES, ROWS, WIDTH)).astype("float32") for _ in range(2))
    g_there = rng.normal(size=(DEVICES, ROOM, WIDTH)).astype("float32")
    mine = np.arange(ROWS)[None, :, None] < sizes.sum(axis=1)[:, None, None]
    rows, g_back = (np.where(mine, x, np.nan).astype("float32") for x in (rows, g_back))  # what no expert gets
    there, back, d_rows, d_there, counts = map(np.asarray, there_and_back(rows, sizes, g_there, g_back))

    expected = by_loop(rows, sizes)
    np.testing.assert_array_equal(there, expected)
    np.testing.assert_array_equal(back, np.where(mine, rows, 0))
    np.testing.assert_array_equal(counts, sizes.sum(axis=0).reshape(DEVICES, LOCAL))
    # The transpose of a permutation is its inverse: what `by_loop` moves, it moves back.
    np.testing.assert_array_equal(d_there, by_loop(g_back, sizes))
    places = by_loop(
        np.arange(1, 1 + DEVICES * ROWS, dtype=np.float32).reshape(DEVICES, ROWS, 1).repeat(WIDTH, 2), sizes
    )
    d_expected = np.zeros((DEVICES * ROWS, WIDTH), np.float32)
    from_place = places[..., 0].astype(int)
    d_expected[from_place[from_place > 0] - 1] = g_there[from_place > 0]
    np.testing.assert_array_equal(d_rows.reshape(-1, WIDTH), d_expected)


def asked_of_ragged_all_to_all(direction, num_rows):
    """Returns what gives the six arrays, of each device, that a direction of `ragged` hands to the collective."""

    def arguments(rows, sizes):
        asked = []
        catch = lambda *arrays, axis_name: asked.append(arrays) or arrays[1]
        with mock.patch.object(jax.lax, "ragged_all_to_all", catch):
            direction(rows, all_group_sizes(sizes, "expert"), num_rows, "expert")
        (arrays,) = asked
        return arrays

    return on_devices(arguments)


SENT, GIVEN_BACK = asked_of_ragged_all_to_all(ragged.send, ROOM), asked_of_ragged_all_to_all(ragged.give_back, ROWS)


def carried_out(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes):
    """Returns what `jax.lax.ragged_all_to_all` is documented to, of the arguments of all devices."""
    result, per_device = output.copy(), input_offsets.shape[1] // DEVICES
    for sender, i in np.ndindex(input_offsets.shape):
        receiver, start, place, size = (
            i // per_device,
            *(x[sender, i] for x in (input_offsets, output_offsets, send_sizes)),
        )
        assert size == recv_sizes[receiver, sender * per_device + i % per_device]
        assert start + size <= operand.shape[1] and place + size <= output.shape[1]
        result[receiver, place : place + size] = operand[sender, start : start + size]
    return result


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(sizes=some_sizes())
@hypothesis.example(sizes=np.zeros((DEVICES, EXPERTS), np.int32))
@hypothesis.example(sizes=one_expert_for_all())
@hypothesis.example(sizes=np.eye(DEVICES, EXPERTS, dtype=np.int32))
def test_what_is_asked_of_the_ragged_all_to_all_moves_the_same_rows(sizes):
    """No CPU has the collective, so what it is documented to do is done by hand with the arguments that it gets."""
    rows = np.random.default_rng(0).normal(size=(DEVICES, ROWS, WIDTH)).astype("float32")
    mine = np.arange(ROWS)[None, :, None] < sizes.sum(axis=1)[:, None, None]
    rows = np.where(mine, rows, np.nan).astype("float32")
    there = carried_out(*map(np.asarray, SENT(rows, sizes)))
    np.testing.assert_array_equal(there, by_loop(rows, sizes))
    filled = np.arange(ROOM)[None, :, None] < sizes.sum(axis=0).reshape(DEVICES, LOCAL).sum(axis=1)[:, None, None]
    there = np.where(filled, there, np.nan).astype("float32")
    back = carried_out(*map(np.asarray, GIVEN_BACK(there, sizes)))
    np.testing.assert_array_equal(back, np.where(mine, rows, 0))


def test_an_implementation_asked_for_by_name_runs_or_fails():
    rows, sizes = np.ones((DEVICES, ROWS, WIDTH), "float32"), np.ones((DEVICES, EXPERTS), np.int32)
    ask = lambda name: on_devices(
        lambda rows, sizes: send(
            rows, all_group_sizes(sizes, "expert"), "expert", num_received=ROOM, implementation=name
        )
    )(rows, sizes)
    np.testing.assert_array_equal(ask("gathered"), by_loop(rows, sizes))
    with pytest.raises(ValueError, match="'nccl'"):
        ask("nccl")
    with pytest.raises(Exception, match="ragged"):  # of the CPU's compiler, which has none
        ask("ragged")


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(sizes=some_sizes(), slots=st.integers(1, ROWS + 2))
def test_slots_take_the_first_rows_and_give_them_back(sizes, slots):
    sizes, rows = sizes[0], np.arange(1.0, 1 + ROWS * WIDTH).reshape(ROWS, WIDTH).astype("float32")
    expected, kept = np.zeros((EXPERTS, slots, WIDTH), "float32"), np.zeros_like(rows)
    start = dropped = 0
    for expert, size in enumerate(sizes):
        taken = min(size, slots)
        expected[expert, :taken] = kept[start : start + taken] = rows[start : start + taken]
        dropped += size - taken
        start += size
    filled = capacity.to_slots(jnp.asarray(rows), jnp.asarray(sizes), slots)
    np.testing.assert_array_equal(filled, expected)
    back, to_slots = jax.vjp(lambda filled: capacity.from_slots(filled, jnp.asarray(sizes), ROWS), filled)
    np.testing.assert_array_equal(back, kept)
    np.testing.assert_array_equal(to_slots(jnp.asarray(rows))[0], expected)
    gradient = jax.vjp(lambda rows: capacity.to_slots(rows, jnp.asarray(sizes), slots), jnp.asarray(rows))[1]
    np.testing.assert_array_equal(gradient(jnp.asarray(expected))[0], kept)
    assert capacity.num_dropped(jnp.asarray(sizes), slots) == dropped


@pytest.mark.parametrize(
    "num_rows, experts, factor, slots", [(64, 8, 1.0, 8), (64, 8, 1.25, 10), (65, 8, 1.0, 9), (1, 8, 0.5, 1)]
)
def test_capacity_is_the_even_share_times_the_factor(num_rows, experts, factor, slots):
    assert capacity.expert_capacity(num_rows, experts, factor) == slots


def test_swapped_slots_are_those_of_the_own_experts_of_all_devices():
    slots = np.random.default_rng(0).normal(size=(DEVICES, EXPERTS, 5, WIDTH)).astype("float32")
    mine = np.asarray(on_devices(partial(capacity.swap_slots, axis="expert"))(slots))
    for device, expert in np.ndindex(DEVICES, LOCAL):
        np.testing.assert_array_equal(mine[device, expert], slots[:, device * LOCAL + expert].reshape(-1, WIDTH))
    back = on_devices(lambda slots: capacity.swap_slots_back(capacity.swap_slots(slots, "expert"), "expert"))(slots)
    np.testing.assert_array_equal(back, slots)
