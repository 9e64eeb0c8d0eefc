"""The numbers of a step against NumPy in float64, and the page that explains them."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.docs.pages import DOCS, code_spans, tables
from tests.pipelines.stats import STATS
from verl_omni.algorithms.flow_grpo import group_advantages
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.reward_loop.item import RewardResult
from verl_omni.trainer.diffusion.metrics import (
    STAGES,
    Stopwatch,
    advantage_metrics,
    log_prob_gap_metrics,
    queue_wait_metrics,
    reward_metrics,
    rollout_metrics,
    timing_metrics,
    validation_metrics,
)
from verl_omni.workers.config import DiffusionLossConfig
from verl_omni.workers.diffusion_losses import get_diffusion_loss_fn

FROM_THE_WORKER = {"loss", "pg_loss", "kl_loss", "grad_norm", "skipped_steps", "lr", "first_ratio_max_dev"}

totals = st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.sampled_from("abcd")), min_size=1, max_size=24)


def results(*totals: float, **parts: float) -> list[RewardResult]:
    return [RewardResult(total=total, parts=parts) for total in totals]


@given(totals)
def test_rewards_against_numpy(samples):
    values, groups = np.array([value for value, _ in samples]), [group for _, group in samples]
    by_group = [values[[g == group for g in groups]] for group in dict.fromkeys(groups)]
    assert reward_metrics(results(*values), groups) == pytest.approx(
        {
            "reward/mean": values.mean(),
            "reward/std": values.std(),
            "reward/min": values.min(),
            "reward/max": values.max(),
            "reward/group_mean_std": np.std([group.mean() for group in by_group]),
            "reward/group_std_mean": np.mean([group.std() for group in by_group]),
            "reward/groups_without_spread": np.mean([np.ptp(group) == 0 for group in by_group]),
        },
        rel=1e-9,
        abs=1e-9,
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcd")), min_size=1, max_size=12))
def test_groups_without_spread_are_those_without_advantage(samples):
    values, groups = zip(*samples, strict=True)
    advantages = group_advantages(torch.tensor(values, dtype=torch.float64), groups)
    idle = [not any(a for a, g in zip(advantages, groups, strict=True) if g == group) for group in set(groups)]
    assert reward_metrics(results(*values), groups)["reward/groups_without_spread"] == pytest.approx(np.mean(idle))


def test_scorers_have_their_own_means():
    scored = [
        RewardResult(total=0.7, parts={"ocr": 0.5, "jpeg": 1.0, "ocr/distance": 3.0}),
        RewardResult(total=0.1, parts={"ocr": 0.1, "jpeg": 0.0}),
    ]
    found = reward_metrics(scored, ["a", "a"])
    assert found["reward/ocr/mean"] == pytest.approx(0.3)
    assert found["reward/jpeg/mean"] == pytest.approx(0.5)
    assert found["reward/ocr/distance/mean"] == 3
    validated = validation_metrics(scored)
    assert validated == {f"val/{name}": found[name] for name in found if "group" not in name}


def test_rewards_need_groups_and_samples():
    with pytest.raises(ValueError, match="1 rewards and 2 groups"):
        reward_metrics(results(0.5), ["a", "b"])
    with pytest.raises(ValueError, match="no reward"):
        validation_metrics([])


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31))
def test_gap_and_advantages_against_numpy(samples, steps, seed):
    draw = np.random.default_rng(seed)
    old, rollout, advantages = draw.normal(size=(3, samples, steps)).astype(np.float32)
    starts = draw.integers(0, 4, size=(samples, 1))
    schedule = starts + np.arange(steps)
    gap = np.abs(old.astype(np.float64) - rollout)
    by_step = {f"rollout/logp_gap_step_{k}": gap[schedule == k].mean() for k in np.unique(schedule)}
    assert log_prob_gap_metrics(*map(torch.from_numpy, (old, rollout, schedule))) == pytest.approx(
        {"rollout/logp_gap_mean": gap.mean(), "rollout/logp_gap_max": gap.max(), **by_step}
    )
    exact = advantages.astype(np.float64)
    assert advantage_metrics(torch.from_numpy(advantages)) == pytest.approx(
        {
            "advantage/mean": exact.mean(),
            "advantage/abs_mean": np.abs(exact).mean(),
            "advantage/min": exact.min(),
            "advantage/max": exact.max(),
        },
        abs=1e-12,
    )


def test_advantages_may_have_one_value_a_sample():
    assert advantage_metrics(torch.tensor([-1.0, 3.0]))["advantage/abs_mean"] == 2


def test_batches_are_those_that_ran():
    told = {
        "policy_version": 7,
        "succeeded": 6,
        "failed": 2,
        "aborted": 1,
        "requests_retried": 3,
        "servers_restarted": 2,
        "peak_memory_mb": 12.5,
    }
    assert rollout_metrics(STATS, **told) == {
        "rollout/batch_size_mean": (3 * 16 + 2 * 1) / 5,
        "rollout/batch_size_max": 16,
        "rollout/forwards": 5,
        "rollout/waves": 2,
        "rollout/encodes_requested": 5,
        "rollout/encodes_computed": 3,
        "rollout/encode_s": 0,
        "rollout/denoise_s": 1.5,
        "rollout/step_s": 0,
        "rollout/decode_s": 0.25,
        "rollout/transfer_s": 0,
        "rollout/compiled_graphs": 4,
        "rollout/out_of_memory": 1,
        **{f"rollout/{name}": value for name, value in told.items()},
    }
    assert rollout_metrics(RolloutStats(), policy_version=0)["rollout/batch_size_mean"] == 0


def test_waits_are_told_over_all_requests_whose_wait_is_known():
    assert queue_wait_metrics([1.0, None, 2.0, 6.0]) == {
        "rollout/queue_wait_s_mean": (1 + 2 + 6) / 3,
        "rollout/queue_wait_s_max": 6,
    }
    assert queue_wait_metrics([None]) == {}


def test_stopwatch_adds_up_stages_also_when_they_raise():
    ticks = itertools.count()
    watch = Stopwatch(clock=lambda: float(next(ticks)))
    with watch.stage("step"):  # ticks 0 … 5
        with watch.stage("update"):
            pass
        with pytest.raises(RuntimeError), watch.stage("update"):
            raise RuntimeError
    watch.add("generation", 2.5)
    assert timing_metrics(watch, images=20, devices=2) == {
        "time/generation_s": 2.5,
        "time/update_s": 2,
        "time/step_s": 5,
        "perf/images_per_s_per_gpu": 2,
    }
    with pytest.raises(ValueError, match="'updat' is no stage"), watch.stage("updat"):
        pass


def test_without_a_step_there_is_no_throughput():
    watch = Stopwatch()
    watch.add("validation", 3.0)
    assert timing_metrics(watch, images=4) == {"time/validation_s": 3.0}


def emitted() -> set[str]:
    """Every name there is, with the variable parts in angle brackets."""
    scored = results(0.5, 0.6, **{"<scorer>": 0.5, "<scorer>/<key>": 1.0})
    watch = Stopwatch()
    for stage in (*STAGES, "step"):
        watch.add(stage, 1.0)
    log_probs = torch.zeros(2, 1)
    _, loss = get_diffusion_loss_fn("flow_grpo").compute_loss(
        old_log_prob=log_probs, log_prob=log_probs, advantages=log_probs, config=DiffusionLossConfig()
    )
    names = [
        *reward_metrics(scored, ["a", "a"]),
        *validation_metrics(scored),
        *advantage_metrics(log_probs),
        *log_prob_gap_metrics(log_probs, log_probs, log_probs.long()),
        *rollout_metrics(STATS, policy_version=0),
        *queue_wait_metrics([1.0]),
        *timing_metrics(watch, images=1),
        *(f"actor/{name}" for name in FROM_THE_WORKER | loss.keys()),
    ]
    return {re.sub(r"step_\d+$", "step_<k>", name) for name in names}


def test_the_page_explains_every_metric_and_no_other():
    rows = [row for table in tables(DOCS / "reference/metrics.md") if table.header[0] == "metric" for row in table.rows]
    documented = [code_spans(row[0])[0] for row in rows]
    assert len(documented) == len(set(documented))
    assert set(documented) == emitted()
    assert all(len(row) == 3 and all(row) for row in rows)
