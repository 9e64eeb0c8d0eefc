"""What the adapter counts: statistics and the clock of the stages."""

from __future__ import annotations

import pytest
import torch

from tests.pipelines.stats import STATS
from verl_omni.pipelines import stage_clock
from verl_omni.pipelines.stage_clock import StageClock
from verl_omni.pipelines.stats import RolloutStats


def test_statistics_survive_the_way_through_plain_data():
    assert RolloutStats.from_dict(STATS.as_dict()) == STATS


def test_statistics_of_several_engines_add_up():
    other = RolloutStats(batch_sizes={16: 1}, waves=1, stage_s={"denoise": 0.25}, compiled_graphs=1)
    assert RolloutStats.merged([STATS, other]) == RolloutStats(
        batch_sizes={16: 4, 1: 2},
        waves=3,
        encodes_requested=5,
        encodes_computed=3,
        stage_s={"denoise": 1.75, "decode": 0.25},
        compiled_graphs=5,
        out_of_memory=1,
    )


def test_the_clock_adds_up_a_stage_also_where_it_raises(monkeypatch):
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(stage_clock.time, "perf_counter", lambda: next(ticks))
    clock = StageClock(torch.device("cpu"))
    with clock.stage("denoise"):
        pass
    with pytest.raises(KeyError), clock.stage("denoise"):
        raise KeyError
    with clock.stage("step"):
        pass
    assert clock.seconds() == {"denoise": 3.0, "step": 4.0}
    clock.reset()
    assert clock.seconds() == {}


class Stream:
    """Events as CUDA's: recorded in order, over once the device has come so far; `now` in milliseconds."""

    def __init__(self):
        self.now, self.reached, self.made = 0.0, 0.0, 0

    def event(self, enable_timing):
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.at = self.stream.now

    def query(self):
        return self.at <= self.stream.reached

    def synchronize(self):
        self.stream.reached = max(self.stream.reached, self.at)

    def elapsed_time(self, last):
        assert self.query() and last.query()
        return last.at - self.at


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    return stream


def test_on_cuda_a_stage_lasts_as_long_as_its_work_on_the_device(stream):
    def fail():
        stream.now += 500
        raise KeyError

    clock = StageClock(torch.device("cuda"))
    with clock.stage("denoise"):
        stream.now += 1500
    with pytest.raises(KeyError), clock.stage("denoise"):
        fail()
    stream.now += 100
    with clock.stage("decode"):
        stream.now += 250
    assert stream.reached == 0  # nothing has waited yet
    assert clock.seconds() == {"denoise": 2.0, "decode": 0.25}
    assert stream.reached == stream.now
    with clock.stage("decode"):
        stream.now += 250
    assert clock.seconds() == {"denoise": 2.0, "decode": 0.5}
    clock.reset()
    assert clock.seconds() == {}


def test_spans_that_are_over_are_summed_up_without_waiting_for_the_others(stream):
    clock = StageClock(torch.device("cuda"))

    def step():
        with clock.stage("denoise"):
            stream.now += 1000

    for _ in range(stage_clock._FOLD - 1):
        step()
    stream.reached = stream.now - 1000
    step()
    assert len(clock._open) == 2 and stream.reached == stream.now - 2000
    assert clock.seconds() == {"denoise": stage_clock._FOLD}
