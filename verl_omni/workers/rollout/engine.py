"""From a plan to a running engine, and what a trainer does with it.

One engine serves one policy at a time. Changes of the policy (LoRA, weights, sleep) wait for the trajectories in flight
and hold new ones back meanwhile; every sample carries the version of the policy that made it. Once the workers have
been asked for a new policy, it comes: a caller that is cancelled then raises CancelledError when it is there. A request
that fails ends as a :class:`RolloutError` and takes nothing else with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.config import ConfigError
from verl_omni.workers.config.lora import MIN_LORA_SCALE, is_lora_scale
from verl_omni.workers.rollout.flights import Burst, Flights
from verl_omni.workers.rollout.launch import engine_arguments, launch, masks_text
from verl_omni.workers.rollout.policy_gate import PolicyGate
from verl_omni.workers.rollout.request import ABORTED, RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.staging import LoraAdapter, in_thread, staged_lora, staged_weights

if TYPE_CHECKING:
    from torch import Tensor

    from verl_omni.workers.rollout.plan import RolloutPlan

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_GRACE_S = 10.0
"""How long `close` waits for the engine to acknowledge aborts: it does so within one step or wave, a dead one never."""
_SLEEP_LEVEL = 1
"""Keep the weights on the host; the engine cannot wake up from level 2."""


class RolloutEngine:
    """A running engine. Made by :meth:`start`; to be closed, or used with ``async with``."""

    def __init__(self, omni: Any, lora_key_map: Mapping[str, str], merge_lora: bool = False) -> None:
        self._omni = omni
        self._lora_key_map = lora_key_map
        self._merge_lora = merge_lora
        self._gate = PolicyGate()
        self._flights = Flights(self._trajectory)
        self._lora: Any = None
        self._lora_scale = 1.0
        self._loras_loaded = 0
        self._asleep = False
        self._closed = False

    @classmethod
    async def start(
        cls,
        *,
        model_path: str | Path,
        plan: RolloutPlan,
        adapter: str,
        dtype: str = "bfloat16",
        executor: str | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        lora_key_map: Mapping[str, str] | None = None,
        merge_lora: bool = False,
    ) -> RolloutEngine:
        """Start an engine with exactly `plan`.

        Args:
            model_path: diffusers checkpoint.
            adapter: import path of the adapter class, ``"module.Class"``.
            dtype: of the model; latents and log-probs are float32 anyhow.
            executor: "uni" (worker in this process; the default for one device) or "mp" (worker processes).
            engine_kwargs: further arguments of the engine.
            lora_key_map: overrides the adapter's.
            merge_lora: add each LoRA to the weights instead of running it beside them.

        Raises ValueError if `engine_kwargs` contradict the plan or hold a key that the engine does not know, or if no
        LoRA can be merged into the model; whatever the engine raises if it does not come up.
        """
        from vllm.utils.import_utils import resolve_obj_by_qualname

        adapter_class = resolve_obj_by_qualname(adapter)
        arguments = engine_arguments(
            plan,
            adapter=adapter,
            dtype=dtype,
            executor=executor,
            engine_kwargs=engine_kwargs or {},
            masks_text=masks_text(adapter_class),
        )
        if lora_key_map is None:
            lora_key_map = getattr(adapter_class, "lora_key_map", {})
        logger.info(plan.log_line())
        for note in plan.notes:
            logger.warning(note)
        engine = cls(await asyncio.to_thread(launch, str(model_path), arguments), lora_key_map, merge_lora)
        try:
            if merge_lora:
                await engine._check_merging()
            await engine.stats(reset=True)  # forget the engine's warm-up request
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def policy_version(self) -> int:
        """What the last policy change was called, or how many there were; starts at 0."""
        return self._gate.version

    async def generate(self, request: RolloutRequest) -> RolloutSample:
        """One request. Raises :class:`RolloutError`. Cancelling the awaiting task aborts the request in the engine."""
        return await self._flights.fly(request)

    def generate_all(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        """Submit all at once, so that they batch from the first step; yields each as it finishes.

        A failed one is yielded as its error. Leaving the loop early aborts the rest.
        """
        return self._flights.fly_all(requests)

    def generate_ready(
        self, requests: Sequence[RolloutRequest]
    ) -> AsyncGenerator[list[RolloutSample | RolloutError], None]:
        """As :meth:`generate_all`, but yields together what finished since the last time, as batches do."""
        return self._flights.fly_ready(requests)

    async def abort(self, request_ids: str | Iterable[str] | None = None) -> None:
        """End these requests (None: all) with a :class:`RolloutError` that is ``aborted``.

        Ids that are not in flight are left alone.
        """
        await self._flights.end(ABORTED, [request_ids] if isinstance(request_ids, str) else request_ids)

    async def load_lora(
        self, adapter: str | Path | LoraAdapter, *, scale: float = 1.0, version: int | None = None
    ) -> None:
        """Make a PEFT adapter, a folder or one in memory, part of the policy, in place of the one before.

        `version`: what the new policy is called; None: one more than the old. Raises ValueError if it is no usable
        adapter, scale or version, :class:`RolloutError` if the engine refuses it; the old policy serves on then. To go
        back to the base policy call :meth:`remove_lora`; a scale of 0 is an error.
        """
        _check_version(version)
        if not is_lora_scale(scale):
            raise ValueError(
                f"scale must be a finite number {MIN_LORA_SCALE:g} or more away from 0, got {scale!r:.40}; "
                "call remove_lora() for the base policy"
            )
        scale = float(scale)
        from vllm.lora.request import LoRARequest

        async def change() -> None:
            if self._merge_lora:  # it is in the weights then, and requests name none
                await self.call_worker("merge_lora", str(folder), scale)
                return
            self._loras_loaded += 1
            lora = LoRARequest(f"policy-{self._loras_loaded}", self._loras_loaded, str(folder))
            await self.call_worker("load_lora", lora)
            await self._set_lora(lora, scale)

        async with in_thread(staged_lora(adapter, self._lora_key_map)) as folder:
            await self._change(change, version)

    async def remove_lora(self) -> None:
        """Go back to the policy without LoRA."""
        if self._merge_lora:
            await self._change(lambda: self.call_worker("unmerge_lora"))
        else:
            await self._change(lambda: self._set_lora(None, 1.0))

    async def update_weights(
        self, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, version: int | None = None
    ) -> int:
        """Replace all weights of the transformer; returns how many tensors that were.

        Names are those of the diffusers checkpoint, prefixed with ``transformer.``. A loaded LoRA stays on top.
        `version` as in :meth:`load_lora`. Raises :class:`RolloutError` naming the first unknown, missing or misshapen
        weight; the old policy serves on then.
        """
        _check_version(version)
        async with in_thread(staged_weights(named_tensors)) as path:
            return int(await self._change(lambda: self.call_worker("load_weights_file", str(path)), version))

    async def sleep(self) -> None:
        """Give the device memory of weights (kept on the host) and caches back. Requests fail until :meth:`wake_up`.

        Raises :class:`RolloutError` if a worker could not: call :meth:`wake_up` then too. On an accelerator also if the
        engine was not started with ``enable_sleep_mode=True``: it serves on then.
        """
        await self._gate.carry_out(self._fall_asleep, counts=False)

    async def wake_up(self) -> None:
        """Undo :meth:`sleep`."""
        await self._gate.carry_out(self._wake, counts=False)

    async def release_caches(self) -> None:
        """Drop what the adapter keeps between requests, which are the prompt embeddings."""
        async with self._gate.change(counts=False):
            self._check_open()
            await self.call_worker("release_caches")

    async def stats(self, reset: bool = False) -> RolloutStats:
        """What the adapter counted since the start or the last reset.

        The engine answers between steps or waves, and admits nothing while it is asked: ask per run, not per request.
        """
        self._check_open()
        return RolloutStats.from_dict(await self.call_worker("rollout_stats", reset))

    async def call_worker(self, method: str, *args: Any) -> Any:
        """Call a method of the worker, see ``RolloutWorkerExtension``; runs between steps or waves.

        Returns what the first worker answers. Raises :class:`RolloutError` with what the worker raised.
        """
        results = await self._omni.collective_rpc(method, args=args)
        result = results[0] if results else {"supported": False, "error": "the engine has no worker left"}
        if isinstance(result, dict) and result.get("supported") is False:
            raise RolloutError(None, f"{method} failed: {str(result.get('error')).partition(chr(10) * 2)[0]}")
        return result[0] if isinstance(result, list) else result

    async def alive(self) -> bool:
        """Whether the engine still runs."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._omni.check_health()
        except EngineDeadError:
            return False
        return not self._closed

    async def close(self) -> None:
        """End the requests in flight and the engine. May be called again."""
        if self._closed:
            return
        self._closed = True
        await self._flights.end("the engine was closed", timeout=CLOSE_GRACE_S)
        if self._omni.final_output_task is not None:  # belongs to this loop; shutdown() runs in another thread
            self._omni.final_output_task.cancel()
            self._omni.final_output_task = None
        # Of its own, as the threads of the loop's pool may all wait for the engine, and so for this.
        pool = ThreadPoolExecutor(1)
        try:
            await asyncio.get_running_loop().run_in_executor(pool, self._omni.shutdown)
        finally:
            pool.shutdown(wait=False)

    async def __aenter__(self) -> RolloutEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _trajectory(self, request: RolloutRequest, burst: Burst | None) -> RolloutSample:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._check_open(request.request_id)
        async with self._gate.trajectory() as version:
            self._check_open(request.request_id)
            self._check_awake(request.request_id)
            if not await self.alive():
                raise RolloutError(request.request_id, "the engine died, start another")
            try:
                return RolloutSample.read(request, await self._run(request, burst), version)
            except RolloutError:
                raise
            except Exception as error:
                problem = str(error) or repr(error)
                if isinstance(error, EngineDeadError) or not await self.alive():
                    problem = f"the engine died, start another: {problem}"
                raise RolloutError(request.request_id, problem) from error

    async def _run(self, request: RolloutRequest, burst: Burst | None) -> Any:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        prompt, knobs = request.to_engine()
        sampling = OmniDiffusionSamplingParams(**knobs, lora_request=self._lora, lora_scale=self._lora_scale)
        if burst is not None:
            sampling.extra_args["rollout_burst"] = burst
        outputs = self._omni.generate(prompt, sampling_params_list=[sampling], request_id=request.request_id)
        results = [output async for output in outputs]
        if not results:
            raise RolloutError(request.request_id, "the engine returned nothing")
        return results[-1]

    async def _fall_asleep(self) -> None:
        self._check_open()
        if self._asleep:
            return
        await self.call_worker("check_sleep")
        await self.call_worker("release_caches")
        self._asleep = True
        try:
            _check_acknowledged("sleep", await self._omni.sleep(level=_SLEEP_LEVEL))
        except BaseException:
            await self._omni.resume_generation()  # the engine's own gate would stay shut
            raise

    async def _wake(self) -> None:
        self._check_open()
        if self._asleep:
            _check_acknowledged("wake_up", await self._omni.wake_up())
            self._asleep = False

    async def _change(self, change: Callable[[], Coroutine[Any, Any, T]], version: int | None = None) -> T:
        async def checked() -> T:
            self._check_open()
            self._check_awake()
            return await change()

        return await self._gate.carry_out(checked, version=version)

    async def _check_merging(self) -> None:
        try:
            await self.call_worker("check_merging")
        except RolloutError as error:
            raise ConfigError(f"actor_rollout_ref.rollout.merge_lora=true: {error}") from error

    async def _set_lora(self, lora: Any, scale: float) -> None:
        old, self._lora, self._lora_scale = self._lora, lora, scale
        if old is not None:
            try:
                await self.call_worker("remove_lora", old.lora_int_id)
            except RolloutError as error:  # no reason to fail: requests name their adapter, and the next load evicts it
                logger.warning("%s; the adapter stays in memory", error)

    def _check_open(self, request_id: str | None = None) -> None:
        if self._closed:
            raise RolloutError(request_id, "the engine is closed; start another")

    def _check_awake(self, request_id: str | None = None) -> None:
        if self._asleep:
            raise RolloutError(request_id, "the engine is asleep; call wake_up() first")


def _check_version(version: Any) -> None:
    if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
        raise ValueError(f"version must be an integer, or None for one more than the old, got {version!r:.40}")


def _check_acknowledged(call: str, acknowledgements: Iterable[Any]) -> None:
    for ack in acknowledgements:
        if ack.status != "SUCCESS":
            raise RolloutError(None, f"{call} failed: {ack.error_msg}")
