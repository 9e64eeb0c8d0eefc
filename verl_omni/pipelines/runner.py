"""The engine's runner for rollouts: new requests are prepared while the device computes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.diffusion.worker.utils import RunnerOutput, StepRequestState

from verl_omni.pipelines.model_base import VllmOmniPipelineBase


class RolloutModelRunner(DiffusionModelRunner):
    """The stock runner, but for one thing.

    The stock one asks all devices, after each new request, whether one of them failed to prepare it, and the answer
    waits for all that they compute (vllm_omni/diffusion/worker/diffusion_model_runner.py, ``_dit_any_rank_failed``).
    Where a rollout adapter runs on one device there is nobody to ask.
    """

    def _prepare_batch_inputs(
        self, states: list[StepRequestState], new_request_ids: list[str]
    ) -> tuple[list[StepRequestState], Any, list[RunnerOutput]]:
        if self.od_config.parallel_config.world_size > 1 or not isinstance(self.pipeline, VllmOmniPipelineBase):
            prepared: tuple[list[StepRequestState], Any, list[RunnerOutput]] = super()._prepare_batch_inputs(
                states, new_request_ids
            )
            return prepared
        failed = self._prepare(states, set(new_request_ids))
        ready = [state for state in states if state.request_id not in failed]
        ready, batch, _ = super()._prepare_batch_inputs(ready, [])
        return ready, batch, list(failed.values())

    def _prepare(self, states: Iterable[StepRequestState], new: Collection[str]) -> dict[str, RunnerOutput]:
        """Prepare those of `states` that are `new`; the outputs of those that failed, by id."""
        failed = {}
        for state in states:
            if state.request_id in new:
                try:
                    self._initialize_generator(state.sampling)
                    self.pipeline.prepare_encode(state)
                except Exception as error:
                    self.state_cache.pop(state.request_id, None)
                    failed[state.request_id] = RunnerOutput(
                        request_id=state.request_id, finished=True, result=DiffusionOutput.from_exception(error)
                    )
        return failed
