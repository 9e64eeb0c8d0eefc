"""How the policy is trained: loss, optimizer, sharding, and the reference that a KL term compares with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_omni.workers.config.base import ConfigError, choice, flag, integer, number, text
from verl_omni.workers.config.rollout import DTYPES

STRATEGIES = ("fsdp2",)
OPTIMIZERS = ("AdamW", "Adam")
LR_SCHEDULES = ("constant", "cosine")
TRAIN_DTYPES = ("bfloat16", "float32")
"""float16 is not among them: it would need a loss scaler."""


@dataclass(kw_only=True)
class DiffusionLossConfig:
    """``actor.diffusion_loss``: the policy loss."""

    KEY: ClassVar[str] = "actor_rollout_ref.actor.diffusion_loss"

    loss_mode: str = "flow_grpo"
    """Name under which the policy loss is registered."""
    clip_ratio: float = 1e-4
    """c: the ratio of new to old probability counts within 1 ± c. Usual are 1e-5 … 1e-3."""

    def __post_init__(self) -> None:
        self.loss_mode = text(f"{self.KEY}.loss_mode", self.loss_mode)
        self.clip_ratio = number(f"{self.KEY}.clip_ratio", self.clip_ratio, above=0, high=1)


@dataclass(kw_only=True)
class OptimConfig:
    """``actor.optim``: the optimizer and its learning rate."""

    KEY: ClassVar[str] = "actor_rollout_ref.actor.optim"

    optimizer: str = "AdamW"
    """Class of torch.optim: AdamW or Adam."""
    lr: float = 1e-4
    """Learning rate after the warm-up; 0 leaves the policy as it is."""
    weight_decay: float = 1e-4
    """Decay of the trained weights."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the averages of the gradient and of its square."""
    clip_grad: float = 1.0
    """Norm to which the gradient is scaled down if it is longer."""
    lr_scheduler_type: str = "constant"
    """constant, or cosine: down to `min_lr_ratio` at the last step."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = 0.0
    """Where the cosine schedule ends, as a part of `lr`."""

    def __post_init__(self) -> None:
        by_lower = {name.lower(): name for name in OPTIMIZERS}
        optimizer = by_lower.get(str(self.optimizer).lower(), self.optimizer)
        self.optimizer = choice(f"{self.KEY}.optimizer", optimizer, OPTIMIZERS)
        self.lr = number(f"{self.KEY}.lr", self.lr, low=0)
        self.weight_decay = number(f"{self.KEY}.weight_decay", self.weight_decay, low=0)
        self.betas = _betas(f"{self.KEY}.betas", self.betas)
        self.clip_grad = number(f"{self.KEY}.clip_grad", self.clip_grad, above=0)
        self.lr_scheduler_type = choice(f"{self.KEY}.lr_scheduler_type", self.lr_scheduler_type, LR_SCHEDULES)
        self.lr_warmup_steps = integer(f"{self.KEY}.lr_warmup_steps", self.lr_warmup_steps, low=0)
        self.min_lr_ratio = number(f"{self.KEY}.min_lr_ratio", self.min_lr_ratio, low=0, high=1)


@dataclass(kw_only=True)
class FSDPConfig:
    """``actor.fsdp_config``: how the transformer is stored and sharded over the training processes."""

    KEY: ClassVar[str] = "actor_rollout_ref.actor.fsdp_config"

    model_dtype: str = "bfloat16"
    """Storage of the weights that are not trained: bfloat16 or float32. Trained weights are stored in float32."""
    param_dtype: str = "bfloat16"
    """Of the transformer's forward: bfloat16 or float32. Latents, means and log-probs are float32 anyhow."""
    param_offload: bool = False
    """Keep the weights in host memory while the policy is not in use."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory while the policy is not updated."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a block after its forward; false is faster and takes more memory."""
    fsdp_size: int = -1
    """Processes that share one copy of the weights; -1: all."""

    def __post_init__(self) -> None:
        for name in ("model_dtype", "param_dtype"):
            value = getattr(self, name)
            dtype = DTYPES.get(value, value) if isinstance(value, str) else value
            setattr(self, name, choice(f"{self.KEY}.{name}", dtype, TRAIN_DTYPES))
        for name in ("param_offload", "optimizer_offload", "reshard_after_forward"):
            setattr(self, name, flag(f"{self.KEY}.{name}", getattr(self, name)))
        if str(self.fsdp_size) != "-1":
            self.fsdp_size = integer(f"{self.KEY}.fsdp_size", self.fsdp_size, low=1)
        self.fsdp_size = int(self.fsdp_size)


@dataclass(kw_only=True)
class FSDPDiffusionActorConfig:
    """``actor_rollout_ref.actor``: how the policy is trained."""

    KEY: ClassVar[str] = "actor_rollout_ref.actor"

    strategy: str = "fsdp2"
    """How the policy is sharded; there is one way."""
    ppo_mini_batch_size: int | None = None
    """Prompts in an optimizer step, each with all of its samples; null: the whole batch."""
    ppo_micro_batch_size_per_gpu: int = 8
    """Samples in one forward and backward, of one recorded step each."""
    ppo_epochs: int = 1
    """Times that each batch is gone through."""
    use_kl_loss: bool = False
    """Add the KL term to the loss. Its reference is the model that training started from: the LoRA switched off, or
    with ``model.lora_rank=0`` a second copy of the weights, which takes its memory."""
    kl_loss_coef: float = 0.04
    """β: factor of the KL term."""
    diffusion_loss: DiffusionLossConfig = field(default_factory=DiffusionLossConfig)
    """The policy loss."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Storage and sharding."""

    def __post_init__(self) -> None:
        self.strategy = choice(f"{self.KEY}.strategy", self.strategy, STRATEGIES)
        self.ppo_mini_batch_size = integer(
            f"{self.KEY}.ppo_mini_batch_size", self.ppo_mini_batch_size, low=1, null="the whole batch"
        )
        for name in ("ppo_micro_batch_size_per_gpu", "ppo_epochs"):
            setattr(self, name, integer(f"{self.KEY}.{name}", getattr(self, name), low=1))
        self.use_kl_loss = flag(f"{self.KEY}.use_kl_loss", self.use_kl_loss)
        self.kl_loss_coef = number(f"{self.KEY}.kl_loss_coef", self.kl_loss_coef, low=0)


@dataclass(kw_only=True)
class RefConfig:
    """``actor_rollout_ref.ref``: the model that the KL term compares with."""

    KEY: ClassVar[str] = "actor_rollout_ref.ref"

    log_prob_micro_batch_size_per_gpu: int | None = None
    """Known, as scripts set it, but without effect: the reference is computed within the update, in its micro-batches
    of ``actor.ppo_micro_batch_size_per_gpu`` samples. null: the same number."""

    def __post_init__(self) -> None:
        self.log_prob_micro_batch_size_per_gpu = integer(
            f"{self.KEY}.log_prob_micro_batch_size_per_gpu",
            self.log_prob_micro_batch_size_per_gpu,
            low=1,
            null="that of the actor",
        )


def _betas(key: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be two numbers [b1, b2] from 0 to below 1")
    first, second = (number(key, item, low=0, high=1) for item in value)
    if max(first, second) >= 1:
        raise ConfigError(f"{key}=[{first:g}, {second:g}] must be two numbers [b1, b2] from 0 to below 1")
    return first, second
