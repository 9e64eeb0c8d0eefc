"""A training step with rollout servers and training workers that are played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.docs.pages import DOCS
from tests.trainer.samples import scored
from verl_omni.algorithms.flow_grpo import group_advantages
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.reward_loop.item import RewardResult
from verl_omni.testing.tiny_training import overrides
from verl_omni.trainer.compose import compose
from verl_omni.trainer.diffusion.errors import MAX_SKIPPED, TrainingError
from verl_omni.trainer.diffusion.job import TrainingJob
from verl_omni.trainer.diffusion.trainer import DiffusionTrainer
from verl_omni.trainer.main_diffusion import CONFIG_NAME
from verl_omni.trainer.prometheus import PREFIX, NoMetrics, PrometheusMetrics
from verl_omni.workers.rollout.replicas import Recovery
from verl_omni.workers.rollout.request import ABORTED, RolloutError, RolloutRequest, RolloutSample

verl = pytest.importorskip("verl")


STATS = RolloutStats(waves=3)
WAIT_S = [0.5 * place for place in range(16)]
MEMORY_MB = [100.0 - place for place in range(16)]


class Replicas:
    """Rollout servers; the requests at the places in `failing` fail of `problem`."""

    def __init__(self, failing: Sequence[int] = (), problem: str = "it failed") -> None:
        self._failing, self._problem, self._version = failing, problem, 0

    async def generate_groups(
        self, groups: Sequence[Sequence[RolloutRequest]]
    ) -> AsyncIterator[RolloutSample | RolloutError]:
        for place, request in enumerate(request for group in groups for request in group):
            if place in self._failing:
                yield RolloutError(request.request_id, self._problem)
            else:
                yield replace(
                    scored(request.request_id).sample,
                    policy_version=self._version,
                    peak_memory_mb=MEMORY_MB[place],
                    queue_wait_s=WAIT_S[place],
                )

    async def stats(self, *, reset: bool) -> RolloutStats:
        return STATS

    async def sync(self, kind: str, version: int, *state: Any) -> None:
        self._version = version

    def recovery(self, *, reset: bool) -> Recovery:
        return Recovery(servers_restarted=int(reset), requests_retried=3)

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...


class Actors:
    """Training workers that remember the batches they got. `skipped`: share of skipped updates, step after step."""

    def __init__(self, *skipped: float) -> None:
        self._skipped = list(skipped)
        self.scored: list[Any] = []
        self.updated: list[Any] = []

    def compute_log_prob(self, batch: Any) -> Any:
        self.scored.append({name: value.clone() for name, value in batch.batch.items()})
        recorded = batch.batch["rollout_log_probs"]
        return verl.DataProto.from_dict(tensors={"old_log_probs": recorded + gap(recorded)})

    def update_actor(self, batch: Any) -> Any:
        self.updated.append(batch)
        skipped = self._skipped.pop(0) if self._skipped else 0.0
        return verl.DataProto(meta_info={"metrics": {"actor/skipped_steps": skipped}})

    def policy_state(self) -> list[Any]:
        return [("lora", {}, {}), None]

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Log:
    """What was logged, by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.setdefault(step, {}).update(metrics)


class Rewards:
    """Each sample its own, by its latents."""

    async def score(self, item: Any) -> RewardResult:
        return RewardResult(total=worth(item.request_id), parts={})


def worth(name: str) -> float:
    return float(scored(name).sample.trajectory_latents.mean())


def gap(log_probs: torch.Tensor) -> torch.Tensor:
    return 1e-3 * torch.sigmoid(log_probs)


def train(
    tmp_path: Path, actors: Actors, replicas: Replicas, *changes: str, figures: NoMetrics | None = None
) -> dict[int, dict[str, float]]:
    """Metrics by step; those logged before an error are in its ``logged``."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    job = TrainingJob.prepare(compose(overrides(tmp_path, model, "trainer.save_freq=-1", *changes), CONFIG_NAME))
    log = Log()
    trainer = DiffusionTrainer(job, SimpleNamespace(actors=actors, replicas=replicas), Rewards(), log, figures)
    try:
        asyncio.run(trainer.fit())
    except TrainingError as error:
        error.logged = log.steps
        raise
    return log.steps


def test_log_probs_and_update_get_one_batch_and_filling_counts_nowhere(tmp_path):
    actors = Actors()
    logged = train(
        tmp_path,
        actors,
        Replicas(failing=[5], problem=ABORTED),
        "trainer.total_training_steps=1",
        "trainer.n_gpus_per_node=2",
        "actor.ppo_mini_batch_size=2",
    )
    (before,), (after,) = actors.scored, actors.updated
    assert after.meta_info["mini_batch_size"] == 8
    assert len(after) == 16  # 4 prompts of 4, of which one failed
    assert after.batch["sample_weight"].sum() == 15
    for name, value in before.items():
        assert torch.equal(after.batch[name], value), name
    recorded = after.batch["rollout_log_probs"]
    assert torch.equal(after.batch["old_log_probs"], recorded + gap(recorded))

    kept = after.batch["sample_weight"] > 0
    rewards, advantages = after.batch["rm_scores"][kept, 0], after.batch["advantages"][kept]
    expected = group_advantages(rewards, [uid for uid, k in zip(after.non_tensor_batch["uid"], kept, strict=True) if k])
    assert torch.allclose(advantages, expected[:, None].expand_as(advantages))
    metrics = logged[1]
    assert metrics["advantage/mean"] == pytest.approx(expected.mean().item(), abs=1e-6)
    assert metrics["advantage/abs_mean"] == pytest.approx(expected.abs().mean().item())
    assert metrics["rollout/logp_gap_mean"] == pytest.approx(gap(recorded[kept]).mean().item(), rel=1e-3)
    assert (metrics["rollout/succeeded"], metrics["rollout/failed"], metrics["rollout/aborted"]) == (15, 1, 1)
    assert metrics["rollout/peak_memory_mb"] == max(MEMORY_MB[place] for place in range(16) if place != 5)
    waits = [WAIT_S[place] for place in range(16) if place != 5]
    assert metrics["rollout/queue_wait_s_mean"] == pytest.approx(sum(waits) / len(waits))
    assert metrics["rollout/queue_wait_s_max"] == max(waits)
    assert (metrics["rollout/servers_restarted"], metrics["rollout/requests_retried"]) == (1, 3)


def test_prometheus_is_told_of_each_step(tmp_path):
    registry = CollectorRegistry()
    figures = PrometheusMetrics(registry)
    logged = train(tmp_path, Actors(), Replicas(failing=[5]), "trainer.total_training_steps=2", figures=figures)

    def figure(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(PREFIX + name, labels)

    outcomes = {name: figure("requests_total", outcome=name) for name in ("success", "error", "retried")}
    assert outcomes == {"success": 2 * 15, "error": 2 * 1, "retried": 2 * 3}
    assert figure("training_step_seconds_count") == len(logged)
    assert figure("waves_total") == 2 * STATS.waves
    assert figure("policy_version") == 1


def test_recorded_log_probs_are_taken_as_they_are_if_asked_for(tmp_path):
    actors = Actors()
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    logged = train(tmp_path, actors, Replicas(), "trainer.total_training_steps=1", bypass)
    assert not actors.scored
    assert torch.equal(actors.updated[0].batch["old_log_probs"], actors.updated[0].batch["rollout_log_probs"])
    assert logged[1]["rollout/logp_gap_max"] == 0


def test_a_run_ends_after_some_steps_in_a_row_without_an_update(tmp_path):
    learnt = [1.0] * (MAX_SKIPPED - 1) + [0.5]
    actors = Actors(*learnt, *[1.0] * MAX_SKIPPED)
    first, last = len(learnt) + 1, len(learnt) + MAX_SKIPPED
    with pytest.raises(TrainingError, match=f"nothing was learnt in steps {first} to {last}: ") as raised:
        train(tmp_path, actors, Replicas(), "trainer.total_training_steps=20")
    assert all(word in str(raised.value) for word in ("actor.optim.lr", "param_dtype=float32", "reward/min"))
    assert max(raised.value.logged) == last  # with the metrics that show it
    assert raised.value.logged[last]["actor/skipped_steps"] == 1
    assert f"After {MAX_SKIPPED} training steps in a row" in (DOCS / "reference/metrics.md").read_text()
