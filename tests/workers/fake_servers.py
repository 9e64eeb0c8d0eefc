"""Rollout servers without a process, that die when a test says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.trainer.samples import scored
from verl_omni.workers.rollout import fleet
from verl_omni.workers.rollout.handle import Placement, ServerDied, ServerHandle
from verl_omni.workers.rollout.replicas import RolloutReplicas
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample


class Script:
    """What goes wrong, and the servers that were made."""

    def __init__(self) -> None:
        self.made: list[FakeServer] = []
        self.kills: Counter[str] = Counter()
        """Request → how many servers die of it still."""
        self.breaks: Counter[str] = Counter()
        """The same, of engines whose process lives."""
        self.stuck: set[str] = set()
        """Requests and methods that hang the first server that meets them."""
        self.starts: list[bool] = []
        """Whether the next starts succeed; then all do."""
        self.refused: set[int] = set()
        """Policies that no server takes."""

    def create(self, settings: Any, place: int, placement: Placement, environment: Mapping[str, str]) -> FakeServer:
        """As :meth:`ServerHandle.create`."""
        self.made.append(FakeServer(place, placement, self))
        return self.made[-1]

    async def start(self, monkeypatch: pytest.MonkeyPatch, servers: int, **timeouts: float | None) -> RolloutReplicas:
        """Servers that follow this script."""
        monkeypatch.setattr(fleet.ServerHandle, "create", self.create)
        monkeypatch.setattr("verl_omni.workers.rollout.replicas.put", _put)
        settings = type("Settings", (), {"model_path": "a/b", "plan": _Plan})
        return await RolloutReplicas.start(settings, [Placement()] * servers, **timeouts)


class FakeServer(ServerHandle):
    """Gives a sample a request, each in a turn of the event loop of its own."""

    def __init__(self, place: int, placement: Placement, script: Script) -> None:
        super().__init__(place, placement, None)
        self.calls: list[tuple[Any, ...]] = []
        self._script = script
        self._version = 0
        self._is_alive = True
        self._end = asyncio.Event()
        self._reason = ""

    def die(self, reason: str = "shot") -> None:
        """End the process."""
        self._reason = self._reason or reason
        self._end.set()

    def kill(self) -> None:
        self.die("killed by its fleet")

    async def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, *arguments))
        if method == "ended" or method in self._script.stuck:
            self._script.stuck.discard(method)
            await self._end.wait()
        await asyncio.sleep(0)
        self._check()
        answer = getattr(self, f"_{method}", None)
        return answer(*arguments) if answer else None

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        self.calls.append(("generate", *(request.request_id for request in requests)))
        for request in requests:
            name = request.request_id
            if name in self._script.stuck:
                self._script.stuck.discard(name)
                await self._end.wait()
            await asyncio.sleep(0)
            if self._script.kills[name]:
                self._script.kills[name] -= 1
                self.die(f"{name} killed it")
            if self._script.breaks[name]:
                self._script.breaks[name] -= 1
                self._is_alive = False
            self._check()
            if self._is_alive:
                yield replace(scored(name).sample, policy_version=self._version)
            else:
                yield RolloutError(name, "no worker left")

    def _check(self) -> None:
        if self._end.is_set():
            raise ServerDied(None, f"{self.name} died: {self._reason}")

    def _start(self, timeout_s: float) -> str:
        if self._script.starts and not self._script.starts.pop(0):
            raise RolloutError(None, f"{self.name}: no\n  memory")
        return "node"

    def _alive(self) -> bool:
        return self._is_alive

    def _stage_weights(self, references: Sequence[Any]) -> str:
        return "/file"

    def _set_weights(self, version: int, files: Mapping[str, str]) -> None:
        self._set_lora(version)

    def _set_lora(self, version: int, *rest: Any) -> None:
        if version in self._script.refused:
            raise RolloutError(None, "it does not fit")
        self._version = version

    def _policy_version(self) -> int:
        return self._version

    def methods(self) -> list[str]:
        """What it was asked for, in order."""
        return [call[0] for call in self.calls]


class _Plan:
    notes = ()

    @staticmethod
    def log_line() -> str:
        return "rollout plan"


async def _put(tensors: Any) -> str:
    return f"reference to {tensors}"
