"""The engine's runner for rollouts: new requests are prepared while the device computes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.diffusion.worker.utils import (
    RunnerOutput,
    StepRequestState,
    clear_pipeline_stage_durations,
    consume_pipeline_stage_durations,
    merge_stage_durations,
)

from verl_omni.pipelines.model_base import VllmOmniPipelineBase

logger = logging.getLogger(__name__)


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
        failed = self._prepare(state for state in states if state.request_id in new_request_ids)
        ready = [state for state in states if state.request_id not in failed]
        ready, batch, _ = super()._prepare_batch_inputs(ready, [])
        return ready, batch, list(failed.values())

    def _prepare(self, states: Iterable[StepRequestState]) -> dict[str, RunnerOutput]:
        """Prepare new `states`; the outputs of those that failed, by id."""
        failed = {}
        for state in states:
            try:
                self._initialize_generator(state.sampling)
                clear_pipeline_stage_durations(self.pipeline)
                self.pipeline.prepare_encode(state)
                merge_stage_durations(state, consume_pipeline_stage_durations(self.pipeline))
            except Exception as error:
                self.state_cache.pop(state.request_id, None)
                logger.error("request %s could not be prepared: %s", state.request_id, error)
                failed[state.request_id] = RunnerOutput(
                    request_id=state.request_id,
                    step_index=state.step_index,
                    finished=True,
                    result=DiffusionOutput.from_exception(error),
                )
        return failed
