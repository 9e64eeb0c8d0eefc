"""A real engine around one adapter, in this process, with its insides in reach: for tests and the conformance suite."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_omni.pipelines.model_base import VllmOmniPipelineBase
from verl_omni.pipelines.rescore import step_log_probs
from verl_omni.pipelines.rows import rollout_of
from verl_omni.workers.rollout.launch import ENGINE_BACKEND, WORKER_EXTENSION
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

CAP = 16
"""Requests that share a batch in the batched modes."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request and when it comes."""

    request: RolloutRequest
    after: int = 0
    """It is submitted once the adapter has taken this many denoising steps."""


class AdapterEngine:
    """One live engine; ``with AdapterEngine(...) as engine``. Only one may live in a process at a time."""

    def __init__(
        self,
        adapter: type[VllmOmniPipelineBase],
        model: str | Path,
        mode: RolloutMode,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is bfloat16 on an accelerator and float32 on a CPU if not given."""
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

        default = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        config = OmniDiffusionConfig.from_kwargs(
            model=str(model),
            dtype=dtype or default,
            num_gpus=1,
            enforce_eager=True,
            distributed_executor_backend="uni",
            step_execution=mode is RolloutMode.STEP_WISE,
            max_num_seqs=1 if mode is RolloutMode.SERIAL else CAP,
            engine_backend=ENGINE_BACKEND,
            worker_extension_cls=WORKER_EXTENSION,
            custom_pipeline_args={"pipeline_class": f"{adapter.__module__}.{adapter.__qualname__}"},
        )
        config.enrich_config()
        self.mode = mode
        self._engine: Any = DiffusionEngine.make_engine(config)
        self._loop = asyncio.new_event_loop()
        self._submitted = itertools.count()
        self._in_flight = 0
        self.pipeline.read_stats(reset=True)

    def __enter__(self) -> AdapterEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.close()
        self._loop.close()

    @property
    def pipeline(self) -> Any:
        """The adapter instance."""
        return self.worker.model_runner.pipeline

    @property
    def worker(self) -> Any:
        """The engine's worker, which runs in this process."""
        return self._engine.executor.driver_worker.worker

    def run(self, *requests: RolloutRequest | Arrival) -> list[Any]:
        """Submit together what has no `after`, the rest as their time comes; an output or an exception a request."""
        arrivals = [r if isinstance(r, Arrival) else Arrival(request=r) for r in requests]
        return self._loop.run_until_complete(self._run(arrivals))

    async def _run(self, arrivals: Sequence[Arrival]) -> list[Any]:
        first = sum(arrival.after == 0 for arrival in arrivals)
        burst = (f"burst-{next(self._submitted)}", first)
        self._in_flight = first
        start = self._steps()
        return await asyncio.gather(*(self._one(a, burst if a.after == 0 else None, start) for a in arrivals))

    async def _one(self, arrival: Arrival, burst: tuple[str, int] | None, start: int) -> Any:
        # Where nothing is left in flight, the steps that it waits for never come.
        while self._steps() - start < arrival.after and self._in_flight:
            await asyncio.sleep(0)
        self._in_flight += burst is None
        try:
            stream = self._engine.step_streaming(self.request(arrival.request, rollout_burst=burst))
            return [outputs async for outputs in stream][-1][0]
        except Exception as error:
            return error
        finally:
            self._in_flight -= 1

    def request(self, request: RolloutRequest, **extra_args: Any) -> Any:
        """The engine's own request."""
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        prompt, sampling = request.to_engine()
        sampling["extra_args"] = {**sampling["extra_args"], **extra_args}
        return OmniDiffusionRequest(
            prompt=prompt,
            sampling_params=OmniDiffusionSamplingParams(**sampling),
            # The engine mistakes a request for a finished one whose id it reuses at once.
            request_id=f"{request.request_id}#{next(self._submitted)}",
        )

    def _steps(self) -> int:
        return sum(self.pipeline.stats.batch_sizes.values())

    def recompute_log_probs(self, request: RolloutRequest, latents: Tensor) -> Tensor:
        """Log-probs [n, W] of a recorded trajectory [n, W+1, ...]: the transformer runs again at each latent."""
        from vllm_omni.diffusion.worker.utils import StepRequestState

        asked = self.request(request)
        state = StepRequestState(request_id=asked.request_id, prompt=asked.prompt, sampling=asked.sampling_params)
        return self.call(lambda: self._log_probs(state, latents))

    def call(self, function: Callable[[], Any]) -> Any:
        """Call something of the pipeline as the engine calls it; nothing may be in flight."""
        from vllm_omni.diffusion.forward_context import set_forward_context

        runner = self.worker.model_runner
        context = set_forward_context(vllm_config=runner.vllm_config, omni_diffusion_config=runner.od_config)
        with torch.inference_mode(), context:
            return function()

    def _log_probs(self, state: Any, latents: Tensor) -> Tensor:
        log_probs = []
        self.pipeline.prepare_encode(state)
        for i, row in enumerate(rollout_of(state).rows):
            recorded = [step for step, drawn in enumerate(row.stochastic) if drawn]
            for k, step in enumerate(recorded):
                state.step_index = step
                log_probs.append(step_log_probs(self.pipeline, [state], latents[:, k], latents[:, k + 1])[i])
        return torch.stack(log_probs).view(latents.shape[0], -1).cpu()
