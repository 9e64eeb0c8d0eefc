"""What runs inside the training processes of a test (see `ranks`): engines on tiny models, random rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_omni.pipelines.training import DiffusionModelBase, StepKnobs
from verl_omni.workers.config import DiffusionModelConfig, FSDPDiffusionActorConfig
from verl_omni.workers.config.actor import DiffusionLossConfig, FSDPConfig, OptimConfig

META = {"height": 64, "width": 64, "num_inference_steps": 6, "noise_level": 0.7, "sde_type": "sde"}
KNOBS = StepKnobs(**META)
FULL = {"model_dtype": "float32", "param_dtype": "float32"}
CLIP, BETA = 1e-3, 0.7


def make_rows(path: Path, rows: int = 4) -> dict[str, Tensor]:
    """Rows that a rollout could have recorded: two steps each, guided but for the first row. Old log-probs are 0."""
    draw = torch.Generator().manual_seed(5)
    qwen = path.name == "qwen_image"
    rules = DiffusionModelBase.get_class("QwenImagePipeline" if qwen else "StableDiffusion3Pipeline")(path)
    timesteps = rules.schedule(6, 16)[0]
    steps = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]]).repeat(rows // 4, 1)
    lengths = torch.tensor([5, 5, 5, 5]).repeat(rows // 4)
    batch = {
        "all_latents": torch.randn(rows, 3, *((16, 64) if qwen else (16, 8, 8)), generator=draw),
        "all_timesteps": timesteps[steps],
        "sde_steps": steps,
        "cfg_scale": torch.tensor([1.0, 4.0, 2.0, 1.5]).repeat(rows // 4),
        "advantages": torch.randn(rows, 2, generator=draw),
        "sample_weight": torch.ones(rows),
        "old_log_probs": torch.zeros(rows, 2),
    }
    for side in ("", "negative_"):
        batch[f"{side}prompt_embeds"] = torch.randn(rows, 7, 64, generator=draw)
        batch[f"{side}prompt_embeds_mask"] = torch.arange(7) < lengths[:, None]
        batch[f"{side}pooled_prompt_embeds"] = torch.randn(rows, 64, generator=draw)
    return batch


def actor_config(*, micro: int = 2, kl: bool = True, epochs: int = 1, fsdp: Any = None, **optim: Any) -> Any:
    return FSDPDiffusionActorConfig(
        ppo_micro_batch_size_per_gpu=micro,
        ppo_epochs=epochs,
        use_kl_loss=kl,
        kl_loss_coef=BETA,
        diffusion_loss=DiffusionLossConfig(clip_ratio=CLIP),
        optim=OptimConfig(**{"lr": 1e-2, "clip_grad": 1e9} | optim),
        fsdp_config=FSDPConfig(**FULL | (fsdp or {})),
    )


def make_engine(path: Path, actor: Any = None, *, seed: int = 3, steps: int = 4, **model: Any) -> Any:
    """An engine that remembers, on rank 0, the gradients of its last optimizer step by the names of its policy."""
    from verl_omni.workers.engine.fsdp_diffusion import DiffusionFSDPEngine
    from verl_omni.workers.engine.lora import saved_name

    class Remembering(DiffusionFSDPEngine):
        def optimizer_step(self) -> float:
            found = {name: p.grad.full_tensor() for name, p in self.module.named_parameters() if p.grad is not None}
            self.gradients = {saved_name(name): value.clone() for name, value in found.items()}
            return super().optimizer_step()

    config = DiffusionModelConfig(**{"path": str(path), "lora_rank": 4, "lora_alpha": 8} | model)
    engine = Remembering(model=config, actor=actor or actor_config(), seed=seed, optimizer_steps=steps)
    engine.initialize()
    return engine


def my_part(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows."""
    size = len(rows["sample_weight"]) // dist.get_world_size()
    return {name: value[dist.get_rank() * size :][:size] for name, value in rows.items()}


def update(engine: Any, rows: dict[str, Tensor], size: int | None = None) -> dict[str, float]:
    """`rows` of all ranks, in mini-batches of `size` of them."""
    from verl_omni.workers.engine.policy_update import PolicyUpdate

    size = (size or len(rows["sample_weight"])) // dist.get_world_size()
    run = PolicyUpdate(engine=engine, config=engine._actor).run
    return run(my_part(rows), engine.knobs(META), mini_batch_size=size)


def weights(engine: Any) -> dict[str, Tensor] | None:
    state = engine.policy_state()
    return None if state is None else state[-1]


def moved(path: Path, actor: Any = None, **model: Any) -> tuple[Any, dict[str, Tensor]]:
    """An engine whose policy is no longer the base model, and rows with log-probs near its own as the old ones."""
    from verl_omni.workers.engine.policy_update import recorded_log_probs

    rows = make_rows(path)
    engine = make_engine(path, actor, **model)
    update(engine, rows)
    old = recorded_log_probs(engine, rows, engine.knobs(META), mini_batch_size=4, micro_batch_size=4)
    offsets = torch.tensor([[0.05, -0.05], [-0.04, 5e-4], [-5e-4, 0.03], [2e-4, -0.02]])
    return engine, rows | {"old_log_probs": old + offsets}


# ---- scenarios: each a function that `Ranks.run` calls


def gradients(path: Path, actor: Any, model: dict[str, Any]) -> tuple[Any, ...]:
    """Policy, rows, and of one update on them: metrics, gradients, learning rate."""
    engine, rows = moved(path, actor, **model)
    before = weights(engine)
    metrics = update(engine, rows)
    return before, rows, metrics, engine.gradients


def loaded(path: Path, actor: Any, model: dict[str, Any]) -> tuple[Any, ...]:
    """What happened while a new engine was initialized; its weights and buffers; all log-probs and reference means."""
    from verl_omni.workers.engine.fsdp_diffusion import DiffusionFSDPEngine
    from verl_omni.workers.engine.policy_update import recorded_log_probs

    events: list[str] = []

    def told(cls: type, name: str, event: str) -> Any:
        original = getattr(cls, name)

        def tell(*args: Any) -> Any:
            events.append(event)
            return original(*args)

        return patch.object(cls, name, tell)

    with told(DiffusionModelBase, "load_transformer", "read"), told(DiffusionFSDPEngine, "_build_fsdp_module", "shard"):
        engine = make_engine(path, actor, **model)
    tensors = {}
    for kind, module in {"policy": engine.module, "reference": engine._reference}.items():
        for name, value in chain(module.named_parameters(), module.named_buffers()) if module is not None else ():
            tensors[f"{kind} {name}"] = value.full_tensor() if isinstance(value, DTensor) else value
    rows, knobs = make_rows(path), engine.knobs(META)
    log_probs = recorded_log_probs(engine, rows, knobs, mini_batch_size=4, micro_batch_size=4)
    return (
        events,
        {name: value.detach() for name, value in tensors.items()},
        log_probs,
        engine.reference_mean(rows, 0, knobs),
    )


def update_from_start(
    path: Path,
    rows: dict[str, Tensor],
    actor: Any,
    size: int | None = None,
    calls: int = 1,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, ...]:
    """The trained weights after `calls` updates of a new policy, the metrics, and the last gradients."""
    engine = make_engine(path, actor, **model)
    for _ in range(calls):
        metrics = update(engine, rows, size)
    return weights(engine), metrics, engine.gradients


def one_by_one(path: Path, rows: dict[str, Tensor], actor: Any, size: int, times: int) -> Any:
    """As an update of `times` epochs, but each mini-batch a call of its own."""
    engine = make_engine(path, actor)
    for _ in range(times):
        for start in range(0, len(rows["sample_weight"]), size):
            update(engine, {name: value[start : start + size] for name, value in rows.items()})
    return weights(engine)


def scores(path: Path, model: dict[str, Any]) -> tuple[Any, ...]:
    """Means under policy and reference, and log-probs in micro-batches."""
    from verl_omni.workers.engine.policy_update import recorded_log_probs

    engine, rows = moved(path, None, **model)
    knobs = engine.knobs(META)
    with torch.no_grad():
        policy = engine.score(rows, 1, knobs)
    reference = engine.reference_mean(rows, 1, knobs)
    log_probs = recorded_log_probs(engine, rows, knobs, mini_batch_size=4, micro_batch_size=3)
    return policy.mean, reference, policy.log_prob, log_probs


def save(path: Path, folder: Path, actor: Any) -> tuple[Any, Any]:
    """Weights at the checkpoint, and after one more update."""
    engine = make_engine(path, actor)
    rows = make_rows(path)
    update(engine, rows)
    at = weights(engine)
    engine.save_checkpoint(str(folder))
    kept = None if at is None else {name: value.clone() for name, value in at.items()}
    metrics = update(engine, rows)
    same = at is None or all(torch.equal(at[name], kept[name]) for name in at)
    return same, at, weights(engine), metrics


def resume(path: Path, folder: Path, actor: Any) -> tuple[Any, Any]:
    engine = make_engine(path, replace(actor), seed=99)
    engine.load_checkpoint(str(folder), del_local_after_load=False)
    at = weights(engine)
    metrics = update(engine, make_rows(path))
    return at, weights(engine), metrics


def write_moved_lora(path: Path, folder: Path, inputs: dict[str, Any], model: dict[str, Any]) -> Tensor:
    """Write a LoRA with random weights, on a single rank; the transformer's prediction with it."""
    from verl_omni.workers.engine.lora import write_lora

    engine = make_engine(path, **model)
    draw = torch.Generator().manual_seed(1)
    for name, value in engine.module.named_parameters():
        if "lora_B" in name:
            value.data.to_local().copy_(0.1 * torch.randn(value.shape, generator=draw))
    _, config, tensors = engine.policy_state()
    write_lora(folder, config, tensors)
    with torch.no_grad():
        return engine.module(**inputs, return_dict=False)[0]


def storage(path: Path) -> tuple[Any, ...]:
    """In bfloat16: dtypes of what is stored, the timesteps that arrived, the metrics of two mini-batches."""
    from verl_omni.workers.engine.policy_update import recorded_log_probs

    fsdp = {"model_dtype": "bfloat16", "param_dtype": "bfloat16"}
    engine = make_engine(path, actor_config(fsdp=fsdp, micro=3))
    seen: list[Tensor] = []
    base = engine.module.get_base_model()
    base.time_text_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    rows = make_rows(path, 8)
    rows["old_log_probs"] = recorded_log_probs(engine, rows, engine.knobs(META), mini_batch_size=4, micro_batch_size=3)
    metrics = update(engine, rows, 4)
    dtypes = {name: value.dtype for name, value in engine.module.named_parameters()}
    return dtypes, torch.cat(seen), {value.dtype for value in engine.gradients.values()}, metrics


def refuse(path: Path, model: dict[str, Any]) -> str:
    try:
        make_engine(path, **model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_lora_without_one(path: Path, folder: Path) -> str:
    """What a worker that trains all weights says to it."""
    from verl_omni.workers.actor import ActorWorkerConfig, DiffusionActorWorker

    config = ActorWorkerConfig(
        model=DiffusionModelConfig(path=str(path), lora_rank=0),
        actor=actor_config(kl=False),
        log_prob_micro_batch_size=2,
        optimizer_steps=4,
    )
    worker = DiffusionActorWorker(config)
    worker.init_model()
    try:
        worker.save_lora(str(folder))
    except ValueError as error:
        return str(error)
    return ""
