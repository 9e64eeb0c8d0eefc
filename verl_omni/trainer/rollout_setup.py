"""What every run settles about its rollouts before an engine starts: which adapter, which plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_omni.utils.imports import without_collecting
from verl_omni.workers.config import ConfigError, DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.workers.config.lora import read_lora_config
from verl_omni.workers.config.rollout import check_engine_keys
from verl_omni.workers.rollout.engine_keys import check_engine_values, engine_keys
from verl_omni.workers.rollout.external_lib import import_external_lib
from verl_omni.workers.rollout.plan import AdapterCapabilities, RolloutPlan, resolve_plan
from verl_omni.workers.rollout.profile import ProfileKey, load_profiles, nearest_profile
from verl_omni.workers.rollout.request import RolloutRequest

logger = logging.getLogger(__name__)

_CAN_ALL = AdapterCapabilities(name="any adapter", request_batch=True, missing_step_methods=())


@dataclass(frozen=True, kw_only=True)
class RolloutSetup:
    """A rollout that can start; no model is loaded yet."""

    architecture: str
    """``_class_name`` of the checkpoint, or what the configuration says instead."""
    adapter: type
    """The adapter class."""
    adapter_path: str
    """Its import path."""
    plan: RolloutPlan
    """How the engine starts."""


def resolve_rollout(
    model: DiffusionModelConfig,
    rollout: DiffusionRolloutConfig,
    requests: Sequence[RolloutRequest],
    *,
    trained_lora_rank: int | None = None,
) -> RolloutSetup:
    """Check what the rollout needs, what is cheap first, and choose its mode. Logs what is configured without effect.

    `requests` are those of the run, or some that stand for them. `trained_lora_rank` is that of the LoRA that the run
    trains, 0 if it trains all weights; None: it trains nothing, and rolls out with ``model.lora_path``.

    Raises :class:`ConfigError`.
    """
    check_engine_keys(rollout.engine_options(), engine_keys())
    profiles = load_profiles(rollout.profile) if rollout.profile is not None else []
    resolve_plan(rollout, _CAN_ALL)  # contradictions show without the adapter, which takes seconds to import
    architecture = model.resolve_architecture()
    if rollout.external_lib is not None:
        import_external_lib(rollout.external_lib)
    adapter, path = _adapter(architecture, model.algorithm)
    check_engine_values(rollout.engine_options())
    key = profile = memory_gib = None
    if profiles:
        cfg = any(is_guided(request, adapter) for request in requests)
        rank = _lora_rank(model) if trained_lora_rank is None else trained_lora_rank
        key = ProfileKey.of(rollout, model=model.path, device=device_name(), cfg=cfg, lora_rank=rank)
        profile, memory_gib = nearest_profile(profiles, key), device_memory_gib()
    plan = resolve_plan(rollout, AdapterCapabilities.of(adapter), profile, key=key, memory_gib=memory_gib)
    for note in _guidance_notes(rollout, requests, adapter):
        logger.warning(note)
    return RolloutSetup(architecture=architecture, adapter=adapter, adapter_path=path, plan=plan)


def _adapter(architecture: str, algorithm: str) -> tuple[type, str]:
    """The adapter class and its import path."""
    try:
        with without_collecting():
            from verl_omni.pipelines.model_base import VllmOmniPipelineBase

            adapter = VllmOmniPipelineBase.get_class(architecture, algorithm)
        return adapter, VllmOmniPipelineBase.get_pipeline_path(architecture, algorithm)
    except ValueError as error:
        raise ConfigError(f"actor_rollout_ref.model: {error}") from error


def device_name() -> str:
    """The device as profiles name it: by its driver's name, "cpu" without one."""
    from vllm_omni.platforms import current_omni_platform

    cuda = current_omni_platform.is_cuda_alike()
    return current_omni_platform.get_device_name() if cuda else str(current_omni_platform.device_type)


def device_memory_gib() -> float | None:
    """All memory of the device, in GiB; None without one, where a rollout shares the machine's."""
    from vllm_omni.platforms import current_omni_platform

    if not current_omni_platform.is_cuda_alike():
        return None
    return float(current_omni_platform.get_device_total_memory() / 2**30)


def _lora_rank(model: DiffusionModelConfig) -> int:
    """Of ``model.lora_path``; 0 without one."""
    if model.lora_path is None:
        return 0
    return int(read_lora_config(Path(model.lora_path))["r"])


def is_guided(request: RolloutRequest, adapter: type) -> bool:
    """Whether the adapter runs guidance for `request`: by the scale that it reads, or its own where that is null."""
    scale = getattr(request, getattr(adapter, "cfg_key", ""), None)
    if scale is None:
        scale = getattr(adapter, "default_cfg_scale", 1.0)
    return isinstance(scale, (int, float)) and scale > 1 and _has_negative(request)


def _has_negative(request: RolloutRequest) -> bool:
    return request.negative_prompt is not None or request.negative_prompt_token_ids is not None


def _guidance_notes(
    rollout: DiffusionRolloutConfig, requests: Sequence[RolloutRequest], adapter: type
) -> Iterator[str]:
    """Guidance that is configured without effect."""
    from verl_omni.pipelines.model_base import VllmOmniPipelineBase

    cfg_key = getattr(adapter, "cfg_key", None)
    scale = getattr(rollout.pipeline, cfg_key or "", None)
    if scale is not None and scale > 1 and not any(_has_negative(request) for request in requests):
        yield f"{cfg_key}={scale:g} has no effect: no row has a negative prompt; write e.g. data.negative_prompt=' '"
    plain = getattr(adapter, "conditions", None) is VllmOmniPipelineBase.conditions  # no hook that may read the other
    for other in ("true_cfg_scale", "guidance_scale"):
        if plain and other != cfg_key and getattr(rollout.pipeline, other) is not None:
            yield f"rollout.pipeline.{other} has no effect: {adapter.__name__} takes its guidance scale from {cfg_key}"
