"""What must hold between the sections of a training run's configuration. Looks at no file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_omni.trainer.diffusion.sde_window import window_range
from verl_omni.workers.config import ConfigError

if TYPE_CHECKING:
    from verl_omni.trainer.diffusion.settings import TrainSettings

ROLLOUT, ALGO, ACTOR, MODEL = (f"actor_rollout_ref.{name}" for name in ("rollout", "rollout.algo", "actor", "model"))


def check_settings(settings: TrainSettings) -> None:
    """Raise :class:`ConfigError` for values that each can be and together cannot; says what to write instead."""
    _check_group(settings)
    _check_batches(settings)
    _check_model(settings)
    _check_pipeline(settings)
    _check_recorded_steps(settings)
    _check_moving_window(settings)
    _check_devices(settings)
    _check_validation(settings)


def settings_notes(settings: TrainSettings) -> Iterator[str]:
    """What is configured without effect."""
    micro, given = (
        settings.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,
        settings.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
    )
    if given not in (None, micro):
        yield (
            f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={given} has no effect: the reference is computed "
            f"within the update, {ACTOR}.ppo_micro_batch_size_per_gpu={micro} samples at a time"
        )
    if settings.actor_rollout_ref.rollout.merge_lora and settings.actor_rollout_ref.model.lora_rank == 0:
        yield f"{ROLLOUT}.merge_lora has no effect: {MODEL}.lora_rank=0 trains all weights, without a LoRA"


def _check_group(settings: TrainSettings) -> None:
    if settings.algorithm.adv_estimator == "flow_grpo" and settings.actor_rollout_ref.rollout.n < 2:
        raise ConfigError(
            f"{ROLLOUT}.n=1 leaves nothing to compare a sample with: the advantage of a group of one is 0; "
            f"write {ROLLOUT}.n=8 or another number from 2"
        )


def _check_batches(settings: TrainSettings) -> None:
    """Each mini-batch must give every training process as many samples, and the mini-batches make up the batch."""
    batch, mini = settings.data.train_batch_size, settings.mini_batch_size
    processes, n = settings.trainer.processes, settings.actor_rollout_ref.rollout.n
    unit = processes // math.gcd(processes, n)
    even = _up(mini, unit)
    batch_key, mini_key = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
    if settings.actor_rollout_ref.actor.ppo_mini_batch_size is None:
        mini_key, instead = batch_key, f"{batch_key}={even}"
    else:
        changes = {mini_key: (mini, even), batch_key: (batch, _up(batch, even))}
        instead = " ".join(f"{key}={new}" for key, (old, new) in changes.items() if new != old)
    if mini % unit:
        raise ConfigError(
            f"{mini_key}={mini} prompts of {ROLLOUT}.n={n} samples cannot be shared evenly by {processes} training "
            f"processes (trainer.nnodes × trainer.n_gpus_per_node); write {instead}"
        )
    if batch % mini:
        raise ConfigError(f"{batch_key}={batch} is no multiple of {mini_key}={mini}; write {instead}")


def _up(number: int, unit: int) -> int:
    """The multiple of `unit` at or above `number`."""
    return -(-number // unit) * unit


def _check_model(settings: TrainSettings) -> None:
    model = settings.actor_rollout_ref.model
    if model.lora_path is not None or model.lora_scale != 1:
        raise ConfigError(
            f"{MODEL}.lora_path and {MODEL}.lora_scale are for rollouts without training; leave them out: training "
            f"makes a LoRA of its own ({MODEL}.lora_rank), and trainer.resume_mode goes on with one"
        )
    if model.lora_rank == 0 and model.target_modules is not None:
        raise ConfigError(
            f"{MODEL}.target_modules says where a LoRA goes, but {MODEL}.lora_rank=0 trains all weights without one; "
            f"write {MODEL}.lora_rank=32 or {MODEL}.target_modules=null"
        )


def _check_pipeline(settings: TrainSettings) -> None:
    pipeline = settings.actor_rollout_ref.rollout.pipeline
    for name in ("height", "width", "num_inference_steps"):
        if getattr(pipeline, name) is None:
            raise ConfigError(
                f"{pipeline.KEY}.{name}=null leaves it to the adapter, but training must know it; write a number"
            )
    if pipeline.output_type == "latent":
        raise ConfigError(
            f"{pipeline.KEY}.output_type=latent decodes no image to be rewarded; write {pipeline.KEY}.output_type=pt"
        )


def _check_recorded_steps(settings: TrainSettings) -> None:
    """Each sample must record steps, and all samples as many: each step of a window must have noise."""
    rollout = settings.actor_rollout_ref.rollout
    algo, steps = rollout.algo, rollout.pipeline.num_inference_steps or 0
    if algo.noise_level == 0:
        raise ConfigError(
            f"{ALGO}.noise_level=0 makes every step deterministic: there is no log-prob to train with; "
            f"write {ALGO}.noise_level=0.7"
        )
    if algo.sde_window_size == 0:
        raise ConfigError(
            f"{ALGO}.sde_window_size=0 records no step to train on; write 1 or more, or null for all steps but the last"
        )
    lo, end = window_range(algo, steps)
    noisy = steps - 1 if algo.sde_type == "cps" else steps
    size = algo.sde_window_size or 1
    if end < 1 or noisy < 1:
        raise ConfigError(
            f"{ROLLOUT}.pipeline.num_inference_steps={steps} records no step, as the last one is not stochastic; "
            f"write {ROLLOUT}.pipeline.num_inference_steps=10"
        )
    if end <= noisy:
        return
    if size > noisy:
        instead = f"{ALGO}.sde_window_size={noisy}"
        if algo.sde_window_range is not None:
            instead += f" {ALGO}.sde_window_range=null"
    else:
        instead = f"{ALGO}.sde_window_range=[{min(lo, noisy - size)},{noisy}]"
    raise ConfigError(
        f"{ALGO}: a window in [{lo}, {end}) does not fit into {ROLLOUT}.pipeline.num_inference_steps={steps}"
        + (", of which cps draws no noise in the last" if noisy < steps else "")
        + f"; write {instead}"
    )


def _check_moving_window(settings: TrainSettings) -> None:
    algo = settings.actor_rollout_ref.rollout.algo
    if settings.algorithm.sde_window_schedule.type == "moving" and algo.sde_window_size is None:
        raise ConfigError(
            f"algorithm.sde_window_schedule.type=moving needs a window to move; write {ALGO}.sde_window_size=4"
        )


def _check_devices(settings: TrainSettings) -> None:
    rollout, processes = settings.actor_rollout_ref.rollout, settings.trainer.processes
    each, size = rollout.gpus_per_replica, settings.actor_rollout_ref.actor.fsdp_config.fsdp_size
    if size != -1 and processes % size:
        raise ConfigError(
            f"{ACTOR}.fsdp_config.fsdp_size={size} does not divide the {processes} training processes; "
            f"write {ACTOR}.fsdp_config.fsdp_size=-1 for all of them"
        )
    if rollout.replicas is None and processes % each:
        raise ConfigError(
            f"{ROLLOUT}.gpus_per_replica={each} does not divide the {processes} training processes; "
            f"write {ROLLOUT}.replicas=… to say how many engines there are"
        )
    check_sharing(settings, settings.trainer.device)


def check_sharing(settings: TrainSettings, device: str | None) -> None:
    """Raise :class:`ConfigError` for engines that cannot share the trainer's GPUs; `device` is cpu, cuda or unknown."""
    rollout, processes = settings.actor_rollout_ref.rollout, settings.trainer.processes
    each = rollout.gpus_per_replica
    if device != "cuda" or not rollout.colocate:
        return
    if settings.replicas * each > processes:
        raise ConfigError(
            f"{ROLLOUT}.replicas={settings.replicas} × {ROLLOUT}.gpus_per_replica={each} is more than the {processes} "
            f"GPUs that the trainer shares with them; write {ROLLOUT}.replicas={processes // each or 1}, or "
            f"{ROLLOUT}.colocate=false for GPUs of their own"
        )
    if each > 1:
        raise ConfigError(
            f"{ROLLOUT}.gpus_per_replica={each}: an engine that shares the trainer's GPUs runs on one of them; "
            f"write {ROLLOUT}.colocate=false for GPUs of their own"
        )


def _check_validation(settings: TrainSettings) -> None:
    try:
        rollout = settings.actor_rollout_ref.rollout.for_validation()
    except ConfigError as error:
        raise ConfigError(f"with {ROLLOUT}.val_kwargs: {error}") from error
    steps = rollout.pipeline.num_inference_steps or 0
    if settings.data.val_files is not None and (end := window_range(rollout.algo, steps)[1]) > steps:
        raise ConfigError(
            f"{ROLLOUT}.val_kwargs.num_inference_steps={steps} is less than the {end} steps that {ALGO}'s windows "
            f"reach; write {ROLLOUT}.val_kwargs.num_inference_steps={end} or more"
        )
    if settings.trainer.test_freq > 0 and settings.data.val_files is None:
        raise ConfigError(
            f"trainer.test_freq={settings.trainer.test_freq} has nothing to validate with; "
            "write data.val_files=… or trainer.test_freq=-1"
        )
