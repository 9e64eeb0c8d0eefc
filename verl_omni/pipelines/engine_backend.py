"""The engine's control side for rollouts: what may share a batch, and when a wave of requests starts.

Chosen with ``engine_backend="verl_omni.pipelines.engine_backend.RolloutDiffusionEngine"``. For a rollout adapter (a
subclass of ``VllmOmniPipelineBase``) it differs from the stock engine in nine things; any other pipeline is treated as
by the stock engine.

* **Key.** The engine's key holds every CFG and guidance field, and in request mode steps and more. Our adapters read
  every knob per request, so only what one tensor can't mix is left: :class:`RolloutBatchKey`.
* **Order.** By itself a head of the queue whose key differs blocks all behind it; see
  :mod:`~verl_omni.pipelines.queue_order`.
* **Admission.** Requests arrive one by one, so the first would start alone. One that carries
  ``extra_args["rollout_burst"] = (id, size)`` says how many are coming: an idle engine waits for them.
* **Hooks.** Pixels leave the adapter finished, so the architecture's post-processing is not run on them.
* **Validation.** Left to the adapter, so that a bad value reads the same in all modes. Only the seed is looked at here:
  in request mode the engine makes the generators of a whole batch before the adapter sees a request.
* **Wait.** Goes with the rollout, as ``rl["queue_wait_s"]``; the engine's client drops the metrics that tell it.
* **Outputs.** With worker processes none is lost and none stays behind; see :mod:`~verl_omni.pipelines.executor`.
* **Runner.** It need not wait for the device to take requests in; see :mod:`~verl_omni.pipelines.runner`.
* **Aborts.** One that overtakes its request ends it too. (And for all pipelines: :mod:`~verl_omni.pipelines.closing`.)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_omni.diffusion.data import DiffusionOutput, DiffusionRequestAbortedError
from vllm_omni.diffusion.diffusion_engine import (
    _ASYNC_OUTPUT_TIMEOUT_ENV,
    DiffusionExecutionMode,
    _async_output_timeout,
)
from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched import RequestScheduler, StepScheduler
from vllm_omni.diffusion.sched.interface import DiffusionSchedulerOutput, _AdmissionWaitDecision
from vllm_omni.outputs import OmniRequestOutput

from verl_omni.pipelines.closing import ClosingEngine
from verl_omni.pipelines.diffusion_rollout_output import is_rollout_output, wrap_rollout_postprocessor
from verl_omni.pipelines.executor import RolloutMultiprocExecutor
from verl_omni.pipelines.model_base import VllmOmniPipelineBase
from verl_omni.pipelines.queue_order import QueueOrder

BURST_QUIET_S = 0.25
"""An incomplete burst is given up when nothing has arrived for this long: members come about 1 ms apart, so this only
ends the wait for one that was rejected on its way (a worker that died, a value that is no number)."""
BURST_DEADLINE_S = 1.0
"""Longest that an idle engine waits for a burst: well above the submission of a full batch, well below one image."""
_KNOWN_BURSTS = 256
"""Bursts remembered at a time; a burst in flight is never this old."""
_KNOWN_ABORTS = 2**14
"""Aborts remembered whose request is not here, as it is still to come or done: more than are ever in flight."""
_SEED_LIMIT = 2**63


@dataclass(frozen=True)
class RolloutBatchKey:
    """What the requests of one batch must have in common."""

    height: int | None
    """Pixels; None is the adapter's default."""
    width: int | None
    """Pixels; None is the adapter's default."""
    lora_int_id: int | None
    """One LoRA is active in the worker at a time."""
    lora_scale: float


class BurstTracker:
    """Which announced bursts are still arriving. Pure bookkeeping: no clock, no engine."""

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}

    def arrived(self, burst: tuple[str, int] | None) -> None:
        """A member of `burst` has reached the scheduler, whatever becomes of it there."""
        if burst is None:
            return
        burst_id, size = burst
        self._missing[burst_id] = max(0, self._missing.get(burst_id, size) - 1)
        if len(self._missing) > _KNOWN_BURSTS:
            del self._missing[next(iter(self._missing))]

    def incomplete(self, bursts: Iterable[tuple[str, int]]) -> bool:
        """Whether any of these bursts has members still to come."""
        return any(self._missing.get(burst_id, 0) > 0 for burst_id, _ in bursts)

    def give_up(self) -> None:
        """Wait no longer for the bursts known so far; late members are served as they come."""
        self._missing = dict.fromkeys(self._missing, 0)


def burst_of(request: OmniDiffusionRequest) -> tuple[str, int] | None:
    """The burst that a request announces; None if it announces none (or no proper one)."""
    burst = (request.sampling_params.extra_args or {}).get("rollout_burst")
    if isinstance(burst, (tuple, list)) and len(burst) == 2 and isinstance(burst[1], int):
        return str(burst[0]), burst[1]
    return None


class _RolloutScheduling:
    """Key, order and admission for both schedulers of the engine. Mixed in before one of them."""

    if TYPE_CHECKING:
        _waiting: deque[str]
        _request_states: dict[str, Any]
        max_num_running_reqs: int

    def __init__(self) -> None:
        super().__init__()
        self._bursts = BurstTracker()
        self._order = QueueOrder()
        self._arrivals: dict[str, int] = {}
        self._arrived = itertools.count()
        self._aborted: dict[str, None] = {}

    def add_request(self, request: OmniDiffusionRequest) -> str:
        self._bursts.arrived(burst_of(request))
        if request.request_id in self._aborted:
            del self._aborted[request.request_id]
            raise DiffusionRequestAbortedError(f"Request {request.request_id} aborted.")
        request_id: str = super().add_request(request)  # type: ignore[misc]
        self._arrivals[request_id] = next(self._arrived)
        return request_id

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Refuse those of these requests that are not here yet, when they come.

        One that is done is not here either; its id does not come again, as the engine's client makes ids unique.
        """
        self._aborted.update(dict.fromkeys(r for r in request_ids if r not in self._request_states))
        while len(self._aborted) > _KNOWN_ABORTS:
            del self._aborted[next(iter(self._aborted))]

    def schedule(self) -> DiffusionSchedulerOutput:
        if not self._waiting or self.num_running_requests() >= self.max_num_running_reqs:  # type: ignore[attr-defined]
            return super().schedule()  # type: ignore[misc]  # nobody can be admitted: the order does not matter
        waiting = sorted((r for r in self._waiting if r in self._request_states), key=self._arrivals.__getitem__)
        keyed = [(request, self._request_states[request].sampling_params_key) for request in waiting]
        running = self._current_sampling_params_key()  # type: ignore[attr-defined]
        self._waiting = deque(self._order.arrange(keyed, running, max_batch=self.max_num_running_reqs))
        output: DiffusionSchedulerOutput = super().schedule()  # type: ignore[misc]
        self._order.admitted(set(waiting) - set(self._waiting), waiting)
        return output

    def _pop_extra_request_state(self, request_id: str) -> None:
        super()._pop_extra_request_state(request_id)  # type: ignore[misc]
        self._arrivals.pop(request_id, None)
        self._order.forget(request_id)

    def _build_sampling_params_key(self, request: OmniDiffusionRequest) -> RolloutBatchKey:
        sampling = request.sampling_params
        lora = sampling.lora_request
        # What is no number is refused later, by the adapter; here it must not be compared.
        height, width = (edge if isinstance(edge, int) else None for edge in (sampling.height, sampling.width))
        return RolloutBatchKey(
            height=height,
            width=width,
            lora_int_id=None if lora is None else lora.lora_int_id,
            lora_scale=1.0 if lora is None else sampling.lora_scale,
        )

    def get_admission_wait_decision(self, *, now: float, dp_concurrent: bool = False) -> _AdmissionWaitDecision:
        idle = self.num_running_requests() == 0  # type: ignore[attr-defined]
        if idle and self._bursts.incomplete(self._waiting_bursts()):
            return _AdmissionWaitDecision(
                should_wait=True,
                deadline=now + BURST_DEADLINE_S,
                stable_window_s=BURST_QUIET_S,
                max_batch=self.max_num_running_reqs,
            )
        return super().get_admission_wait_decision(now=now, dp_concurrent=dp_concurrent)  # type: ignore[misc]

    def should_end_admission_wait(self, decision: _AdmissionWaitDecision, *, now: float, stable_since: float) -> bool:
        bursts = self._waiting_bursts()
        if not bursts:
            ended: bool = super().should_end_admission_wait(decision, now=now, stable_since=stable_since)  # type: ignore[misc]
            return ended
        full = self.num_waiting_requests() >= decision.max_batch  # type: ignore[attr-defined]
        if full or not self._bursts.incomplete(bursts):
            return True
        late = decision.deadline is not None and now >= decision.deadline
        if late or now - stable_since >= BURST_QUIET_S:
            self._bursts.give_up()
            return True
        return False

    def _waiting_bursts(self) -> list[tuple[str, int]]:
        states = (self._request_states.get(request_id) for request_id in self._waiting)
        bursts = (burst_of(state.req) for state in states if state is not None)
        return [burst for burst in bursts if burst is not None]


class RolloutStepScheduler(_RolloutScheduling, StepScheduler):
    """Step-wise: requests join and leave between denoising steps."""

    def _get_total_steps(self, request: OmniDiffusionRequest) -> int:
        # Only the adapter knows its default and its limits; a request ends when the adapter says so, not by this count.
        steps = request.sampling_params.num_inference_steps
        return steps if isinstance(steps, int) and steps > 0 else 1


class RolloutRequestScheduler(_RolloutScheduling, RequestScheduler):
    """Request-level: a wave of whole requests."""


class RolloutDiffusionEngine(ClosingEngine):
    """The stock engine with the schedulers, hooks and executor of its module, and a runner of ours."""

    default_diffusion_model_runner_cls = "verl_omni.pipelines.runner.RolloutModelRunner"

    if TYPE_CHECKING:
        pre_process_func: Callable[..., Any] | None
        post_process_func: Callable[..., Any] | None

    def _init_process_hooks(self, od_config: Any) -> None:
        super()._init_process_hooks(od_config)
        self._rollout = is_rollout_adapter(od_config)
        if self._rollout:
            self.pre_process_func = None
            self.post_process_func = wrap_rollout_postprocessor(self.post_process_func)

    def _init_executor(self, od_config: Any) -> None:
        if self._rollout and DiffusionExecutor.get_class(od_config) is MultiprocDiffusionExecutor:
            self.executor = RolloutMultiprocExecutor(od_config)
        else:
            super()._init_executor(od_config)

    def _finalize_finished_request(
        self, request_id: str, runner_output: Any = None, *args: Any, **kwargs: Any
    ) -> DiffusionOutput:
        output: DiffusionOutput = super()._finalize_finished_request(request_id, runner_output, *args, **kwargs)
        if isinstance(self.executor, RolloutMultiprocExecutor) and getattr(runner_output, "async_output_id", None):
            self.executor.promised(runner_output.async_output_id, output)
        return output

    def _init_scheduler(self, od_config: Any, scheduler: Any = None, *args: Any, **kwargs: Any) -> None:
        if scheduler is None and self._rollout:
            step_wise = self.execution_mode is DiffusionExecutionMode.STEP_BATCH
            scheduler = RolloutStepScheduler() if step_wise else RolloutRequestScheduler()
        super()._init_scheduler(od_config, scheduler, *args, **kwargs)

    def _abort_requests(self, request_ids: list[str]) -> None:
        if isinstance(self.scheduler, _RolloutScheduling):
            self.scheduler.aborted(request_ids)
        super()._abort_requests(request_ids)

    def _prepare_request_for_admission(self, request: OmniDiffusionRequest) -> OmniDiffusionRequest:
        seed = request.sampling_params.seed
        integer = isinstance(seed, int) and not isinstance(seed, bool)
        if self._rollout and seed is not None and not (integer and 0 <= seed < _SEED_LIMIT):
            raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, got {seed!r}")
        return super()._prepare_request_for_admission(request)

    async def step_streaming(self, request: OmniDiffusionRequest) -> AsyncGenerator[list[OmniRequestOutput], None]:
        """As the stock engine; a time-out says what it waited for."""
        async with aclosing(super().step_streaming(request)) as outputs:
            try:
                async for output in outputs:
                    yield output
            except TimeoutError as error:
                raise TimeoutError(
                    f"its output did not come within {_async_output_timeout():g} s from the worker that computed it; "
                    f"set {_ASYNC_OUTPUT_TIMEOUT_ENV} to more seconds if that takes longer"
                ) from error

    def postprocess_output(self, request: OmniDiffusionRequest, output: DiffusionOutput) -> list[OmniRequestOutput]:
        """The output as the stock engine gives it; a rollout's tells the wait of its request, if that is known."""
        wait_ms = request.scheduler_queue_wait_ms
        if self._rollout and wait_ms is not None and is_rollout_output(output.output):
            output.output["metadata"]["rl"]["queue_wait_s"] = wait_ms / 1000
        return super().postprocess_output(request, output)


def is_rollout_adapter(od_config: Any) -> bool:
    """Whether the configured custom pipeline is one of our adapters."""
    pipeline = (od_config.custom_pipeline_args or {}).get("pipeline_class")
    if isinstance(pipeline, str):
        pipeline = resolve_obj_by_qualname(pipeline)
    return isinstance(pipeline, type) and issubclass(pipeline, VllmOmniPipelineBase)
