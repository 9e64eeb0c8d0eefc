"""One rollout server, from the driver's side: what Ray reports, said in our words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.server import RolloutServer, ServerSettings, server_name
from verl_omni.workers.rollout.wire import unpack_results

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one server runs, as Ray takes it."""

    num_cpus: float = 1
    """CPUs that the server counts for."""
    num_gpus: float = 0
    """GPUs that it counts for; a part of one where it shares it."""
    scheduling_strategy: Any = None
    """E.g. the bundle of a placement group; None: Ray's default."""

    def needs(self) -> str:
        """What it takes, and how much of that is free, in words."""
        import ray

        free, wanted = ray.available_resources(), {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return " and ".join(f"{n:g} {name} (free: {free.get(name, 0):g})" for name, n in wanted.items() if n)


ABORT_GRACE_S = 30.0
"""How long a server may take to end what was aborted: one that hangs never does."""


class ServerDied(RolloutError):
    """The process or the engine of a server has ended."""


class ServerHandle:
    """A server's actor, from its start to its death: one that takes its place has a handle of its own."""

    def __init__(self, place: int, placement: Placement, actor: ray.actor.ActorHandle) -> None:
        self.place = place
        """Its number."""
        self.placement = placement
        """Where it runs."""
        self.name = server_name(place)
        """Of the actor."""
        self.node = ""
        """Id of the node on which it runs; known from :meth:`start` on."""
        self.died: ServerDied | None = None
        """Why it is used no more."""
        self.bursts: set[asyncio.Future[None]] = set()
        """Those that it runs; each is done when it is known what becomes of its requests."""
        self.retried = 0
        """Requests that its death took with it and that are run again."""
        self.failed = 0
        """Requests that it took with it and that are not: they were on a server that died before."""
        self.heard = 0.0
        """When its last result came, in the event loop's seconds."""
        self._actor = actor

    @classmethod
    def create(
        cls, settings: ServerSettings, replica: int, placement: Placement, env_vars: Mapping[str, str]
    ) -> ServerHandle:
        """Ask Ray for the process, which may take its time; nothing is loaded."""
        import ray

        options: dict[str, Any] = {
            "name": server_name(replica),
            "num_cpus": placement.num_cpus,
            "num_gpus": placement.num_gpus,
            "runtime_env": {"env_vars": dict(env_vars)},
        }
        if placement.scheduling_strategy is not None:
            options["scheduling_strategy"] = placement.scheduling_strategy
        remote = ray.remote(RolloutServer).options(**options).remote
        return cls(replica, placement, remote(settings, replica=replica))

    async def start(self, timeout_s: float) -> None:
        """Load its model; the engine itself gives up after `timeout_s`. Raises as :meth:`call` does."""
        self.node = await self.call("start", timeout_s)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of its methods. Raises ConfigError, :class:`ServerDied` or another :class:`RolloutError`."""
        import ray

        try:
            return await getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.RayError as error:
            raise self._told(error) from getattr(error, "cause", None)

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        """Submit `requests` as one burst; gives each result as it arrives.

        Raises as :meth:`call` does. Leaving early, or being cancelled, aborts the rest and waits until that is done, at
        most `ABORT_GRACE_S`.
        """
        import ray

        stream = self._actor.generate_group.remote(requests)
        try:
            async for reference in stream:
                for result in unpack_results(await reference):
                    yield result
        except ray.exceptions.RayError as error:
            raise self._told(error) from getattr(error, "cause", None)
        except (asyncio.CancelledError, GeneratorExit):
            ray.cancel(stream)
            with suppress(TimeoutError):
                await asyncio.wait_for(_ended(stream), ABORT_GRACE_S)
            raise

    def told(self) -> str:
        """What became of the requests that its death took with it."""
        again = f"requests run again: {self.retried}"
        return f"{again}, failed as they were on a dead server before: {self.failed}" if self.failed else again

    def kill(self) -> None:
        """End the process now."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)

    def _told(self, error: ray.exceptions.RayError) -> Exception:
        if tells_death(error):
            return ServerDied(None, f"{self.name} died: {_last_line(error)}")
        cause = getattr(error, "cause", None)
        if isinstance(cause, ConfigError):
            return cause
        return RolloutError(None, f"{self.name}: {str(cause or error) or repr(cause)}")


def tells_death(error: Exception) -> bool:
    """Whether this error, of Ray or ours, says that a process or its node has ended."""
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError

    return isinstance(error, (ServerDied, RayActorError, OutOfMemoryError, NodeDiedError))


def _last_line(error: Exception) -> str:
    """Where Ray tells the reason, without its guesses; the lines before hold ids."""
    lines = (line.partition(" Some common causes")[0].strip(" .") for line in reversed(str(error).splitlines()))
    return next(filter(None, lines), repr(error))


async def _ended(stream: Any) -> None:
    """Wait for a cancelled stream to end."""
    import ray

    try:
        async for _ in stream:
            pass
    except ray.exceptions.RayError:
        pass
