"""The stock engine, which always closes in the end and answers whoever calls it meanwhile.

What the stock one (vllm_omni/diffusion/diffusion_engine.py) does has two gaps:

* `close` waits 10 s for the wave that runs, then returns and leaves the rest for another call that nobody makes. With
  the worker in this process the model stays in memory, and no other engine can start.
* A control call that is queued when the engine's thread has taken its last look at the queue is never answered.
"""

import threading
from typing import Any

from vllm_omni.diffusion.diffusion_engine import DiffusionEngine


class ClosingEngine(DiffusionEngine):
    """Closes when the wave ends if that takes long, and refuses control calls once it is closed."""

    def _init_runtime_state(self) -> None:
        super()._init_runtime_state()
        self._closing = threading.Lock()
        self._closer: threading.Thread | None = None

    def close(self) -> None:
        """As the stock engine; what that leaves undone is done in the background when the wave ends."""
        with self._closing:
            super().close()
            if not self._shutdown_complete and self._closer is None:
                # A daemon, as a worker that hangs must not keep the process from its exit.
                self._closer = threading.Thread(target=self._close_after_wave, name="engine-closer", daemon=True)
                self._closer.start()

    def _close_after_wave(self) -> None:
        self.worker_thread.join()
        self.close()

    def _submit_rpc(self, *args: Any, **kwargs: Any) -> Any:
        with self._cv:
            if self._closed:
                raise RuntimeError("DiffusionEngine is closed.")
            return super()._submit_rpc(*args, **kwargs)
