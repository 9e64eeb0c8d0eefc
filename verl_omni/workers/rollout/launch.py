"""Starts the engine with exactly a plan."""

from __future__ import annotations

import importlib.util
import logging
import math
import multiprocessing
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from verl_omni.utils.environment import restored_environment
from verl_omni.utils.imports import without_collecting
from verl_omni.workers.config.rollout import DiffusionRolloutConfig, check_engine_keys
from verl_omni.workers.rollout.engine_keys import engine_keys, typed_options
from verl_omni.workers.rollout.profile_key import DEFAULT_ATTENTION, attention_backend

if TYPE_CHECKING:
    from verl_omni.workers.rollout.plan import RolloutPlan

ENGINE_BACKEND = "verl_omni.pipelines.engine_backend.RolloutDiffusionEngine"
WORKER_EXTENSION = "verl_omni.pipelines.worker_extension.RolloutWorkerExtension"
START_TIMEOUT = "init_timeout"
"""Option of the engine: seconds, an integer, until it must be up. Its worker processes are not waited for longer."""
_DEGREES = ("num_gpus", "_parallel_size", "_degree", "_tp_size", "hsdp_shard_size", "hsdp_replicate_size")
"""How the engine's options end that tell over how many devices something is spread."""
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables by which torch.distributed finds its group; the engine's worker sets them, under `uni` in this process."""
_HOPPER = 9
"""Major number of the compute capability of the H100 and H200."""
_FLASH_ATTENTION_3 = "fa3_fwd_interface"
"""Module of the package fa3-fwd, which vLLM-Omni requires on CUDA and the engine looks for first. One built from source
is not looked for."""
_REQUEST_ERRORS = {
    "vllm_omni.diffusion.inline_stage_diffusion_client": ("Diffusion request %s failed",),
    "vllm_omni.diffusion.worker.diffusion_model_runner": (
        "Stepwise request preparation failed",
        "Stepwise per-request error",
    ),
    "vllm_omni.entrypoints.async_omni": ("[AsyncOmni] Orchestrator error",),
}
"""Logger → how its messages about one failed request start, tracebacks included. The RolloutError says it better, and
the adapter logs the traceback of what is no fault of the request."""


def import_engine() -> Any:
    """The class ``AsyncOmni``."""
    with without_collecting():
        from vllm_omni.entrypoints.async_omni import AsyncOmni

    return AsyncOmni


def launch(model_path: str, arguments: Mapping[str, Any]) -> Any:
    """A running ``AsyncOmni``; blocks until it is up. `arguments` are those of :func:`engine_arguments`.

    Raises TimeoutError if it is not up in time, and whatever else the engine raises; its processes are ended then.
    """
    engine = import_engine()
    drop_request_errors()
    spawning = arguments["distributed_executor_backend"] == "mp"
    context: AbstractContextManager[None] = _spawn_start_method() if spawning else nullcontext()
    with context, own_rendezvous(), _no_process_left():
        try:
            return engine(model=model_path, **arguments)
        except TimeoutError as error:
            raise TimeoutError(
                f"the engine was not up after {arguments[START_TIMEOUT]} s, it was loading {model_path}; raise "
                f"{DiffusionRolloutConfig.KEY}.start_timeout_s, or {START_TIMEOUT} of the engine, if it takes longer"
            ) from error


def engine_arguments(
    plan: RolloutPlan,
    *,
    adapter: str,
    dtype: str,
    executor: str | None,
    engine_kwargs: Mapping[str, Any],
    masks_text: bool,
) -> dict[str, Any]:
    """Keyword arguments of the engine. None in `engine_kwargs` is the engine's default; `masks_text`: whether the
    adapter's transformer takes a mask over padded text.

    Raises ValueError where `engine_kwargs` contradict the plan, or hold a key that the engine does not know or a value
    that it would misread.
    """
    import torch

    ours = {
        **plan.engine_kwargs(),
        "dtype": dtype,
        "engine_backend": ENGINE_BACKEND,
        "worker_extension_cls": WORKER_EXTENSION,
        "custom_pipeline_args": {"pipeline_class": adapter, "rows_per_forward": plan.rows_per_forward},
    }
    given = typed_options({key: value for key, value in engine_kwargs.items() if value is not None})
    for key, value in {**ours, "rows_per_forward": plan.rows_per_forward}.items():
        if given.pop(key, value) != value:
            raise ValueError(
                f"engine_kwargs sets {key}={engine_kwargs[key]!r}, but the plan says {value!r}; leave the key out"
            )
    check_engine_keys(given, engine_keys())
    defaults = {
        "enforce_eager": not torch.cuda.is_available(),
        "distributed_executor_backend": "uni" if _one_device(given) else "mp",
        START_TIMEOUT: math.ceil(DiffusionRolloutConfig.start_timeout_s),
        **default_attention(given, masks_text=masks_text),
    }
    chosen = {} if executor is None else {"distributed_executor_backend": executor}
    return {**defaults, **given, **chosen, **ours}


def drop_request_errors() -> None:
    """Keep the engine's messages about single failed requests out of this process's log, from now to its end.

    They stay dropped after the engine was closed, also for an engine that something else starts here.
    """
    for name, starts in _REQUEST_ERRORS.items():
        log = logging.getLogger(name)
        if not any(isinstance(present, _Drop) for present in log.filters):
            log.addFilter(_Drop(starts))


@contextmanager
def own_rendezvous() -> Iterator[None]:
    """Around the start of an engine: MASTER_PORT is a port that no one else on this machine gets meanwhile.

    By itself the engine takes a port that is free now and listens there seconds later, or the MASTER_PORT that an
    earlier engine, or whoever started this process, has left in the environment; engines that start at the same time
    then meet on one port. Here the port is bound but does not listen: the system gives it to no one, and the worker,
    whose socket has SO_REUSEADDR like this one, can listen on it. Afterwards the environment is as it was.
    """
    with restored_environment(_RENDEZVOUS), socket.socket() as held:
        for name in _RENDEZVOUS:
            os.environ.pop(name, None)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(held.getsockname()[1])
        yield


def masks_text(adapter: type) -> bool:
    """Whether the transformer of this rollout adapter takes a mask over padded text."""
    return bool(getattr(adapter, "masks_text", True))


def default_attention(options: Mapping[str, Any], *, masks_text: bool) -> dict[str, str]:
    """The attention backend to ask for where neither `options` nor the environment names one, as an engine option.

    On Hopper that is FlashAttention 3, where it is installed, for a transformer that takes no text mask: with heads of
    64 it is a third faster than cuDNN. Where padded text is masked it is cuDNN, of torch's kernels the fastest: with a
    mask, FlashAttention waits for the device in each layer to take the padding out
    (vllm_omni/diffusion/attention/backends/utils/fa.py). Elsewhere the engine knows best. docs/perf/rollout.md has the
    figures.
    """
    from vllm.platforms import current_platform

    if attention_backend(options) != DEFAULT_ATTENTION or not current_platform.is_cuda():
        return {}
    capability = current_platform.get_device_capability()  # asks the driver; no CUDA context is made in this process
    if capability is None or capability.major != _HOPPER:
        return {}
    flash = not masks_text and importlib.util.find_spec(_FLASH_ATTENTION_3) is not None
    return {"diffusion_attention_backend": "FLASH_ATTN" if flash else "CUDNN_ATTN"}


def _one_device(options: Mapping[str, Any]) -> bool:
    """Whether all these options together need only one device."""
    parallel = options.get("parallel_config")
    nested = parallel if isinstance(parallel, Mapping) else getattr(parallel, "__dict__", {})
    degrees = [value for key, value in (*nested.items(), *options.items()) if key.endswith(_DEGREES)]
    return all(value in (None, 1, "1", -1) for value in degrees)  # -1: as the others say


class _Drop(logging.Filter):
    def __init__(self, starts: tuple[str, ...]) -> None:
        super().__init__()
        self._starts = starts

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._starts)


@contextmanager
def _no_process_left() -> Iterator[None]:
    """If the block raises, the worker processes that it started end: the engine leaves one that hangs behind."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()
        raise


@contextmanager
def _spawn_start_method() -> Iterator[None]:
    """Worker processes must be spawned; the engine would make that the default of this process for good."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)
