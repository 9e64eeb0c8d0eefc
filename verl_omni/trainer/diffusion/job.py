"""A training run: everything checked first, then the processes started, then trained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.trainer.diffusion.capacity import needs
from verl_omni.trainer.diffusion.checkpoint import TRACKER, Checkpoint, Checkpoints
from verl_omni.trainer.diffusion.checks import check_sharing
from verl_omni.trainer.diffusion.cluster import Cluster, prepare_process, ray_address
from verl_omni.trainer.diffusion.data import PromptGroup, TrainPrompts, read_validation_prompts, training_groups
from verl_omni.trainer.diffusion.diffusion_algos import get_diffusion_adv_estimator_fn, get_diffusion_loss_fn
from verl_omni.trainer.diffusion.errors import TrainingError
from verl_omni.trainer.diffusion.metrics_file import METRICS
from verl_omni.trainer.diffusion.prompt_tokens import PromptTokenizer
from verl_omni.trainer.diffusion.report import REPORT
from verl_omni.trainer.diffusion.resume import check_continues, run_config
from verl_omni.trainer.diffusion.run_log import RUN
from verl_omni.trainer.diffusion.settings import TrainSettings
from verl_omni.trainer.diffusion.trackers import TENSORBOARD, WANDB
from verl_omni.trainer.diffusion.validation_grid import FOLDER as VALIDATION
from verl_omni.trainer.folders import check_writable, locked
from verl_omni.trainer.prometheus import served_metrics
from verl_omni.trainer.prompts import PromptRow
from verl_omni.trainer.rollout_setup import RolloutSetup, resolve_rollout
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.request import RolloutRequest, RolloutSample

if TYPE_CHECKING:
    from verl_omni.pipelines.training import DiffusionModelBase
    from verl_omni.reward_loop.item import RewardItem
    from verl_omni.workers.actor import ActorWorkerConfig
    from verl_omni.workers.config.reward import RewardConfig

logger = logging.getLogger(__name__)

FILES, FOLDERS = (RUN, METRICS, REPORT, TRACKER), (VALIDATION, TENSORBOARD, WANDB)
"""What a run writes into its folder, beside its checkpoints."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A checked run; no model is loaded yet, no process started."""

    settings: TrainSettings
    """The configuration."""
    device: str
    """cpu or cuda."""
    setup: RolloutSetup
    """Adapter and plan of the rollout."""
    model_class: type[DiffusionModelBase]
    """The training side of the model."""
    prompts: TrainPrompts
    """What is trained on."""
    validation: list[PromptRow]
    """What is validated with."""
    tokenizer: PromptTokenizer | None
    """Turns prompts into token ids, if that is to happen here."""
    resume: Checkpoint | None
    """Where the run goes on."""

    @classmethod
    def prepare(cls, mapping: Mapping[str, Any]) -> TrainingJob:
        """Check the configuration and whatever it names, what is cheap first. Raises :class:`ConfigError`."""
        settings = TrainSettings.from_mapping(mapping)
        model, rollout, trainer = (
            settings.actor_rollout_ref.model,
            settings.actor_rollout_ref.rollout,
            settings.trainer,
        )
        prompts, validation = TrainPrompts.read(settings.data), read_validation_prompts(settings.data)
        _check_targets(settings.reward, [*prompts.rows, *validation])
        resume = Checkpoints(trainer.default_local_dir).find(trainer.resume_mode)
        key = f"trainer.default_local_dir={trainer.default_local_dir!r}"
        check_writable(Path(trainer.default_local_dir).absolute(), key=key, files=FILES, folders=FOLDERS)
        if resume is not None:
            check_continues(resume, settings)
        device = _device(trainer.device)
        check_sharing(settings, device)
        _check_gpus(settings, device)
        prepare_process(device, own_ray=ray_address(trainer) == "local")
        first = training_groups(prompts.batch_at(1), rollout, step=1, negative_prompt=settings.data.negative_prompt)
        requests = [request for group in first for request in group.requests]
        setup = resolve_rollout(model, rollout, requests, trained_lora_rank=model.lora_rank)
        get_diffusion_loss_fn(settings.actor_rollout_ref.actor.diffusion_loss.loss_mode)
        get_diffusion_adv_estimator_fn(settings.algorithm.adv_estimator)
        return cls(
            settings=settings,
            device=device,
            setup=setup,
            model_class=_model_class(setup.architecture, model.algorithm),
            prompts=prompts,
            validation=validation,
            tokenizer=PromptTokenizer.load(model, setup.adapter) if model.extra_tokenizers else None,
            resume=resume,
        )

    async def run(self) -> None:
        """Train, and leave checkpoints, metrics and the report in ``trainer.default_local_dir``.

        What an earlier run left there is untouched until everything is up. Raises :class:`ConfigError` while another
        run has the folder, what the engines raise at their start, and :class:`TrainingError` later.
        """
        if self.resume is not None and self.resume.step >= self.total_steps:
            done, folder = self.total_steps, self.resume.folder
            logger.info("all %d steps are done, see %s; to go on, raise trainer.total_training_steps", done, folder)
            return
        with locked(Path(self.settings.trainer.default_local_dir).absolute(), key="trainer.default_local_dir"):
            await self._run()

    async def _run(self) -> None:
        from verl_omni.reward_loop.manager import RewardManager
        from verl_omni.trainer.diffusion.run_log import RunLog
        from verl_omni.trainer.diffusion.trainer import DiffusionTrainer
        from verl_omni.workers.rollout.handle import tells_death

        trainer = self.settings.trainer
        async with AsyncExitStack() as stack:
            figures = stack.enter_context(served_metrics(self.settings.actor_rollout_ref.rollout))
            rewards = await stack.enter_async_context(RewardManager(self.settings.reward))
            cluster = await stack.enter_async_context(Cluster.running(self))
            log = RunLog(
                trainer.default_local_dir,
                project_name=trainer.project_name,
                experiment_name=trainer.experiment_name,
                logger=trainer.logger,
                config=run_config(self.settings),
                total_steps=self.total_steps,
                resume_step=None if self.resume is None else self.resume.step,
            )
            status = "failed"
            try:
                if self.resume is None:
                    Checkpoints(trainer.default_local_dir).start_anew()
                await DiffusionTrainer(self, cluster, rewards, log, figures).fit()
                status = "finished"
            except Exception as error:
                if not tells_death(error):
                    raise
                raise TrainingError(
                    f"a process of the run died: {error}; with trainer.resume_mode=auto the same command goes on from "
                    "the last checkpoint"
                ) from error
            except (asyncio.CancelledError, KeyboardInterrupt):
                status = "interrupted"
                raise
            finally:
                log.close(status)

    @property
    def total_steps(self) -> int:
        """Training steps of the whole run, those before it was resumed too."""
        trainer = self.settings.trainer
        return self.prompts.total_steps(epochs=trainer.total_epochs, limit=trainer.total_training_steps)

    @property
    def colocated(self) -> bool:
        """Whether rollout and training share their devices, and so take turns in holding memory there."""
        return self.settings.actor_rollout_ref.rollout.colocate

    @property
    def devices(self) -> int:
        """GPUs of the run; on the CPU processes."""
        rollout = self.settings.actor_rollout_ref.rollout
        own = 0 if self.colocated else self.settings.replicas * rollout.gpus_per_replica
        return self.settings.trainer.processes + own

    @property
    def asking(self) -> dict[str, Any]:
        """How prompts become requests, in training and validation alike."""
        return {"negative_prompt": self.settings.data.negative_prompt, "tokenizer": self.tokenizer}

    def actor_config(self) -> ActorWorkerConfig:
        """What the training workers are started with."""
        from verl_omni.workers.actor import ActorWorkerConfig

        parts, trainer = self.settings.actor_rollout_ref, self.settings.trainer
        return ActorWorkerConfig(
            model=parts.model,
            actor=parts.actor,
            log_prob_micro_batch_size=parts.rollout.log_prob_micro_batch_size_per_gpu
            or parts.actor.ppo_micro_batch_size_per_gpu,
            optimizer_steps=self.total_steps * parts.actor.ppo_epochs * self.settings.mini_batches,
            seed=trainer.seed,
            external_lib=parts.rollout.external_lib,
        )

    def step_knobs(self) -> dict[str, Any]:
        """What all samples of a training batch share, and the training forward needs: its ``meta_info``."""
        rollout = self.settings.actor_rollout_ref.rollout
        pipeline = {name: getattr(rollout.pipeline, name) for name in ("height", "width", "num_inference_steps")}
        return {**pipeline, "noise_level": rollout.algo.noise_level, "sde_type": rollout.algo.sde_type}


def reward_item(group: PromptGroup, request: RolloutRequest, sample: RolloutSample) -> RewardItem:
    """One image as the rewards see it."""
    from verl_omni.reward_loop.item import RewardItem

    row = group.row
    assert sample.images is not None  # output_type=latent is refused
    return RewardItem(
        uid=group.uid,
        request_id=request.request_id,
        prompt=row.prompt or "",
        image=sample.images[0],
        ground_truth=row.ground_truth,
        data_source=row.data_source or "",
        extra_info=row.extra_info,
    )


def _check_targets(reward: RewardConfig, rows: Sequence[PromptRow]) -> None:
    """An OCR reward must know what to look for."""
    from verl_omni.reward_loop.item import ScoreError
    from verl_omni.reward_loop.text import target_text

    if not any(scorer.TYPE == "ocr" for scorer in reward.named_scorers().values()):
        return
    for row in rows:
        try:
            target_text(row.prompt or "", row.ground_truth)
        except ScoreError as error:
            raise ConfigError(f"{row.source}: {error}") from None


def _device(asked: str | None) -> str:
    import torch

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ConfigError("trainer.device=cuda, but no CUDA device is there; write trainer.device=cpu")
    return asked or ("cuda" if available else "cpu")


def _check_gpus(settings: TrainSettings, device: str) -> None:
    """A run with a Ray of its own must find its GPUs on this machine. What other clusters have, Ray tells later."""
    import torch

    if device == "cuda" and ray_address(settings.trainer) == "local":
        needs(settings, device)[0].check([torch.cuda.device_count()], cluster=False)


def _model_class(architecture: str, algorithm: str) -> type[DiffusionModelBase]:
    from verl_omni.pipelines.training import DiffusionModelBase

    try:
        return DiffusionModelBase.get_class(architecture, algorithm)
    except ValueError as error:
        raise ConfigError(f"actor_rollout_ref.model: {error}") from error
