"""Starts the engine with exactly a plan."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_omni.workers.rollout.plan import RolloutPlan

ENGINE_BACKEND = "verl_omni.pipelines.engine_backend.RolloutDiffusionEngine"
WORKER_EXTENSION = "verl_omni.pipelines.worker_extension.RolloutWorkerExtension"


_REQUEST_ERRORS = {
    "vllm_omni.diffusion.inline_stage_diffusion_client": "Diffusion request",
    "vllm_omni.diffusion.worker.diffusion_model_runner": "Stepwise",
    "vllm_omni.entrypoints.async_omni": "[AsyncOmni] Orchestrator error",
}
"""Logger → start of its messages about one failed request, tracebacks included; the RolloutError says it better."""


def launch(model_path: str, arguments: Mapping[str, Any]) -> Any:
    """A running ``AsyncOmni``; blocks until it is up. `arguments` are those of :func:`engine_arguments`."""
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    for name, start in _REQUEST_ERRORS.items():
        log = logging.getLogger(name)
        if not any(isinstance(present, _Drop) for present in log.filters):
            log.addFilter(_Drop(start))
    spawning = arguments["distributed_executor_backend"] == "mp"
    context: AbstractContextManager[None] = _spawn_start_method() if spawning else nullcontext()
    with context:
        return AsyncOmni(model=model_path, **arguments)


def engine_arguments(
    plan: RolloutPlan, *, adapter: str, dtype: str, executor: str | None, engine_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of the engine. Raises ValueError where `engine_kwargs` contradict the plan."""
    import torch

    ours = {
        **plan.engine_kwargs(),
        "dtype": dtype,
        "engine_backend": ENGINE_BACKEND,
        "worker_extension_cls": WORKER_EXTENSION,
        "custom_pipeline_args": {"pipeline_class": adapter, "rows_per_forward": plan.rows_per_forward},
    }
    for key, value in ours.items():
        if key in engine_kwargs and engine_kwargs[key] != value:
            raise ValueError(
                f"engine_kwargs sets {key}={engine_kwargs[key]!r}, but the plan says {value!r}; leave the key out"
            )
    one_device = engine_kwargs.get("num_gpus") in (None, 1)
    defaults = {
        "enforce_eager": not torch.cuda.is_available(),
        "distributed_executor_backend": "uni" if one_device else "mp",
    }
    chosen = {} if executor is None else {"distributed_executor_backend": executor}
    return {**defaults, **engine_kwargs, **chosen, **ours}


class _Drop(logging.Filter):
    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._start)


@contextmanager
def _spawn_start_method() -> Iterator[None]:
    """Worker processes must be spawned; the engine would make that the default of this process for good."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)
