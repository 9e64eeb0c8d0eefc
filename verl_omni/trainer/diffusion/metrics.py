"""The numbers of a training step, as a flat mapping from name to value.

Pure functions; ``docs/reference/metrics.md`` tells what each name means. Shapes: B samples, W recorded steps. Means and
deviations are computed in float64, and deviations are the population's, as those in the advantages are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_omni.pipelines.stage_clock import ROLLOUT_STAGES
from verl_omni.pipelines.stats import RolloutStats

if TYPE_CHECKING:
    from verl_omni.reward_loop.item import RewardResult

STEP_STAGES = ("generation", "reward", "log_prob", "update", "sync")
"""What the time of a step is spent on, in the order in which it happens."""
STAGES = (*STEP_STAGES, "validation", "checkpoint")
"""The same, with what follows some steps."""


def reward_metrics(results: Sequence[RewardResult], groups: Sequence[Hashable]) -> dict[str, float]:
    """``reward/…`` of B results and the group (prompt) of each.

    Raises ValueError when there are not as many groups as results, or none.
    """
    if len(groups) != len(results):
        raise ValueError(f"need one group a sample, got {len(results)} rewards and {len(groups)} groups")
    metrics = _summary("reward", results)
    members: dict[Hashable, list[float]] = {}
    for result, group in zip(results, groups, strict=True):
        members.setdefault(group, []).append(result.total)
    by_group = [torch.tensor(totals, dtype=torch.float64) for totals in members.values()]
    flat = [len(set(totals)) == 1 for totals in members.values()]
    return metrics | {
        "reward/group_mean_std": _std(torch.stack([totals.mean() for totals in by_group])),
        "reward/group_std_mean": sum(map(_std, by_group)) / len(by_group),
        "reward/groups_without_spread": sum(flat) / len(flat),
    }


def validation_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """``val/reward/…`` of the results of a validation. Raises ValueError when there are none."""
    return _summary("val/reward", results)


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """``advantage/…`` of advantages [B] or [B, W]."""
    values = advantages.double()
    return {
        "advantage/mean": values.mean().item(),
        "advantage/abs_mean": values.abs().mean().item(),
        "advantage/min": values.min().item(),
        "advantage/max": values.max().item(),
    }


def log_prob_gap_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, sde_steps: Tensor) -> dict[str, float]:
    """``rollout/logp_gap_…``: how far the trainer's log-probs [B, W] of the recorded steps lie from the rollout's.

    `sde_steps` int64 [B, W] tells each step's index in the schedule.
    """
    gap = (old_log_probs.double() - rollout_log_probs.double()).abs()
    metrics = {"rollout/logp_gap_mean": gap.mean().item(), "rollout/logp_gap_max": gap.max().item()}
    for step in sde_steps.unique().tolist():
        metrics[f"rollout/logp_gap_step_{step}"] = gap[sde_steps == step].mean().item()
    return metrics


def rollout_metrics(
    stats: RolloutStats,
    *,
    policy_version: int = 0,
    succeeded: int = 0,
    failed: int = 0,
    aborted: int = 0,
    requests_retried: int = 0,
    servers_restarted: int = 0,
    peak_memory_mb: float = 0.0,
) -> dict[str, float]:
    """``rollout/…``: what the engines did, over all replicas and for this step only.

    `policy_version` made the samples; `succeeded` requests gave one and `failed` none, `aborted` of these as they were
    aborted; `requests_retried` were run again, as their server died, and `servers_restarted` fresh ones took the place
    of such. `peak_memory_mb` is the most device memory, MiB, that an engine held.
    """
    forwards = sum(stats.batch_sizes.values())
    rows = sum(size * count for size, count in stats.batch_sizes.items())
    return {
        "rollout/batch_size_mean": rows / forwards if forwards else 0.0,
        "rollout/batch_size_max": float(max(stats.batch_sizes, default=0)),
        "rollout/forwards": float(forwards),
        "rollout/waves": float(stats.waves),
        "rollout/encodes_requested": float(stats.encodes_requested),
        "rollout/encodes_computed": float(stats.encodes_computed),
        **{f"rollout/{stage}_s": stats.stage_s.get(stage, 0.0) for stage in ROLLOUT_STAGES},
        "rollout/compiled_graphs": float(stats.compiled_graphs),
        "rollout/out_of_memory": float(stats.out_of_memory),
        "rollout/succeeded": float(succeeded),
        "rollout/failed": float(failed),
        "rollout/aborted": float(aborted),
        "rollout/requests_retried": float(requests_retried),
        "rollout/servers_restarted": float(servers_restarted),
        "rollout/peak_memory_mb": peak_memory_mb,
        "rollout/policy_version": float(policy_version),
    }


def queue_wait_metrics(waits: Iterable[float | None]) -> dict[str, float]:
    """``rollout/queue_wait_s_…`` of the seconds that requests waited for a place in a batch.

    None is a wait that is not known, and left out; if none is known there are no metrics.
    """
    known = [wait for wait in waits if wait is not None]
    if not known:
        return {}
    return {"rollout/queue_wait_s_mean": sum(known) / len(known), "rollout/queue_wait_s_max": max(known)}


class Stopwatch:
    """Where time goes: seconds of the stages of one step, and of the ``step`` itself."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to `name`, one of `STAGES` or ``step``, also if it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere. Raises ValueError for another name than :meth:`stage` takes."""
        if name not in STAGES and name != "step":
            raise ValueError(f"{name!r} is no stage of a step; write step, {', '.join(STAGES)}")
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def timing_metrics(watch: Stopwatch, *, images: int = 0, devices: int = 1) -> dict[str, float]:
    """``time/…`` of what was measured; with `images`, made and trained on in the ``step``, also the throughput.

    `devices` are all GPUs of the run, those of the rollout too; on the CPU they are processes.
    """
    metrics = {f"time/{name}_s": watch.seconds[name] for name in (*STAGES, "step") if name in watch.seconds}
    if images and watch.seconds.get("step"):
        metrics["perf/images_per_s_per_gpu"] = images / watch.seconds["step"] / devices
    return metrics


def _summary(prefix: str, results: Sequence[RewardResult]) -> dict[str, float]:
    if not results:
        raise ValueError("there is no reward to take a mean of")
    totals = torch.tensor([result.total for result in results], dtype=torch.float64)
    metrics = {
        f"{prefix}/mean": totals.mean().item(),
        f"{prefix}/std": _std(totals),
        f"{prefix}/min": totals.min().item(),
        f"{prefix}/max": totals.max().item(),
    }
    for scorer in dict.fromkeys(name for result in results for name in result.parts):
        values = [result.parts[scorer] for result in results if scorer in result.parts]
        metrics[f"{prefix}/{scorer}/mean"] = sum(values) / len(values)
    return metrics


def _std(values: Tensor) -> float:
    return values.std(unbiased=False).item()
