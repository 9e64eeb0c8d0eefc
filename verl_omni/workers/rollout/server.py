"""A rollout engine in a process of its own: the class of a Ray actor.

All methods are coroutines on one event loop, so an abort or a question for statistics is answered while requests run.
What changes the policy waits for them; see :mod:`~verl_omni.workers.rollout.engine`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.utils.console import log_to_stderr
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.external_lib import import_external_lib
from verl_omni.workers.rollout.launch import START_TIMEOUT, import_engine
from verl_omni.workers.rollout.plan import RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.staging import LoraAdapter, WeightsFile, in_thread, remove_staged, staged_weights
from verl_omni.workers.rollout.wire import PackedTensor, pack_results, unpack

if TYPE_CHECKING:
    import ray
    from torch import Tensor

    from verl_omni.pipelines.stats import RolloutStats

WATCH_S = 1.0
"""How often a server looks whether its engine still runs."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the engine of a server is started; every server of a run has the same."""

    model_path: str
    """Diffusers checkpoint."""
    plan: RolloutPlan
    """The engine starts with exactly this."""
    adapter: str
    """Import path of the adapter class."""
    dtype: str = "bfloat16"
    """Of the model."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the engine."""
    external_lib: str | None = None
    """Module, or path of a .py file, that registers adapters; imported before the engine starts."""
    merge_lora: bool = False
    """Add each LoRA to the weights instead of running it beside them."""
    colocated: bool = False
    """The server shares its devices with a training process: on a GPU the engine is started so that it can sleep."""


def server_name(replica: int) -> str:
    """Name of the Ray actor, in verl's form: replica, and the server's number within it."""
    return f"vllm_omni_server_{replica}_0"


class RolloutServer:
    """Serves one engine; made with ``ray.remote(RolloutServer)``. Call :meth:`start` before anything else."""

    def __init__(self, settings: ServerSettings, *, replica: int) -> None:
        log_to_stderr(logging.NOTSET)
        self._settings = settings
        self._name = server_name(replica)
        self._started: RolloutEngine | None = None
        self._staged = AsyncExitStack()

    def __repr__(self) -> str:
        return self._name  # Ray puts it before each line that this process prints

    async def start(self, timeout_s: float) -> str:
        """Load the model, within `timeout_s`; returns the id of the node, in Ray, on which it is.

        Raises ConfigError for the external module, and what :meth:`RolloutEngine.start` raises.
        """
        settings = self._settings
        import_engine()
        gc.freeze()  # the engine collects garbage several times while it starts, and what is there now stays
        if settings.external_lib is not None:
            import_external_lib(settings.external_lib)
        self._started = await RolloutEngine.start(
            model_path=settings.model_path,
            plan=dataclasses.replace(settings.plan, notes=()),  # the same in all servers: the driver logs them
            adapter=settings.adapter,
            dtype=settings.dtype,
            engine_kwargs={START_TIMEOUT: math.ceil(timeout_s), **_engine_kwargs(settings)},
            merge_lora=settings.merge_lora,
        )
        return _node()

    async def generate_group(
        self, requests: Sequence[RolloutRequest]
    ) -> AsyncGenerator[list[RolloutSample | RolloutError], None]:
        """Submit `requests`, of one group or of many, as one burst; gives the results as they finish.

        Those that have finished by the time the ones before were sent come together, packed, for
        :func:`~verl_omni.workers.rollout.wire.unpack_results`. A request that fails gives its error. Cancelling the
        task in Ray aborts what has not finished.
        """
        async with aclosing(self._engine.generate_ready(requests)) as results:
            async for ready in results:
                yield pack_results(ready)

    async def abort_all_requests(self) -> None:
        """End all requests in flight as aborted."""
        await self._engine.abort()

    async def set_lora(
        self,
        version: int,
        adapter_config: Mapping[str, Any],
        tensors: Mapping[str, PackedTensor | Tensor],
        scale: float,
    ) -> None:
        """Make a PEFT adapter the policy's, which is called `version` then; see :meth:`RolloutEngine.load_lora`."""
        adapter = LoraAdapter(config=adapter_config, tensors=unpack(tensors))
        await self._engine.load_lora(adapter, scale=scale, version=version)

    async def stage_weights(self, references: Sequence[ray.ObjectRef]) -> str:
        """Write weights where all servers of this node can read them; returns the file's path.

        `references` are to objects in Ray's store, each some tensors by name. To be followed by :meth:`drop_weights`.
        """
        await self.drop_weights([])
        buckets = await asyncio.gather(*references)
        named = [item for bucket in buckets for item in unpack(bucket).items()]
        return str(await self._staged.enter_async_context(in_thread(staged_weights(named))))

    async def drop_weights(self, files: Sequence[str]) -> None:
        """Remove what :meth:`stage_weights` wrote here, and `files` if they are here: who wrote them may have died."""
        await self._staged.aclose()
        for file in files:
            await asyncio.to_thread(remove_staged, Path(file))

    async def set_weights(self, version: int, files: Mapping[str, str]) -> None:
        """Replace all weights of the transformer; see :meth:`RolloutEngine.update_weights`.

        `files`: node → path of the staged weights there.
        """
        await self._engine.update_weights(WeightsFile(Path(files[_node()])), version=version)

    async def policy_version(self) -> int:
        """Version of the policy that serves."""
        return self._engine.policy_version

    async def sleep(self) -> None:
        """Give device memory back; see :meth:`RolloutEngine.sleep`."""
        await self._engine.sleep()

    async def wake_up(self) -> None:
        """Undo :meth:`sleep`."""
        await self._engine.wake_up()

    async def clear_kv_cache(self) -> None:
        """Drop the prompt embeddings that are kept between requests."""
        await self._engine.release_caches()

    async def stats(self, reset: bool = False) -> RolloutStats:
        """What the engine counted since the start or the last reset."""
        return await self._engine.stats(reset)

    async def ended(self) -> str:
        """Wait until the engine has ended; returns so in words. If the process ends, Ray tells who waits."""
        while await self.alive():
            await asyncio.sleep(WATCH_S)
        return "its engine has ended"

    async def alive(self) -> bool:
        """Whether the engine has started and still runs."""
        return self._started is not None and await self._started.alive()

    async def close(self) -> None:
        """End the requests in flight and the engine."""
        if self._started is not None:
            await self._started.close()

    @property
    def _engine(self) -> RolloutEngine:
        if self._started is None:
            raise RolloutError(None, "the server has no engine; call start() first")
        return self._started


def _node() -> str:
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def _engine_kwargs(settings: ServerSettings) -> dict[str, Any]:
    import torch

    given = {key: value for key, value in settings.engine_kwargs.items() if value is not None}
    return {"enable_sleep_mode": True, **given} if settings.colocated and torch.cuda.is_available() else given
