"""Several rollout servers as one, from the driver's side.

The groups of a step are dealt out up front (:mod:`~verl_omni.workers.rollout.spread`) and each server gets its share in
one call, so that its engine fills its batches from the first step on; results come back as they finish.

A server whose process or engine dies is replaced (:mod:`~verl_omni.workers.rollout.fleet`), and what it was doing is
done again (:mod:`~verl_omni.workers.rollout.bursts`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.config import DiffusionRolloutConfig
from verl_omni.workers.rollout.bursts import Bursts, Groups, Results
from verl_omni.workers.rollout.fleet import Fleet
from verl_omni.workers.rollout.handle import Placement, ServerDied, ServerHandle
from verl_omni.workers.rollout.request import RolloutError, RolloutSample
from verl_omni.workers.rollout.served_policy import ServedLora, ServedPolicy, put
from verl_omni.workers.rollout.server import ServerSettings

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 30.0
"""How long `close` waits for the servers before it kills them."""
POLICY_KINDS = ("lora", "weights")


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What deaths of servers have led to."""

    servers_restarted: int = 0
    """Fresh servers that took the place of dead ones."""
    requests_retried: int = 0
    """Requests that were run again."""


class RolloutReplicas:
    """Running servers. Made by :meth:`start`; to be closed, or used with ``async with``."""

    def __init__(
        self,
        settings: ServerSettings,
        placements: Sequence[Placement],
        environment: Mapping[str, str],
        *,
        start_timeout_s: float,
        result_timeout_s: float | None,
        sync_timeout_s: float | None,
    ) -> None:
        """Asks Ray for the processes; use :meth:`start`."""
        self._fleet = Fleet(settings, placements, environment, start_timeout_s=start_timeout_s, admit=self._admit)
        self._bursts = Bursts(self._fleet, result_timeout_s=result_timeout_s)
        self._sync_timeout_s = sync_timeout_s
        self._policy = ServedPolicy()
        self._changing = asyncio.Lock()
        self._told = Recovery()

    @classmethod
    async def start(
        cls,
        settings: ServerSettings,
        placements: Sequence[Placement],
        *,
        env_vars: Mapping[str, str] | None = None,
        start_timeout_s: float = DiffusionRolloutConfig.start_timeout_s,
        result_timeout_s: float | None = DiffusionRolloutConfig.result_timeout_s,
        sync_timeout_s: float | None = DiffusionRolloutConfig.sync_timeout_s,
    ) -> RolloutReplicas:
        """Start one server a placement, side by side. Ray must be running.

        `env_vars` are set in the servers' environment; the timeouts are those of
        :class:`~verl_omni.workers.config.DiffusionRolloutConfig`. Logs the plan once a server. Raises ConfigError for
        the external module; TimeoutError telling what it waited for; :class:`RolloutError` for what else went wrong in
        a server. Nothing is left running then.
        """
        quiet = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "VLLM_NO_USAGE_STATS": "1"}
        replicas = cls(
            settings,
            placements,
            {**quiet, **(env_vars or {})},
            start_timeout_s=start_timeout_s,
            result_timeout_s=result_timeout_s,
            sync_timeout_s=sync_timeout_s,
        )
        await replicas._fleet.start()
        for name in replicas._fleet.names:
            logger.info("%s: %s", name, settings.plan.log_line())
        for note in settings.plan.notes:
            logger.warning(note)
        return replicas

    @property
    def living(self) -> list[str]:
        """Names of the servers that serve now: those that have not died, and those that took the place of dead ones."""
        return [server.name for server in self._fleet.living]

    def recovery(self, reset: bool = False) -> Recovery:
        """What deaths led to since the start or the last reset."""
        total = Recovery(servers_restarted=self._fleet.restarted, requests_retried=self._bursts.retried)
        since, self._told = self._told, total if reset else self._told
        return Recovery(
            servers_restarted=total.servers_restarted - since.servers_restarted,
            requests_retried=total.requests_retried - since.requests_retried,
        )

    async def generate_groups(self, groups: Groups) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        """Submit all `groups`, each to one server; gives every result as it arrives.

        A request that fails gives its error, also if the servers die that it was on. Leaving the loop early aborts the
        rest. Raises :class:`ServerDied` if no server is left.
        """
        await self._fleet.someone()
        results: Results = asyncio.Queue()
        serving = asyncio.create_task(self._bursts.serve(groups, results))
        try:
            while (result := await results.get()) is not None:
                yield result
            await serving  # for what it raised, if it ended before its time
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def sync(self, kind: str, version: int, payload: Any, *, scale: float = 1.0) -> None:
        """Hand a policy to all servers; samples made with it carry `version`. Waits for the trajectories in flight.

        It is kept for servers that are started later, to replace dead ones.

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
        new: dict[str, Any]
        if kind == "lora":
            config, tensors = payload
            new = {"lora": ServedLora(config=dict(config), tensors=await put(tensors), scale=scale)}
        else:
            new = {"weights": [await put(payload)] if isinstance(payload, Mapping) else list(payload)}
        async with self._change():
            before, self._policy = self._policy, dataclasses.replace(self._policy, version=version, **new)
            try:
                await (self._set_lora() if kind == "lora" else self._set_weights())
            except BaseException as error:
                self._policy = before
                if isinstance(error, ServerDied) or not isinstance(error, RolloutError):
                    raise
                message = f"policy {version} was not taken, there the old one serves on: {error.message}"
                raise RolloutError(None, message) from error

    async def sleep(self) -> None:
        """Give the servers' device memory back. Requests fail until :meth:`wake_up`.

        Fresh servers that are being started are waited for, and until then none is started: that would take memory.
        """
        while True:
            await self._fleet.settled()
            async with self._change():
                if not self._fleet.starting:
                    self._fleet.hold_starts()
                    await self._everywhere("sleep")
                    return

    async def wake_up(self) -> None:
        """Undo :meth:`sleep`."""
        self._fleet.resume_starts()
        async with self._change():
            await self._everywhere("wake_up")

    async def clear_kv_cache(self) -> None:
        """Drop the prompt embeddings that the servers keep."""
        await self._when_up("clear_kv_cache")

    async def abort_all_requests(self) -> None:
        """End all requests in flight as aborted."""
        self._bursts.abort()
        await self._when_up("abort_all_requests")

    async def policy_versions(self) -> dict[str, int]:
        """Version of the policy that each living server serves, by its name."""
        return await self._when_up("policy_version")

    async def alive(self) -> dict[str, bool]:
        """Whether each server's process and engine run, by its name."""
        living = self._fleet.living
        answers = await asyncio.gather(*map(self._fleet.lives, living))
        found = {server.name: lives for server, lives in zip(living, answers, strict=True)}
        return dict.fromkeys(self._fleet.names, False) | found

    async def stats(self, reset: bool = False) -> RolloutStats:
        """What the living servers counted, summed up; what dead ones counted is lost."""
        return RolloutStats.merged((await self._when_up("stats", reset)).values())

    async def close(self) -> None:
        """End the requests in flight and the servers. May be called again."""
        if not self._fleet.closed:
            await self._fleet.close(CLOSE_GRACE_S)

    async def __aenter__(self) -> RolloutReplicas:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """No other change of what the servers serve, and at least one server to start with."""
        while True:
            await self._fleet.someone()
            async with self._changing:
                if self._fleet.living:
                    yield
                    return

    async def _set_lora(self) -> None:
        await self._everywhere("set_lora", *self._policy.lora_arguments())

    async def _set_weights(self) -> None:
        """They are written once a node, into a file that all its servers read: even one copy is large."""
        files: dict[str, str] = {}
        try:
            while writers := self._writers(known=files):
                written = await self._everywhere("stage_weights", self._policy.weights, servers=writers)
                files |= {server.node: written[server.name] for server in writers if server.name in written}
            await self._everywhere("set_weights", self._policy.version, files)
        finally:
            await self._drop_weights(self._fleet.living, list(files.values()))

    async def _drop_weights(self, servers: Sequence[ServerHandle], files: Sequence[str]) -> None:
        """Asks all `servers`, as the one that wrote a file may have died."""
        dropping = (self._ask(server, "drop_weights", files) for server in servers)
        await asyncio.gather(*dropping, return_exceptions=True)

    def _writers(self, *, known: Collection[str]) -> list[ServerHandle]:
        """The first living server of each node that is not `known`."""
        first: dict[str, ServerHandle] = {}
        for server in self._fleet.living:
            first.setdefault(server.node, server)
        return [server for node, server in first.items() if node not in known]

    async def _admit(self, server: ServerHandle) -> None:
        """Let a fresh server in, once it serves what the others do."""
        async with self._changing:
            policy = self._policy
            if policy.weights:
                file = await self._ask(server, "stage_weights", policy.weights)
                try:
                    await self._ask(server, "set_weights", policy.version, {server.node: file})
                finally:
                    await self._drop_weights([server, *self._fleet.living], [file])
            if policy.lora is not None:
                await self._ask(server, "set_lora", *policy.lora_arguments())
            self._fleet.join(server)

    async def _everywhere(
        self, method: str, *arguments: Any, servers: Sequence[ServerHandle] | None = None
    ) -> dict[str, Any]:
        """Call all living servers, or these; what they answer, by name. Raises :class:`RolloutError` if one fails.

        A server that dies meanwhile is no failure, as the one that takes its place will be as the others are.
        """
        called = self._fleet.living if servers is None else servers
        calls = (self._ask(server, method, *arguments) for server in called)
        answers: dict[str, Any] = {}
        failures: list[BaseException] = []
        for server, outcome in zip(called, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, ServerDied):
                self._fleet.lose(server, outcome)
            elif isinstance(outcome, BaseException):
                failures.append(outcome)
            else:
                answers[server.name] = outcome
        if failures:
            reasons = "; ".join(map(str, failures))
            raise RolloutError(None, f"{len(failures)} of {len(called)} servers failed: {reasons}") from failures[0]
        return answers

    async def _when_up(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The same once there is a server. Raises :class:`ServerDied` if none is left."""
        await self._fleet.someone()
        return await self._everywhere(method, *arguments)

    async def _ask(self, server: ServerHandle, method: str, *arguments: Any) -> Any:
        """Call `server`. Raises as :meth:`ServerHandle.call` does; ServerDied also if it does not answer in time."""
        limit = self._sync_timeout_s
        try:
            async with asyncio.timeout(limit):
                try:
                    return await server.call(method, *arguments)
                except RolloutError as error:
                    if isinstance(error, ServerDied) or await self._fleet.lives(server):
                        raise
                    raise ServerDied(None, f"{server.name} died: {error.message}") from error
        except TimeoutError as error:
            key = f"{DiffusionRolloutConfig.KEY}.sync_timeout_s={limit:g}"
            raise ServerDied(None, f"{server.name} did not answer {method} for {limit:g} s ({key})") from error
