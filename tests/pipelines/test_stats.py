"""What the adapter counts: statistics and the clock of the stages."""

from __future__ import annotations

import pytest
import torch

from verl_omni.pipelines import stage_clock
from verl_omni.pipelines.stage_clock import StageClock
from verl_omni.pipelines.stats import RolloutStats

FULL = RolloutStats(
    batch_sizes={4: 2, 1: 3},
    waves=2,
    encodes_requested=5,
    encodes_computed=3,
    stage_s={"denoise": 1.5, "encode": 0.5},
    compiled_graphs=2,
    out_of_memory=1,
)


def test_statistics_survive_the_way_through_plain_data():
    assert RolloutStats.from_dict(FULL.as_dict()) == FULL


def test_statistics_of_several_engines_add_up():
    other = RolloutStats(batch_sizes={4: 1}, waves=1, stage_s={"denoise": 0.25}, compiled_graphs=1)
    assert RolloutStats.merged([FULL, other]) == RolloutStats(
        batch_sizes={4: 3, 1: 3},
        waves=3,
        encodes_requested=5,
        encodes_computed=3,
        stage_s={"denoise": 1.75, "encode": 0.5},
        compiled_graphs=3,
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
