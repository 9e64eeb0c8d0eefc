"""A generation run: everything checked first, then the engine started, everything generated, everything written."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.trainer.failures import by_reason
from verl_omni.trainer.generation.outputs import Results, RunReport, check_output_dir, write_outputs
from verl_omni.trainer.generation.settings import GenerationSettings
from verl_omni.trainer.prometheus import NoMetrics, served_metrics
from verl_omni.trainer.prompts import read_prompts
from verl_omni.trainer.requests import make_requests
from verl_omni.trainer.rollout_setup import resolve_rollout
from verl_omni.utils.console import own_stderr
from verl_omni.workers.config import ConfigError, DiffusionModelConfig, DiffusionRolloutConfig, DiffusionSamplingConfig
from verl_omni.workers.rollout.plan import RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

if TYPE_CHECKING:
    from verl_omni.workers.rollout.engine import RolloutEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """A checked run; no model is loaded yet."""

    settings: GenerationSettings
    """The configuration."""
    requests: list[RolloutRequest]
    """All of them, in order."""
    sources: dict[str, str]
    """Id of each request → ``file:row`` of its prompt."""
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
        setup = resolve_rollout(model, rollout, requests)
        for note in _notes(model, rollout):
            logger.warning(note)
        sources = {request.request_id: rows[place // rollout.n].source for place, request in enumerate(requests)}
        return cls(settings=settings, requests=requests, sources=sources, plan=setup.plan, adapter=setup.adapter_path)

    async def run(self) -> bool:
        """Generate and write everything; whether all requests succeeded.

        Raises :class:`ConfigError` if the LoRA does not fit the model or cannot be merged into it, or a file cannot be
        written, and what the engine raises at its start.
        """
        with served_metrics(self.settings.actor_rollout_ref.rollout) as metrics:
            return await self._run(metrics)

    async def _run(self, metrics: NoMetrics) -> bool:
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
            merge_lora=rollout.merge_lora,
        )
        results: dict[str, RolloutSample | RolloutError] = {}
        async with engine:
            if model.lora_path is not None:
                await _load_lora(engine, model.lora_path, model.lora_scale)
            with tqdm(total=len(self.requests), desc="rollout", unit="request", file=own_stderr()) as progress:
                start = time.perf_counter()
                try:
                    async for result in metrics.watched(self.requests, engine.generate_all(self.requests)):
                        results[str(result.request_id)] = result
                        progress.update()
                except asyncio.CancelledError:  # Ctrl-C: what is finished is written all the same
                    logger.error("interrupted: %d of %d requests are finished", len(results), len(self.requests))
                seconds = time.perf_counter() - start
            stats = await _stats(engine)
            metrics.observe(stats)
        ordered = [
            (request, results.get(request.request_id) or RolloutError(request.request_id, "interrupted"))
            for request in self.requests
        ]
        report = RunReport(plan=self.plan, stats=stats, seconds=seconds, peak_memory_mb=_peak_memory_mb(ordered))
        columns = rollout.n if rollout.n > 1 else math.ceil(math.sqrt(len(ordered)))
        write_outputs(self.settings.generation, ordered, report, columns=columns)
        return self._tell(ordered, report)

    def _tell(self, results: Results, report: RunReport) -> bool:
        """Log the outcome, failures in a line a reason; whether it is complete."""
        facts, folder = report.as_dict(results), self.settings.generation.output_dir
        failures = {request.request_id: result for request, result in results if isinstance(result, RolloutError)}
        for line in by_reason(failures, self.sources, "requests"):
            logger.error("failed: %s", line)
        logger.info(
            "%d images in %.2f s (%.2f a second), %s, rows in a forward: %s; %d of %d requests failed; written to %s",
            *(facts[key] for key in ("num_images", "gen_s", "images_per_s", "mode", "batch_sizes")),
            *(len(facts["failed"]), len(results), folder),
        )
        return not facts["failed"]


def _notes(model: DiffusionModelConfig, rollout: DiffusionRolloutConfig) -> Iterator[str]:
    """What is configured without effect."""
    if rollout.val_kwargs != DiffusionSamplingConfig():
        yield "rollout.val_kwargs is for training's validation only; write rollout.n, .seed, .pipeline and .algo"
    if rollout.merge_lora and model.lora_path is None:
        yield f"{rollout.KEY}.merge_lora has no effect: {model.KEY}.lora_path names no LoRA"
    for config in (model, rollout):
        for name in config.TRAINING_KEYS:
            if getattr(config, name) != getattr(type(config), name):
                yield f"{config.KEY}.{name} has no effect: it is for training"


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
