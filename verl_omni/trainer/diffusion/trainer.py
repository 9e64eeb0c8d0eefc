"""The training loop of FlowGRPO.

A step: prompts → rollouts, scored as they arrive → group advantages → one batch, dealt to the training workers →
log-probs under the policy that made the samples → update of the policy → the new policy handed to the rollout servers.
Samples of step s are made by policy version s - 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from verl_omni.trainer.diffusion import metrics as measures
from verl_omni.trainer.diffusion.batch import counted, deal, make_batch
from verl_omni.trainer.diffusion.checkpoint import Checkpoints
from verl_omni.trainer.diffusion.collect import Sweep, collect
from verl_omni.trainer.diffusion.data import PromptGroup, training_groups, validation_groups
from verl_omni.trainer.diffusion.diffusion_algos import get_diffusion_adv_estimator_fn
from verl_omni.trainer.diffusion.errors import SkippedSteps, TrainingError
from verl_omni.trainer.diffusion.job import TrainingJob, reward_item
from verl_omni.trainer.diffusion.resume import run_config
from verl_omni.trainer.diffusion.sde_window import scheduled_range
from verl_omni.trainer.diffusion.validation_grid import validation_tiles
from verl_omni.trainer.prometheus import NoMetrics

if TYPE_CHECKING:
    from torch import Tensor
    from verl import DataProto

    from verl_omni.reward_loop.item import RewardResult
    from verl_omni.reward_loop.manager import RewardManager
    from verl_omni.trainer.diffusion.cluster import Cluster
    from verl_omni.trainer.diffusion.run_log import RunLog
    from verl_omni.workers.config import DiffusionRolloutConfig
    from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

logger = logging.getLogger(__name__)


class DiffusionTrainer:
    """Runs a :class:`TrainingJob` on a started :class:`Cluster`."""

    def __init__(
        self, job: TrainingJob, cluster: Cluster, rewards: RewardManager, log: RunLog, figures: NoMetrics | None = None
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._actors, self._replicas = cluster.actors, cluster.replicas
        self._rewards = rewards
        self._log, self._figures = log, figures or NoMetrics()
        trainer = job.settings.trainer
        self._checkpoints = Checkpoints(
            trainer.default_local_dir, keep=trainer.max_actor_ckpt_to_keep, config=run_config(job.settings)
        )
        self._skipped = SkippedSteps()

    async def fit(self) -> None:
        """Train from where the job resumes to its last step."""
        trainer, start = self._settings.trainer, self._job.resume
        done = 0
        if start is not None:
            await self._make_room_for_training()
            await self._call("load_checkpoint", str(start.actor))
            done = start.step
            logger.info("going on after step %d, from %s", done, start.folder)
        await self._sync(done)
        if done == 0 and trainer.val_before_train:
            await self._validate(0)
        for step in range(done + 1, self._job.total_steps + 1):
            last = step == self._job.total_steps
            metrics = await self._train(step)
            self._log.log(step, metrics)
            self._figures.stepped(metrics)
            self._skipped.see(step, metrics["actor/skipped_steps"])
            if last or (trainer.test_freq > 0 and step % trainer.test_freq == 0):
                await self._validate(step)
            if last or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
                await self._save(step)

    async def _train(self, step: int) -> dict[str, float]:
        """One step; its metrics."""
        watch = measures.Stopwatch()
        rollout = self._rollout_at(step)
        groups = training_groups(self._job.prompts.batch_at(step), rollout, step=step, **self._job.asking)
        with watch.stage("step"):
            sweep = await self._sweep(groups)
            stats = await self._replicas.stats(reset=True)
            self._figures.observe(stats)
            await self._make_room_for_training()
            batch = self._batch(sweep, step)
            with watch.stage("log_prob"):
                batch.batch["old_log_probs"] = await self._old_log_probs(batch)
            with watch.stage("update"):
                updated = await asyncio.to_thread(self._actors.update_actor, batch)
            with watch.stage("sync"):
                await self._sync(step)
        watch.add("generation", sweep.generation_s)
        watch.add("reward", sweep.reward_s)
        recovery = self._replicas.recovery(reset=True)
        return {
            **measures.reward_metrics([item.reward for item in sweep.samples], [item.uid for item in sweep.samples]),
            **measures.advantage_metrics(*counted(batch, "advantages")),
            **measures.log_prob_gap_metrics(*counted(batch, "old_log_probs", "rollout_log_probs", "sde_steps")),
            **updated.meta_info["metrics"],
            **measures.rollout_metrics(
                stats,
                policy_version=step - 1,
                succeeded=len(sweep.samples),
                failed=len(sweep.failures),
                aborted=sweep.aborted,
                requests_retried=recovery.requests_retried,
                servers_restarted=recovery.servers_restarted,
                peak_memory_mb=max(item.sample.peak_memory_mb for item in sweep.samples),
            ),
            **measures.queue_wait_metrics(item.sample.queue_wait_s for item in sweep.samples),
            **measures.timing_metrics(watch, images=len(sweep.samples), devices=self._job.devices),
        }

    async def _validate(self, step: int) -> None:
        rows = self._job.validation
        if not rows:
            return
        groups = validation_groups(rows, self._settings.actor_rollout_ref.rollout, step=step, **self._job.asking)
        watch = measures.Stopwatch()
        with watch.stage("validation"):
            sweep = await self._sweep(groups)
        self._figures.observe(await self._replicas.stats(reset=True))  # the next step's counters are its own
        found = measures.validation_metrics([item.reward for item in sweep.samples]) | measures.timing_metrics(watch)
        prompts = {group.uid: str(group.row.prompt) for group in groups}
        limit = self._settings.trainer.val_grid_max_images
        self._log.log_validation(step, validation_tiles(sweep.samples, prompts, limit=limit), found)

    async def _sweep(self, groups: Sequence[PromptGroup]) -> Sweep:
        def score(group: PromptGroup, request: RolloutRequest, sample: RolloutSample) -> Awaitable[RewardResult]:
            return self._rewards.score(reward_item(group, request, sample))

        def generate(groups: Sequence[Sequence[RolloutRequest]]) -> AsyncIterator[RolloutSample | RolloutError]:
            requests = [request for group in groups for request in group]
            return self._figures.watched(requests, self._replicas.generate_groups(groups))

        return await collect(groups, generate, score)

    def _batch(self, sweep: Sweep, step: int) -> DataProto:
        """The step's batch with its advantages, dealt to the workers, once for all that they do with it.

        Raises :class:`TrainingError` if another policy made some of it, unless allowed.
        """
        versions = {item.sample.policy_version for item in sweep.samples}
        if versions != {step - 1} and not self._settings.algorithm.allow_mixed_policy_versions:
            raise TrainingError(
                f"step {step} got samples of policy versions {sorted(versions)}, not of {step - 1} alone; "
                "write algorithm.allow_mixed_policy_versions=true if that is meant"
            )
        traits, settings = self._job.model_class, self._settings
        batch = make_batch(sweep.samples, cfg_key=traits.cfg_key, default_cfg_scale=traits.default_cfg_scale)
        batch.batch["advantages"] = self._advantages(batch)
        batch, size = deal(batch, mini_batches=settings.mini_batches, ranks=settings.trainer.processes)
        batch.meta_info.update(self._job.step_knobs(), mini_batch_size=size)
        return batch

    async def _old_log_probs(self, batch: DataProto) -> Tensor:
        """Float32 [B, W]: recomputed, or those that the rollout recorded."""
        if self._settings.algorithm.rollout_correction.bypass_mode:
            return batch.batch["rollout_log_probs"].clone()
        scored = await asyncio.to_thread(self._actors.compute_log_prob, batch)
        return scored.batch["old_log_probs"]

    def _advantages(self, batch: DataProto) -> Tensor:
        """Float32 [B, W]."""
        algorithm = self._settings.algorithm
        estimate = get_diffusion_adv_estimator_fn(algorithm.adv_estimator)
        advantages, _ = estimate(
            batch.batch["rm_scores"],
            batch.non_tensor_batch["uid"],
            epsilon=algorithm.epsilon,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            global_std=algorithm.global_std,
            config=algorithm,
        )
        return advantages.expand_as(batch.batch["rollout_log_probs"]).clone()

    async def _sync(self, version: int) -> None:
        """Hand the policy to the rollout servers, as `version`."""
        kind, *state = next(state for state in await self._call("policy_state") if state is not None)
        await self._make_room_for_rollouts()
        await self._replicas.sync(kind, version, state if kind == "lora" else state[0])

    async def _make_room_for_training(self) -> None:
        if self._job.colocated:
            await self._replicas.sleep()
            await self._call("onload")

    async def _make_room_for_rollouts(self) -> None:
        if self._job.colocated:
            await self._call("offload")
            await self._replicas.wake_up()

    async def _save(self, step: int) -> None:
        watch = measures.Stopwatch()
        with watch.stage("checkpoint"), self._checkpoints.writing(step) as part:
            await self._call("save_checkpoint", str(part.actor))
            if self._settings.actor_rollout_ref.model.lora_rank:
                await self._call("save_lora", str(part.lora))
            else:
                await self._call("save_transformer", str(part.transformer))
        self._log.log(step, measures.timing_metrics(watch))
        logger.info("checkpoint of step %d: %s", step, self._checkpoints.at(step).folder)

    def _rollout_at(self, step: int) -> DiffusionRolloutConfig:
        """The rollout's settings in this step: where a window moves, with its place."""
        rollout = self._settings.actor_rollout_ref.rollout
        place = scheduled_range(
            step, self._settings.algorithm.sde_window_schedule, rollout.algo, rollout.pipeline.num_inference_steps
        )
        return dataclasses.replace(rollout, algo=dataclasses.replace(rollout.algo, sde_window_range=place))

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """A method of every training worker, off the event loop."""
        return await asyncio.to_thread(getattr(self._actors, method), *args)
