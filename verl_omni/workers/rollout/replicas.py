"""Several rollout servers as one, from the driver's side.

The groups of a step are dealt out up front (:mod:`~verl_omni.workers.rollout.spread`) and each server gets its share in
one call, so that its engine fills its batches from the first step on; results come back one by one.

A server whose process or engine dies is left out from then on: what it was doing ends as errors that say so, the others
go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.config import DiffusionRolloutConfig
from verl_omni.workers.rollout.handle import Placement, ServerDied, ServerHandle
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.server import ServerSettings
from verl_omni.workers.rollout.spread import LoadSpread, work
from verl_omni.workers.rollout.wire import pack

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 30.0
"""How long `close` waits for the servers before it kills them."""
POLICY_KINDS = ("lora", "weights")


class RolloutReplicas:
    """Running servers. Made by :meth:`start`; to be closed, or used with ``async with``."""

    def __init__(self, servers: Sequence[ServerHandle]) -> None:
        self._servers = list(servers)
        self._spread = LoadSpread(len(self._servers))
        self._closed = False

    @classmethod
    async def start(
        cls,
        settings: ServerSettings,
        placements: Sequence[Placement],
        *,
        env_vars: Mapping[str, str] | None = None,
        start_timeout_s: float = DiffusionRolloutConfig.start_timeout_s,
    ) -> RolloutReplicas:
        """Start one server a placement, side by side. Ray must be running.

        `env_vars` are set in the servers' environment. Logs the plan once a server. Raises ConfigError for the external
        module; TimeoutError telling what it waited for; :class:`RolloutError` for what else went wrong in a server.
        Nothing is left running then.
        """
        quiet = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "VLLM_NO_USAGE_STATS": "1"}
        environment = {**quiet, **(env_vars or {})}
        replicas = cls([ServerHandle.create(settings, i, where, environment) for i, where in enumerate(placements)])
        try:
            await replicas._come_up(settings, placements, start_timeout_s)
        except BaseException:
            replicas._kill()
            raise
        for server in replicas._servers:
            logger.info("%s: %s", server.name, settings.plan.log_line())
        for note in settings.plan.notes:
            logger.warning(note)
        return replicas

    @property
    def living(self) -> list[str]:
        """Names of the servers that have not died."""
        return [self._servers[i].name for i in self._spread.load]

    async def generate_groups(
        self, groups: Sequence[Sequence[RolloutRequest]]
    ) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        """Submit all `groups`, each to one server; gives every result as it arrives.

        A request that fails gives its error, also if its server dies. Leaving the loop early aborts the rest. Raises
        :class:`ServerDied` if no server is left.
        """
        self._check_usable()
        dealt = self._spread.deal([sum(map(work, group)) for group in groups])
        results: asyncio.Queue[RolloutSample | RolloutError] = asyncio.Queue()
        bursts = [
            asyncio.create_task(self._burst(i, [request for group in mine for request in groups[group]], results))
            for i, mine in dealt.items()
        ]
        try:
            for _ in range(sum(map(len, groups))):
                yield await results.get()
        finally:
            for burst in bursts:
                burst.cancel()
            await asyncio.gather(*bursts, return_exceptions=True)

    async def sync(self, kind: str, version: int, payload: Any, *, scale: float = 1.0) -> None:
        """Hand a policy to all servers; samples made with it carry `version`. Waits for the trajectories in flight.

        Args:
            kind: "lora": in place of the LoRA before. "weights": all those of the transformer.
            payload: LoRA: PEFT configuration and tensors by name. Weights: the tensors by name, or references to
                objects in Ray's store with some of them each. Names are as the engine's methods take them.
            scale: of the LoRA.

        Raises :class:`RolloutError` if a server did not take it: that one serves its old policy on, and the others the
        new one. If weights could not be handed to a node, no server took them.
        """
        if kind not in POLICY_KINDS:
            raise ValueError(f"kind={kind!r}: use one of {', '.join(POLICY_KINDS)}")
        try:
            if kind == "lora":
                config, tensors = payload
                await self._everywhere("set_lora", version, dict(config), await asyncio.to_thread(_put, tensors), scale)
            else:
                in_store = [await asyncio.to_thread(_put, payload)] if isinstance(payload, Mapping) else list(payload)
                await self._set_weights(version, in_store)
        except ServerDied:
            raise
        except RolloutError as error:
            message = f"policy {version} was not taken, there the old one serves on: {error.message}"
            raise RolloutError(None, message) from error

    async def _set_weights(self, version: int, references: list[ray.ObjectRef]) -> None:
        """They are written once a node, into a file that all its servers read: even one copy is large."""
        files: dict[str, str] = {}
        try:
            while writers := self._writers(known=files):
                written = await self._everywhere("stage_weights", references, servers=writers)
                files |= {server.node: written[server.name] for server in self._servers if server.name in written}
            await self._everywhere("set_weights", version, files)
        finally:
            dropping = (self._servers[i].call("drop_weights", list(files.values())) for i in self._spread.load)
            await asyncio.gather(*dropping, return_exceptions=True)

    def _writers(self, *, known: Collection[str]) -> list[int]:
        """The first living server of each node that is not `known`."""
        first: dict[str, int] = {}
        for i in self._spread.load:
            first.setdefault(self._servers[i].node, i)
        return [i for node, i in first.items() if node not in known]

    async def sleep(self) -> None:
        """Give the servers' device memory back. Requests fail until :meth:`wake_up`."""
        await self._everywhere("sleep")

    async def wake_up(self) -> None:
        """Undo :meth:`sleep`."""
        await self._everywhere("wake_up")

    async def clear_kv_cache(self) -> None:
        """Drop the prompt embeddings that the servers keep."""
        await self._everywhere("clear_kv_cache")

    async def abort_all_requests(self) -> None:
        """End all requests in flight as aborted."""
        await self._everywhere("abort_all_requests")

    async def policy_versions(self) -> dict[str, int]:
        """Version of the policy that each living server serves, by its name."""
        return await self._everywhere("policy_version")

    async def alive(self) -> dict[str, bool]:
        """Whether each server's process and engine run, by its name."""
        await asyncio.gather(*map(self._check_engine, self._spread.load))
        return {server.name: i in self._spread.load for i, server in enumerate(self._servers)}

    async def stats(self, reset: bool = False) -> RolloutStats:
        """What the living servers counted, summed up."""
        return RolloutStats.merged((await self._everywhere("stats", reset)).values())

    async def close(self) -> None:
        """End the requests in flight and the servers. May be called again."""
        if self._closed:
            return
        self._closed = True
        closing = [asyncio.create_task(self._servers[i].call("close")) for i in self._spread.load]
        try:
            if closing:
                await asyncio.wait(closing, timeout=CLOSE_GRACE_S)
        finally:
            for task in closing:
                task.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
            self._kill()

    async def __aenter__(self) -> RolloutReplicas:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _burst(
        self, i: int, requests: Sequence[RolloutRequest], results: asyncio.Queue[RolloutSample | RolloutError]
    ) -> None:
        """Run `requests` on server `i`; puts exactly one result each, unless cancelled."""
        costs = {request.request_id: work(request) for request in requests}
        unfinished = Counter(request.request_id for request in requests)
        problem = "its server gave no result"
        try:
            async with aclosing(self._servers[i].generate(requests)) as stream:
                async for result in stream:
                    request_id = str(result.request_id)
                    unfinished[request_id] -= 1
                    self._spread.finish(i, costs[request_id])
                    if isinstance(result, RolloutError):
                        await self._check_engine(i)
                    results.put_nowait(result)
        except Exception as error:  # whatever it is, who waits for these results must not wait forever
            self._note(i, error)
            problem = error.message if isinstance(error, RolloutError) else f"{self._servers[i].name}: {error!r}"
        finally:
            for request_id in unfinished.elements():
                self._spread.finish(i, costs[request_id])
        for request_id in unfinished.elements():
            results.put_nowait(RolloutError(request_id, problem))

    async def _everywhere(self, method: str, *arguments: Any, servers: Collection[int] | None = None) -> dict[str, Any]:
        """Call all living servers, or these; what they answer, by name. Raises :class:`RolloutError` if one fails.

        A server that dies meanwhile is left out; if none is left, :class:`ServerDied`.
        """
        self._check_usable()
        called = list(self._spread.load if servers is None else servers)
        calls = (self._servers[i].call(method, *arguments) for i in called)
        answers: dict[str, Any] = {}
        failures: list[BaseException] = []
        for i, outcome in zip(called, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, ServerDied):
                self._note(i, outcome)
            elif isinstance(outcome, BaseException):
                failures.append(outcome)
            else:
                answers[self._servers[i].name] = outcome
        if failures:
            reasons = "; ".join(map(str, failures))
            raise RolloutError(None, f"{len(failures)} of {len(called)} servers failed: {reasons}") from failures[0]
        self._check_usable()
        return answers

    async def _check_engine(self, i: int) -> None:
        """Leave server `i` out if its engine no longer runs."""
        try:
            if not await self._servers[i].call("alive"):
                raise ServerDied(None, f"{self._servers[i].name} died: its engine has ended")
        except RolloutError as error:
            self._note(i, error)

    def _note(self, i: int, error: Exception) -> None:
        """Leave server `i` out from now on if that is what `error` means."""
        if isinstance(error, ServerDied):
            if i in self._spread.load and not self._closed:
                logger.error("%s; it gets no more requests", error)
            self._spread.drop(i)

    def _check_usable(self) -> None:
        if self._closed:
            raise RolloutError(None, "the servers are closed; start others")
        if not self._spread.load:
            raise ServerDied(None, f"no server is left: {', '.join(server.name for server in self._servers)} died")

    async def _come_up(self, settings: ServerSettings, placements: Sequence[Placement], timeout_s: float) -> None:
        """Wait until every server has loaded its model."""
        processes = [asyncio.create_task(server.call("alive")) for server in self._servers]
        starts = [asyncio.create_task(server.start()) for server in self._servers]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*starts)
        except TimeoutError as error:
            states = [
                f"{server.name} is loading {settings.model_path}"
                if process.done()
                else f"{server.name} has no process yet, as it needs {placement.needs()}"
                for server, placement, process, start in zip(self._servers, placements, processes, starts, strict=True)
                if start.cancelled()
            ]
            raise TimeoutError(f"not up after {timeout_s:g} s: {'; '.join(states)}") from error
        finally:
            for task in (*processes, *starts):
                task.cancel()
            await asyncio.gather(*processes, *starts, return_exceptions=True)

    def _kill(self) -> None:
        for server in self._servers:
            server.kill()


def _put(tensors: Mapping[str, Any]) -> ray.ObjectRef:
    """`tensors` in Ray's object store."""
    import ray

    return ray.put(pack(tensors))
