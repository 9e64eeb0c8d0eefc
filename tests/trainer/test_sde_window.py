"""The moving window of stochastic steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.algorithms.flow_sde import sample_sde_window
from verl_omni.trainer.diffusion.sde_window import scheduled_range, window_at, window_range
from verl_omni.trainer.diffusion.settings import SDEWindowScheduleConfig
from verl_omni.workers.config import DiffusionRolloutAlgoConfig

places = st.builds(
    lambda lo, size, room, interval, stride: dict(
        lo=lo, size=size, hi=lo + size + room, interval=interval, stride=stride
    ),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(0, 20),
    st.integers(1, 30),
    st.integers(1, 5),
)


def test_the_papers_setting_moves_by_one_every_25_steps_and_stays_at_the_end():
    starts = [window_at(step, size=4, lo=0, hi=10, interval=25, stride=1)[0] for step in range(1, 301)]
    assert starts == [min(step // 25, 6) for step in range(300)]


@given(places, st.integers(1, 400))
def test_the_window_is_whole_within_its_range_and_never_goes_back(place, step):
    start, stop = window_at(step, **place)
    assert place["lo"] <= start < stop <= place["hi"]
    assert stop - start == place["size"]
    after = window_at(step + 1, **place)[0]
    moved = after - start
    assert 0 <= moved <= place["stride"]
    assert moved == 0 or step % place["interval"] == 0


@given(places)
def test_it_begins_at_the_first_steps_and_reaches_the_last(place):
    assert window_at(1, **place) == (place["lo"], place["lo"] + place["size"])
    end = 1 + place["interval"] * (place["hi"] - place["lo"])
    assert window_at(end, **place) == window_at(10 * end, **place) == (place["hi"] - place["size"], place["hi"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 0}, "step=0"),
        ({"interval": 0}, "interval=0"),
        ({"stride": 0}, "stride=0"),
        ({"size": 6}, r"a window of 6 steps does not fit into \[0, 5\)"),
        ({"lo": -1}, "does not fit"),
    ],
)
def test_what_makes_no_window_is_refused(changes, message):
    arguments = dict(step=1, size=2, lo=0, hi=5, interval=1, stride=1) | changes
    with pytest.raises(ValueError, match=message):
        window_at(arguments.pop("step"), **arguments)


def test_a_fixed_schedule_leaves_the_range_as_it_is():
    schedule = SDEWindowScheduleConfig()
    for bounds in (None, (1, 6)):
        algo = DiffusionRolloutAlgoConfig(sde_window_size=2, sde_window_range=bounds)
        assert scheduled_range(100, schedule, algo, 10) == bounds


@given(st.integers(1, 4), st.none() | st.integers(5, 9), st.integers(1, 300))
def test_a_moving_schedule_leaves_the_rollout_one_place(size, hi, step):
    algo = DiffusionRolloutAlgoConfig(sde_window_size=size, sde_window_range=None if hi is None else (1, hi))
    schedule = SDEWindowScheduleConfig(type="moving", interval=7, stride=2)
    place = scheduled_range(step, schedule, algo, 10)
    lo, stop = window_range(algo, 10)
    assert place == window_at(step, size=size, lo=lo, hi=stop, interval=7, stride=2)
    drawn = {sample_sde_window(sde_window_size=size, sde_window_range=place, num_timesteps=10) for _ in range(5)}
    assert drawn == {place}


@given(st.integers(2, 12), st.none() | st.integers(1, 12))
def test_the_range_is_where_the_rollout_draws_its_windows(steps, size):
    if size is not None and size > steps:
        return
    lo, hi = window_range(DiffusionRolloutAlgoConfig(sde_window_size=size), steps)
    drawn = [sample_sde_window(sde_window_size=size, sde_window_range=None, num_timesteps=steps) for _ in range(60)]
    assert min(start for start, _ in drawn) >= lo
    assert max(stop for _, stop in drawn) <= hi
    if size is None or size >= steps - 1:
        assert set(drawn) == {(lo, hi)}


def test_a_moving_schedule_needs_a_window_and_its_way():
    schedule = SDEWindowScheduleConfig(type="moving")
    with pytest.raises(ValueError, match="needs sde_window_size"):
        scheduled_range(1, schedule, DiffusionRolloutAlgoConfig(), 10)
    with pytest.raises(ValueError, match="sde_window_range or num_inference_steps"):
        scheduled_range(1, schedule, DiffusionRolloutAlgoConfig(sde_window_size=2), None)
