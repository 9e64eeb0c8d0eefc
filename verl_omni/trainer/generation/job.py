"""A generation run: everything checked first, then the engine started, everything generated, everything written."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.trainer.generation.outputs import Results, RunReport, check_output_dir, write_outputs
from verl_omni.trainer.generation.prompts import read_prompts
from verl_omni.trainer.generation.requests import make_requests
from verl_omni.trainer.generation.settings import GenerationSettings
from verl_omni.utils.console import own_stderr
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig, DiffusionSamplingConfig
from verl_omni.workers.config.rollout import check_engine_keys
from verl_omni.workers.rollout.engine_keys import check_engine_values, engine_keys
from verl_omni.workers.rollout.plan import AdapterCapabilities, RolloutPlan, resolve_plan
from verl_omni.workers.rollout.profile import ProfileKey, RolloutProfile
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

if TYPE_CHECKING:
    from verl_omni.workers.rollout.engine import RolloutEngine

logger = logging.getLogger(__name__)

_CAN_ALL = AdapterCapabilities(name="any adapter", request_batch=True, missing_step_methods=())


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """A checked run; no model is loaded yet."""

    settings: GenerationSettings
    """The configuration."""
    requests: list[RolloutRequest]
    """All of them, in order."""
    plan: RolloutPlan
    """How the engine starts."""
    adapter: str
    """Import path of the adapter class."""

    @classmethod
    def prepare(cls, mapping: Mapping[str, Any]) -> GenerationJob:
        """Check the configuration and whatever it names, what is cheap first. Raises :class:`ConfigError`."""
        settings = GenerationSettings.from_mapping(mapping)
        model, rollout = settings.actor_rollout_ref.model, settings.actor_rollout_ref.rollout
        rows = read_prompts(settings.data.val_files, settings.data.max_samples)
        requests = make_requests(rows, rollout, negative_prompt=settings.data.negative_prompt)
        check_output_dir(settings.generation)
        check_engine_keys(rollout.engine_options(), engine_keys())
        profile = RolloutProfile.load(rollout.profile) if rollout.profile is not None else None
        resolve_plan(rollout, _CAN_ALL)  # contradictions show without the adapter, which takes seconds to import
        architecture = model.resolve_architecture()
        if rollout.external_lib is not None:
            import_external_lib(rollout.external_lib)
        adapter, path = _adapter(architecture, model.algorithm)
        check_engine_values(rollout.engine_options())
        key = None
        if profile is not None:
            cfg = any(_is_guided(request, adapter) for request in requests)
            key = ProfileKey.of(rollout, model=model.path, device=device_name(), cfg=cfg)
        plan = resolve_plan(rollout, AdapterCapabilities.of(adapter), profile, key=key)
        for note in _sampling_notes(rollout, requests, adapter):
            logger.warning(note)
        return cls(settings=settings, requests=requests, plan=plan, adapter=path)

    async def run(self) -> bool:
        """Generate and write everything; whether all requests succeeded.

        Raises :class:`ConfigError` if the LoRA does not fit the model, and what the engine raises at its start.
        """
        from tqdm import tqdm

        from verl_omni.workers.rollout.engine import RolloutEngine

        model, rollout = self.settings.actor_rollout_ref.model, self.settings.actor_rollout_ref.rollout
        options = rollout.engine_options()
        engine = await RolloutEngine.start(
            model_path=model.path,
            plan=self.plan,
            adapter=self.adapter,
            dtype=rollout.dtype,
            executor=options.pop("distributed_executor_backend", None),
            engine_kwargs=options,
        )
        results: dict[str, RolloutSample | RolloutError] = {}
        async with engine:
            if model.lora_path is not None:
                await _load_lora(engine, model.lora_path, model.lora_scale)
            with tqdm(total=len(self.requests), desc="rollout", unit="request", file=own_stderr()) as progress:
                start = time.perf_counter()
                try:
                    async for result in engine.generate_all(self.requests):
                        results[str(result.request_id)] = result
                        progress.update()
                except asyncio.CancelledError:  # Ctrl-C: what is finished is written all the same
                    logger.error("interrupted: %d of %d requests are finished", len(results), len(self.requests))
                seconds = time.perf_counter() - start
            stats = await _stats(engine)
        ordered = [
            (request, results.get(request.request_id) or RolloutError(request.request_id, "interrupted"))
            for request in self.requests
        ]
        report = RunReport(plan=self.plan, stats=stats, seconds=seconds, peak_memory_mb=_peak_memory_mb(ordered))
        columns = rollout.n if rollout.n > 1 else math.ceil(math.sqrt(len(ordered)))
        write_outputs(self.settings.generation, ordered, report, columns=columns)
        return self._tell(ordered, report)

    def _tell(self, results: Results, report: RunReport) -> bool:
        """Log the outcome; whether it is complete."""
        facts, folder = report.as_dict(results), self.settings.generation.output_dir
        for failure in facts["failed"]:
            logger.error("%s failed: %s", failure["id"], failure["error"])
        logger.info(
            "%d images in %.2f s (%.2f a second), %s, rows in a forward: %s; %d of %d requests failed; written to %s",
            *(facts[key] for key in ("num_images", "gen_s", "images_per_s", "mode", "batch_sizes")),
            *(len(facts["failed"]), len(results), folder),
        )
        return not facts["failed"]


def import_external_lib(name: str) -> None:
    """Import a module, by name or by the path of its .py file, so that it registers its adapters.

    A file's folder is added to the module search path of this process and of those it starts, as the engine imports the
    adapter by its module's name. Raises :class:`ConfigError` if the import fails.
    """
    key = f"{DiffusionRolloutConfig.KEY}.external_lib={name!r}"
    path = Path(name).expanduser().resolve()
    is_file = name.endswith(".py") or "/" in name
    if is_file and not (path.is_file() and path.suffix == ".py" and path.stem.isidentifier()):
        raise ConfigError(f"{key}: {path} is no .py file whose name can be imported")
    module_name = path.stem if is_file else name
    if is_file and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(path.parent))))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does at import is the user's code
        raise ConfigError(f"{key} cannot be imported: {type(error).__name__}: {error}") from error
    found = Path(getattr(module, "__file__", None) or "").resolve()
    if is_file and found != path:
        raise ConfigError(f"{key}: the module name {module_name} already means {found}; rename the file")


def _adapter(architecture: str, algorithm: str) -> tuple[type, str]:
    """The adapter class and its import path."""
    from verl_omni.pipelines.model_base import VllmOmniPipelineBase

    try:
        adapter = VllmOmniPipelineBase.get_class(architecture, algorithm)
        return adapter, VllmOmniPipelineBase.get_pipeline_path(architecture, algorithm)
    except ValueError as error:
        raise ConfigError(f"actor_rollout_ref.model: {error}") from error


def device_name() -> str:
    """The device as profiles name it: by its driver's name, "cpu" without one."""
    from vllm_omni.platforms import current_omni_platform

    cuda = current_omni_platform.is_cuda_alike()
    return current_omni_platform.get_device_name() if cuda else str(current_omni_platform.device_type)


def _is_guided(request: RolloutRequest, adapter: type) -> bool:
    """Whether the adapter runs guidance for `request`: by the scale that it reads, or its own where that is null."""
    scale = getattr(request, getattr(adapter, "cfg_key", ""), None)
    if scale is None:
        scale = getattr(adapter, "default_cfg_scale", 1.0)
    return isinstance(scale, (int, float)) and scale > 1 and _has_negative(request)


def _has_negative(request: RolloutRequest) -> bool:
    return request.negative_prompt is not None or request.negative_prompt_token_ids is not None


def _sampling_notes(rollout: DiffusionRolloutConfig, requests: list[RolloutRequest], adapter: type) -> Iterator[str]:
    """What is configured without effect."""
    from verl_omni.pipelines.model_base import VllmOmniPipelineBase

    if rollout.val_kwargs != DiffusionSamplingConfig():
        yield "rollout.val_kwargs is for training's validation only; write rollout.n, .seed, .pipeline and .algo"
    cfg_key = getattr(adapter, "cfg_key", None)
    scale = getattr(rollout.pipeline, cfg_key or "", None)
    if scale is not None and scale > 1 and not any(_has_negative(request) for request in requests):
        yield f"{cfg_key}={scale:g} has no effect: no row has a negative prompt; write e.g. data.negative_prompt=' '"
    plain = getattr(adapter, "conditions", None) is VllmOmniPipelineBase.conditions  # no hook that may read the other
    for other in ("true_cfg_scale", "guidance_scale"):
        if plain and other != cfg_key and getattr(rollout.pipeline, other) is not None:
            yield f"rollout.pipeline.{other} has no effect: {adapter.__name__} takes its guidance scale from {cfg_key}"


async def _stats(engine: RolloutEngine) -> RolloutStats:
    """The engine's counters; none if it died, which must not lose the samples that it made before."""
    try:
        return await engine.stats()
    except Exception as error:  # a dead engine raises many kinds
        logger.error("the engine no longer tells what it did: %s", error)
        return RolloutStats()


async def _load_lora(engine: RolloutEngine, path: str, scale: float) -> None:
    """Its files have been checked; whether they fit the model, only the engine knows."""
    try:
        await engine.load_lora(path, scale=scale)
    except (ValueError, RolloutError) as error:
        raise ConfigError(f"actor_rollout_ref.model.lora_path={path!r}: {error}") from error


def _peak_memory_mb(results: Results) -> float:
    """The highest that any sample tells, MiB; 0 if all requests failed."""
    return max((result.peak_memory_mb for _, result in results if isinstance(result, RolloutSample)), default=0.0)
