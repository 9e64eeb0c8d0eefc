"""verl's FSDP engine around a diffusion transformer.

From verl: meshes, optimizer and learning rate, clipping, gradient synchronisation, offloading. From here: how the
transformer is built and sharded, how a recorded step is scored, what a checkpoint and a policy consist of.

Dtypes: frozen weights are stored in ``fsdp_config.model_dtype``, trained ones and gradients in float32; the forward
computes in ``fsdp_config.param_dtype``; latents, means and log-probs are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl.utils.fsdp_utils import (
    apply_fsdp2,
    fsdp2_load_full_state_dict,
    load_fsdp_model_to_gpu,
    offload_fsdp_model_to_cpu,
)
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_omni.pipelines.training import DiffusionModelBase, StepKnobs, StepScore
from verl_omni.workers.config import ConfigError, DiffusionModelConfig, FSDPDiffusionActorConfig
from verl_omni.workers.engine.checkpoint import TrainedStateCheckpoint
from verl_omni.workers.engine.export import write_transformer
from verl_omni.workers.engine.loading import load_on_first_rank
from verl_omni.workers.engine.lora import adapter_config, add_lora, is_lora_weight, lora_off, saved_name

PolicyState = tuple[str, dict[str, Any], dict[str, Tensor]] | tuple[str, dict[str, Tensor]]
"""("lora", what adapter_config.json holds, tensors under PEFT's names), or ("weights", tensors under the checkpoint's
names with ``transformer.`` before them); tensors on the host."""


class DiffusionFSDPEngine(FSDPEngine):
    """One rank of it. Needs an initialised process group; :meth:`initialize` loads the model.

    Methods are called by all ranks at once, with equally many rows.
    """

    def __init__(
        self, *, model: DiffusionModelConfig, actor: FSDPDiffusionActorConfig, seed: int, optimizer_steps: int
    ) -> None:
        """`seed` decides the new LoRA; `optimizer_steps` is where a cosine schedule ends.

        Raises ValueError if no training class is registered for the model.
        """
        trains_lora = model.lora_rank > 0
        fsdp, optim = actor.fsdp_config, actor.optim
        super().__init__(
            # what FSDPEngine reads of a language model's configuration
            model_config=SimpleNamespace(use_remove_padding=False, lora_rank=model.lora_rank),
            engine_config=FSDPEngineConfig(
                strategy=actor.strategy,
                fsdp_size=fsdp.fsdp_size,
                param_offload=fsdp.param_offload,
                optimizer_offload=fsdp.optimizer_offload,
                reshard_after_forward=fsdp.reshard_after_forward,
                # unsharded gradients between micro-batches: small for a LoRA, another copy of the model without
                use_no_sync_for_gradient_accumulation=trains_lora,
                use_torch_compile=False,
            ),
            optimizer_config=FSDPOptimizerConfig(
                optimizer=optim.optimizer,
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                betas=optim.betas,
                clip_grad=optim.clip_grad,
                lr_scheduler_type=optim.lr_scheduler_type,
                lr_warmup_steps=optim.lr_warmup_steps,
                min_lr_ratio=optim.min_lr_ratio,
                total_training_steps=optimizer_steps,
            ),
            checkpoint_config=CheckpointConfig(),
        )
        self._model, self._actor, self._seed = model, actor, seed
        self._rules = DiffusionModelBase.get_class(model.resolve_architecture(), model.algorithm)(model.path)
        self._frozen_dtype: torch.dtype = getattr(torch, fsdp.model_dtype)
        self.param_dtype: torch.dtype = getattr(torch, fsdp.param_dtype)
        self._reference: nn.Module | None = None

    def initialize(self) -> None:
        """Load and shard the transformer, make optimizer and schedule."""
        module = self._build_module()
        if self._is_lora:
            module = self._build_lora_module(module)
        self.module = self._build_fsdp_module(module)
        if self._actor.use_kl_loss and not self._is_lora:  # the policy is in parts now: rank 0 never holds two models
            self._reference = self._build_fsdp_module(self._load(self._frozen_dtype).requires_grad_(False))
        self.optimizer = self._build_optimizer(self.module)
        self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
        self.checkpoint_manager = TrainedStateCheckpoint(self.module, self.optimizer, self.lr_scheduler)
        self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=self._is_offload_param)

    # ---- scores

    def knobs(self, meta: Mapping[str, Any]) -> StepKnobs:
        """What all rows of a batch share, from its ``meta_info``. Raises KeyError naming what it lacks."""
        names = ("height", "width", "num_inference_steps", "noise_level", "sde_type")
        return StepKnobs(**{name: meta[name] for name in names}, dtype=self.param_dtype)

    def score(self, rows: Mapping[str, Tensor], column: int, knobs: StepKnobs) -> StepScore:
        """Score one recorded step of `rows` under the policy; see :meth:`DiffusionModelBase.score_step`."""
        return self._rules.score_step(self.module, rows, column, knobs)

    @torch.no_grad()
    def reference_mean(self, rows: Mapping[str, Tensor], column: int, knobs: StepKnobs) -> Tensor:
        """Mean [b, ...] float32 of the same step under the policy that training started from."""
        with self._reference_module() as module:
            return self._rules.score_step(module, rows, column, knobs).mean

    @contextmanager
    def _reference_module(self) -> Iterator[nn.Module]:
        if self._is_lora:
            with lora_off(self.module):
                yield self.module
        elif self._reference is not None:
            yield self._reference
        else:
            raise RuntimeError("no reference was kept; set actor_rollout_ref.actor.use_kl_loss=true")

    # ---- policy

    @torch.no_grad()
    def policy_state(self) -> PolicyState | None:
        """The policy as it is now, on rank 0; None on the others. Later updates do not change it."""
        tensors: dict[str, Tensor] = {}
        for name, value in self.module.state_dict().items():
            if self._is_lora and not is_lora_weight(name):
                continue
            whole: Any = value.to(get_device_id())
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()  # one by one: the device never holds two of them
            if self.rank == 0:
                # the rollout computes in the dtype in which the policy is trained
                dtype = self.param_dtype if whole.is_floating_point() and not self._is_lora else whole.dtype
                name = saved_name(name) if self._is_lora else f"transformer.{name}"
                tensors[name] = whole.to("cpu", dtype=dtype, copy=True)
        if self.rank != 0:
            return None
        if self._is_lora:
            return "lora", adapter_config(self.module, self._model.path), tensors
        return "weights", tensors

    def save_transformer(self, folder: str) -> None:
        """All weights for diffusers, written by rank 0; see :func:`write_transformer`. Called by all ranks."""
        state = self.policy_state()
        if state is not None:
            write_transformer(folder, self._rules, state[-1])

    # ---- what FSDPEngine leaves to its subclasses

    def _load(self, dtype: torch.dtype) -> Any:
        module: Any = load_on_first_rank(self._rules, dtype)
        if self._model.attn_backend is not None:
            _set_attention(module, self._model.attn_backend)
        return module

    def _build_module(self) -> nn.Module:
        module = self._load(self._frozen_dtype if self._is_lora else torch.float32)
        if self._model.enable_gradient_checkpointing:
            module.enable_gradient_checkpointing()
        return module

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        targets = self._model.target_modules or self._rules.default_target_modules
        try:
            return add_lora(
                module,
                rank=self._model.lora_rank,
                alpha=self._model.lora_alpha,
                target_modules=targets,
                seed=self._seed,
            )
        except ValueError as error:
            raise ConfigError(f"{self._model.KEY}.target_modules={targets!r}: {error}") from error

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Shard each transformer block, and what is left as one. All ranks get the weights and buffers of rank 0."""
        # Inputs are not cast: this would take the timestep to bfloat16, where 889 is 888.
        policy = MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        arguments = {
            "mesh": self.device_mesh,
            "mp_policy": policy,
            "reshard_after_forward": self.engine_config.reshard_after_forward,
        }
        several = dist.get_world_size() > 1
        whole = module.state_dict() if several and self.rank == 0 else {}
        apply_fsdp2(module, arguments, self.engine_config)  # blocks are the classes in the model's _no_split_modules
        if several:
            fsdp2_load_full_state_dict(module, whole)
        return module

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return build_optimizer(trained, self.optimizer_config)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move to the host ("cpu") or back to the device (its name)."""
        super().to(device, model=model, optimizer=optimizer, grad=grad)
        if model and self._reference is not None:
            move = load_fsdp_model_to_gpu if device == get_device_name() else offload_fsdp_model_to_cpu
            move(self._reference)
        if optimizer and device != get_device_name():
            get_torch_device().synchronize()  # the copies run on, and what comes next may read them on the host
            get_torch_device().empty_cache()  # verl does so for the model alone

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """See :class:`TrainedStateCheckpoint`. Weights are saved from where they are.

        verl's would load them onto the device first, and leave them there beside a rollout that has it to itself.
        """
        self.checkpoint_manager.save_checkpoint(local_path)


def _set_attention(module: Any, backend: str) -> None:
    """Raises :class:`ConfigError` if the backend is unknown, not installed, or would not be used."""
    key = f"{DiffusionModelConfig.KEY}.attn_backend={backend!r}"
    processors = getattr(module, "attn_processors", {}).values()
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise ConfigError(f"{key}: {type(module).__name__} has one attention only; write null")
    try:
        module.set_attention_backend(backend)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{key}: {error}") from error
