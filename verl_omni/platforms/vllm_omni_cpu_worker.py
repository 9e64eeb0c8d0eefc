"""The diffusion worker of the CPU platform: the stock one, kept away from accelerator memory and streams."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from vllm.model_executor.layers import utils as linear_utils
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerProc

logger = logging.getLogger(__name__)


class CpuDiffusionWorker(DiffusionWorker):
    """Loads weights so that they can be loaded again, and keeps them in memory while asleep.

    A forward of a sleeping worker raises RuntimeError, since on a GPU it would find no weights.
    """

    _asleep = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # WorkerProc (of the `mp` executor) starts its output thread right after it made its worker, and offers no
        # other place to choose that thread's loop.
        WorkerProc._async_output_loop = _async_output_loop
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with _unpacked_linear_weights():
            super().load_model(*args, **kwargs)

    def sleep(self, level: int = 1) -> int:
        """Returns the bytes that were freed: none. The stock method needs CuMemAllocator, which is CUDA's."""
        self._asleep = True
        return 0

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self._asleep = False
        return True

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return nullcontext()  # the stock pool for `enable_sleep_mode` is CuMemAllocator's

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._check_awake()
        return super().execute_model(*args, **kwargs)

    def execute_model_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._check_awake()
        return super().execute_model_batch(*args, **kwargs)

    def execute_stepwise(self, *args: Any, **kwargs: Any) -> Any:
        self._check_awake()
        return super().execute_stepwise(*args, **kwargs)

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError("the worker is asleep; call wake_up() before generate()")


@contextmanager
def _unpacked_linear_weights() -> Iterator[None]:
    """While a model loads, lets vLLM's linear layers keep their weights as they are.

    On CPU, UnquantizedLinearMethod.process_weights_after_loading (vllm/model_executor/layers/linear.py) calls this
    function to repack a weight for oneDNN or AMX and puts an empty tensor in its place, so the pipeline's load_weights
    could fill it only once. There is no switch for it.
    """
    stock = linear_utils.dispatch_cpu_unquantized_gemm
    linear_utils.dispatch_cpu_unquantized_gemm = _use_torch_linear
    try:
        yield
    finally:
        linear_utils.dispatch_cpu_unquantized_gemm = stock


def _use_torch_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _async_output_loop(self: WorkerProc) -> None:
    """Packs finished outputs into shared memory and announces them, until it meets None.

    The loop of vllm_omni/diffusion/worker/diffusion_worker.py opens a side stream on torch.accelerator first; without
    an accelerator its thread dies there, and each request under `mp` that is not step-wise waits forever.
    """
    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _event = item
        message = AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id)
        try:
            pack_diffusion_output_shm(output)
            message.output = output
        except Exception as error:
            logger.exception("output %s could not be packed", output_id)
            message.error = f"the output could not be packed into shared memory: {error}"
        try:
            self._enqueue_result(message)
        finally:
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()
