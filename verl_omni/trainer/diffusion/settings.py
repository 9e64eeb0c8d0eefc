"""The configuration of a training run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from verl_omni.trainer.diffusion.checks import check_settings, settings_notes
from verl_omni.workers.config import (
    ConfigError,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
    FSDPDiffusionActorConfig,
    RefConfig,
    build,
)
from verl_omni.workers.config.base import as_mapping, choice, flag, integer, number, path, paths, text, texts
from verl_omni.workers.config.reward import RewardConfig

logger = logging.getLogger(__name__)

LOGGERS = ("console", "tensorboard", "wandb")
DEVICES = ("cpu", "cuda")
SCHEDULES = ("fixed", "moving")


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """``algorithm.rollout_correction``: whose log-probs the old ones are."""

    KEY: ClassVar[str] = "algorithm.rollout_correction"

    bypass_mode: bool = False
    """Take the log-probs that the rollout recorded as the old ones; false: the trainer computes them once more."""

    def __post_init__(self) -> None:
        self.bypass_mode = flag(f"{self.KEY}.bypass_mode", self.bypass_mode)


@dataclass(kw_only=True)
class SDEWindowScheduleConfig:
    """``algorithm.sde_window_schedule``: MixGRPO's moving window (arXiv 2507.21802)."""

    KEY: ClassVar[str] = "algorithm.sde_window_schedule"

    type: str = "fixed"
    """fixed: each sample draws its window from ``rollout.algo.sde_window_range``; moving: all have the same window,
    which moves through that range from the early steps to the late ones and stays there."""
    interval: int = 25
    """Training steps between two moves."""
    stride: int = 1
    """Denoising steps of one move."""

    def __post_init__(self) -> None:
        self.type = choice(f"{self.KEY}.type", self.type, SCHEDULES)
        self.interval = integer(f"{self.KEY}.interval", self.interval, low=1)
        self.stride = integer(f"{self.KEY}.stride", self.stride, low=1)


@dataclass(kw_only=True)
class AlgorithmConfig:
    """``algorithm``: advantages, old log-probs, the window of stochastic steps."""

    KEY: ClassVar[str] = "algorithm"

    adv_estimator: str = "flow_grpo"
    """Name under which the advantage estimator is registered."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages by the standard deviation of the rewards."""
    global_std: bool = True
    """That deviation is the whole batch's; false: each group's own."""
    epsilon: float = 1e-4
    """Added to the deviation."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Whose log-probs the old policy's are."""
    sde_window_schedule: SDEWindowScheduleConfig = field(default_factory=SDEWindowScheduleConfig)
    """Where the stochastic steps lie as training goes on."""
    allow_mixed_policy_versions: bool = False
    """Accept a batch of samples that were made by different versions of the policy; false: that is an error."""

    def __post_init__(self) -> None:
        self.adv_estimator = text("algorithm.adv_estimator", self.adv_estimator)
        for name in ("norm_adv_by_std_in_grpo", "global_std", "allow_mixed_policy_versions"):
            setattr(self, name, flag(f"algorithm.{name}", getattr(self, name)))
        self.epsilon = number("algorithm.epsilon", self.epsilon, above=0)


@dataclass(kw_only=True)
class TrainDataConfig:
    """``data``: the prompts."""

    KEY: ClassVar[str] = "data"

    train_files: list[str]
    """Prompt files, ``.txt``, ``.jsonl`` or ``.parquet``; a single one may be given without a list."""
    val_files: list[str] | None = None
    """The same for validation; null: none."""
    train_batch_size: int = 32
    """Prompts in a training step; each is sampled ``rollout.n`` times."""
    train_max_samples: int | None = None
    """Prompts at most, from the start; null or -1: all."""
    val_max_samples: int | None = None
    """The same for validation."""
    shuffle: bool = True
    """Go through the training prompts in another order each epoch."""
    seed: int = 42
    """Of that order."""
    negative_prompt: str | None = None
    """Negative prompt of rows that give none; null: none."""

    def __post_init__(self) -> None:
        self.train_files = paths("data.train_files", self.train_files)
        self.val_files = paths("data.val_files", self.val_files, null="no validation")
        self.train_batch_size = integer("data.train_batch_size", self.train_batch_size, low=1)
        for name in ("train_max_samples", "val_max_samples"):
            value = None if str(getattr(self, name)) == "-1" else getattr(self, name)
            setattr(self, name, integer(f"data.{name}", value, low=1, null="all"))
        self.shuffle = flag("data.shuffle", self.shuffle)
        self.seed = integer("data.seed", self.seed, low=0)
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise ConfigError(f"data.negative_prompt={self.negative_prompt!r} must be a text, or null for none")


@dataclass(kw_only=True)
class TrainerConfig:
    """``trainer``: the run."""

    KEY: ClassVar[str] = "trainer"

    total_epochs: int = 1
    """Times that the training prompts are gone through."""
    total_training_steps: int | None = None
    """Stop after this many steps, or go on for as many; null: as `total_epochs` says."""
    nnodes: int = 1
    """Machines of the Ray cluster that train."""
    n_gpus_per_node: int = 1
    """Training processes a machine, one a GPU; on the CPU too."""
    device: str | None = None
    """cpu or cuda; null: cuda if there is one."""
    project_name: str = "verl_omni"
    """Under which W&B files the run."""
    experiment_name: str = "flow_grpo"
    """Name of the run."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Where metrics go besides ``metrics.jsonl``: console, tensorboard, wandb."""
    default_local_dir: str = "outputs/train"
    """Folder for checkpoints, metrics and the report; made if missing."""
    save_freq: int = -1
    """Steps between checkpoints; -1: only after the last step."""
    test_freq: int = -1
    """Steps between validations; -1: none in between."""
    val_before_train: bool = True
    """Validate before the first step, if there are validation prompts."""
    resume_mode: str = "auto"
    """auto: go on from the last checkpoint in `default_local_dir`, if there is one; disable: start anew; or the folder
    of a checkpoint to go on from."""
    max_actor_ckpt_to_keep: int | None = None
    """Checkpoints at most, the oldest are removed; null: all are kept."""
    val_grid_max_images: int = 16
    """Images in a validation grid at most; 0: no grid."""
    seed: int = 42
    """Of the new LoRA's weights and of whatever else the trainer draws."""
    ray_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``ray.init``, such as address or num_cpus."""

    def __post_init__(self) -> None:
        for name in ("total_epochs", "nnodes", "n_gpus_per_node"):
            setattr(self, name, integer(f"trainer.{name}", getattr(self, name), low=1))
        self.total_training_steps = integer(
            "trainer.total_training_steps", self.total_training_steps, low=1, null="what total_epochs says"
        )
        self.device = choice("trainer.device", self.device, DEVICES, null="cuda if there is one")
        for name in ("project_name", "experiment_name"):
            setattr(self, name, text(f"trainer.{name}", getattr(self, name)))
        for name in ("default_local_dir", "resume_mode"):
            setattr(self, name, path(f"trainer.{name}", getattr(self, name)))
        names = texts("trainer.logger", self.logger, what="logger")
        self.logger = [choice("trainer.logger", name, LOGGERS) for name in names]
        for name in ("save_freq", "test_freq"):
            value = getattr(self, name)
            setattr(self, name, -1 if str(value) == "-1" else integer(f"trainer.{name}", value, low=1))
        self.val_before_train = flag("trainer.val_before_train", self.val_before_train)
        self.max_actor_ckpt_to_keep = integer(
            "trainer.max_actor_ckpt_to_keep", self.max_actor_ckpt_to_keep, low=1, null="all"
        )
        self.val_grid_max_images = integer("trainer.val_grid_max_images", self.val_grid_max_images, low=0)
        self.seed = integer("trainer.seed", self.seed, low=0)
        self.ray_kwargs = as_mapping("trainer.ray_kwargs", self.ray_kwargs)

    @property
    def processes(self) -> int:
        """Training processes in all."""
        return self.nnodes * self.n_gpus_per_node


@dataclass(kw_only=True)
class ActorRolloutRefConfig:
    """``actor_rollout_ref``."""

    model: DiffusionModelConfig
    """Which model, and what of it is trained."""
    actor: FSDPDiffusionActorConfig = field(default_factory=FSDPDiffusionActorConfig)
    """How it is trained."""
    rollout: DiffusionRolloutConfig = field(default_factory=DiffusionRolloutConfig)
    """How it is rolled out."""
    ref: RefConfig = field(default_factory=RefConfig)
    """What the KL term compares with."""


@dataclass(kw_only=True)
class TrainSettings:
    """All keys of ``diffusion_trainer.yaml``."""

    actor_rollout_ref: ActorRolloutRefConfig
    """Model, training, rollout, reference."""
    data: TrainDataConfig
    """Prompts."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages, log-probs, windows."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How images are scored."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""

    def __post_init__(self) -> None:
        check_settings(self)
        ours = self.actor_rollout_ref
        if ours.rollout.log_prob_micro_batch_size_per_gpu is None:
            micro = ours.actor.ppo_micro_batch_size_per_gpu
            rollout = replace(ours.rollout, log_prob_micro_batch_size_per_gpu=micro)
            self.actor_rollout_ref = replace(ours, rollout=rollout)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> TrainSettings:
        """Build and check everything that does not depend on prompts or the model; logs what has no effect.

        Raises :class:`ConfigError`.
        """
        settings = build(cls, mapping, "")
        for note in settings_notes(settings):
            logger.warning(note)
        return settings

    @property
    def mini_batch_size(self) -> int:
        """Prompts in an optimizer step."""
        return self.actor_rollout_ref.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def mini_batches(self) -> int:
        """Optimizer steps of one pass through a batch."""
        return self.data.train_batch_size // self.mini_batch_size

    @property
    def replicas(self) -> int:
        """Rollout engines."""
        rollout = self.actor_rollout_ref.rollout
        return rollout.replicas or self.trainer.processes // rollout.gpus_per_replica

    @property
    def processes_per_device(self) -> int:
        """On each device of the trainer: a training process, and its share of the rollout engines."""
        if not self.actor_rollout_ref.rollout.colocate:
            return 1
        return 1 + math.ceil(self.replicas / self.trainer.processes)
