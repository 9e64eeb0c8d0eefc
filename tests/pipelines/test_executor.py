"""What the executor makes of the messages of worker processes; here the test writes them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind, DiffusionOutput

from verl_omni.pipelines.executor import RolloutMultiprocExecutor

pytestmark = pytest.mark.slow

WAIT_S = 30.0
CHUNK_BYTES = 1 << 12


class Executor(RolloutMultiprocExecutor):
    """With two workers that the test plays: `calls` is what they are asked, through `workers` they answer."""

    def _launch_workers(self, broadcast_handle, wake_events):
        self.calls = MessageQueue.create_from_handle(broadcast_handle, 0)
        self.workers = [MessageQueue(1, 1, max_chunk_bytes=CHUNK_BYTES) for _ in wake_events]
        return [], [worker.export_handle() for worker in self.workers]


@pytest.fixture
def executor(step_execution: bool) -> Iterator[Executor]:
    executor = Executor(SimpleNamespace(num_gpus=2, step_execution=step_execution))
    for worker in executor.workers:
        worker.local_socket.recv()  # what is sent before the executor has subscribed is lost
    yield executor
    executor.shutdown()
    for queue in (executor.calls, *executor.workers):
        queue.local_socket.context.destroy(linger=0)  # the garbage collector would wait for its sockets forever


@pytest.mark.parametrize("step_execution", [True, False])
def test_a_large_message_that_comes_after_its_announcement_is_read_in_its_turn(executor, monkeypatch):
    receive, in_time = MessageQueue.recv, iter([False, False])

    def received(socket, timeout):
        if not next(in_time, True):
            raise TimeoutError
        return receive(socket, timeout)

    monkeypatch.setattr(MessageQueue, "recv", staticmethod(received))
    answers = ["1" * CHUNK_BYTES, "2", "3" * CHUNK_BYTES]
    for answer in answers:
        executor.workers[0].enqueue(answer)
    assert [executor.collective_rpc("ask", timeout=WAIT_S, unique_reply_rank=0) for _ in answers] == answers


@pytest.mark.parametrize("step_execution", [False])
def test_an_output_of_a_call_that_another_worker_failed_is_dropped(executor):
    first, second = executor.workers
    with ThreadPoolExecutor() as threads:
        call = threads.submit(executor.collective_rpc, "execute_model", timeout=WAIT_S, unique_reply_rank=0)
        rpc_id = executor.calls.dequeue(timeout=WAIT_S)["rpc_id"]
        second.enqueue(AsyncDiffusionOutput(AsyncOutputKind.RPC_RESULT, rpc_id, error="out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            call.result()
    first.enqueue(AsyncDiffusionOutput(AsyncOutputKind.COMPUTE_DONE, rpc_id, "nobody's"))
    for output_id in ("nobody's", "the last"):
        first.enqueue(AsyncDiffusionOutput(AsyncOutputKind.OUTPUT_READY, None, output_id, output=DiffusionOutput()))
    executor.wait_output_ready("the last").result(WAIT_S)
    assert "cached=0" in executor.describe_pending_state()
