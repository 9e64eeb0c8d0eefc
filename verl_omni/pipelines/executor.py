"""The engine's `mp` executor, which loses no output of a worker and keeps none that nobody waits for.

What the engine's executor (vllm_omni/diffusion/executor/multiproc_executor.py) makes of the messages has four gaps:

* A large message is announced in shared memory, and comes through a socket. If a read times out between the two, it
  counts as none; from then on, each large message that is announced gives out the one before.

The others are those of request mode, where a worker answers twice: first that a batch is computed, then, from another
thread, with the output.

* `_result_pump` looks for the batch's members, unpacks the output, and then files it as the output of one request. If
  `execute_batch` names the members in between, neither sees what the other did, and all of them wait in vain.
* The output of a request that was aborted or cancelled meanwhile is filed too, and stays for good.
* So is the output of a worker whose call has failed already, because another worker was first to say that it failed.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor
from vllm_omni.diffusion.utils.future_utils import try_set_result


class RolloutMultiprocExecutor(MultiprocDiffusionExecutor):
    """Reads each message of a worker whole, and looks after it whether an output was filed that belongs elsewhere."""

    def _init_executor(self) -> None:
        self._promises: dict[str, weakref.finalize] = {}
        self._broken: SimpleQueue[str] = SimpleQueue()  # put() may come from the garbage collector, at any moment
        self._unwanted: set[str] = set()
        super()._init_executor()

    def promised(self, output_id: str, promise: object) -> None:
        """`promise` announces this output: once that object is gone, nobody will ask for the output any more."""
        finalizer = self._promises[output_id] = weakref.finalize(promise, self._broken.put, output_id)
        finalizer.atexit = False

    def wait_output_ready(self, async_output_id: str) -> Future[Any]:
        """The output, once it is there. To be asked for once; if the future is cancelled, the output is dropped."""
        if (promise := self._promises.pop(async_output_id, None)) is not None:
            promise.detach()
        future: Future[Any] = super().wait_output_ready(async_output_id)
        future.add_done_callback(lambda done: self._broken.put(async_output_id) if done.cancelled() else None)
        return future

    def _init_result_queue(self, result_handle: Any) -> "_Whole":
        return _Whole(super()._init_result_queue(result_handle))

    def _result_pump(self, result_mq: Any = None) -> None:
        super()._result_pump(_Watched(result_mq or self._result_mq, self._put_in_order, self._answer_call))

    def _put_in_order(self) -> None:
        with self._futures_lock:
            while not self._broken.empty():
                output_id = self._broken.get()
                self._promises.pop(output_id, None)
                self._unwanted.add(output_id)
            for output_id in self._unwanted & self._completed_outputs.keys():
                self._unwanted.remove(output_id)
                del self._completed_outputs[output_id]
            for batch_id in self._batch_split_map.keys() & self._completed_outputs.keys():
                members, whole = self._batch_split_map.pop(batch_id), self._completed_outputs.pop(batch_id)
                error = whole.exception()
                self._deliver_batch_split(members, *((whole.result(), None) if error is None else (None, str(error))))

    def _answer_call(self, message: Any) -> None:
        # Here and not in the pump: only who takes the future out knows for sure whether the output has a caller.
        if isinstance(message, AsyncDiffusionOutput) and message.kind is AsyncOutputKind.COMPUTE_DONE:
            with self._futures_lock:
                call = self._rpc_futures.pop(message.rpc_id, None)
            if call is not None:
                try_set_result(call, message)
            else:
                self._broken.put(message.async_output_id)


class _Watched:
    """A queue that calls `before` each time a message is to be taken from it, and `after` with what was taken."""

    def __init__(self, queue: Any, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._queue, self._before, self._after = queue, before, after

    def dequeue(self, timeout: float) -> Any:
        self._before()
        message = self._queue.dequeue(timeout=timeout)
        self._after(message)
        return message


class _Whole:
    """vLLM's `MessageQueue`, of which a read may time out within a message: the next one reads the rest."""

    def __init__(self, queue: Any) -> None:
        self._queue, self._announced = queue, False

    def dequeue(self, timeout: float) -> Any:
        queue, at, announced = self._queue, self._queue.current_idx, self._announced
        self._announced = False
        try:
            return queue.recv(queue.local_socket, timeout) if announced else queue.dequeue(timeout=timeout)
        except TimeoutError:
            self._announced = announced or queue.current_idx != at
            raise
