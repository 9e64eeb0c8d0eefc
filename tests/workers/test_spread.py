"""Who gets which group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.workers.rollout.request import RolloutRequest
from verl_omni.workers.rollout.spread import LoadSpread, work

COSTS = st.lists(st.integers(1, 100), max_size=30)


def test_equal_groups_go_round_and_the_first_server_wins_ties():
    assert LoadSpread(3).deal([5] * 7) == {0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}


def test_fewer_groups_than_servers_leave_servers_out():
    assert LoadSpread(4).deal([1, 1]) == {0: [0], 1: [1]}


def test_a_costly_group_is_dealt_first_wherever_it_stands():
    assert LoadSpread(2).deal([1, 1, 1, 3]) == {0: [3], 1: [0, 1, 2]}


def test_work_in_flight_counts_until_it_ends():
    spread = LoadSpread(2)
    spread.deal([10])
    assert spread.deal([4, 4]) == {1: [0, 1]}
    spread.finish(0, 10)
    assert spread.deal([1]) == {0: [0]}


def test_a_dropped_server_gets_nothing_and_may_still_finish():
    spread = LoadSpread(2)
    spread.deal([3, 3])
    spread.drop(0)
    spread.drop(0)
    spread.finish(0, 3)
    assert spread.load == {1: 3} and spread.deal([1, 1]) == {1: [0, 1]}
    spread.join(0)
    assert spread.deal([1, 1]) == {0: [0, 1]}
    spread.drop(0)
    spread.drop(1)
    with pytest.raises(ValueError, match="no server is left"):
        spread.deal([1])


@given(COSTS, COSTS, st.integers(1, 5))
def test_every_group_is_dealt_once_and_evenly(before, costs, servers):
    spread = LoadSpread(servers)
    spread.deal(before)
    dealt = spread.deal(costs)
    assert sorted(group for groups in dealt.values() for group in groups) == list(range(len(costs)))
    assert all(groups == sorted(groups) and groups for groups in dealt.values())
    load = spread.load
    assert sum(load.values()) == sum(before) + sum(costs)
    assert max(load.values()) - min(load.values()) <= max([*before, *costs], default=0)


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, 1),
        ({"num_outputs_per_prompt": 3, "num_inference_steps": 10}, 30),
        ({"num_outputs_per_prompt": 2}, 2),
        ({"num_outputs_per_prompt": "many", "num_inference_steps": -4}, 1),  # the adapter will say so
    ],
)
def test_work_is_rows_times_steps(knobs, expected):
    assert work(RolloutRequest(request_id="r", **knobs)) == expected
