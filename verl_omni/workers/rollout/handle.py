"""One rollout server, from the driver's side: what Ray reports, said in our words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.server import RolloutServer, ServerSettings, server_name
from verl_omni.workers.rollout.wire import unpack_sample

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


class ServerDied(RolloutError):
    """The process or the engine of a server has ended."""


class ServerHandle:
    """A server's actor."""

    def __init__(self, name: str, actor: ray.actor.ActorHandle) -> None:
        self.name = name
        """Of the actor."""
        self.node = ""
        """Id of the node on which it runs; known from :meth:`start` on."""
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
        return cls(server_name(replica), remote(settings, replica=replica))

    async def start(self) -> None:
        """Load its model. Raises as :meth:`call` does."""
        self.node = await self.call("start")

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of its methods. Raises ConfigError, :class:`ServerDied` or another :class:`RolloutError`."""
        import ray

        try:
            return await getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.RayError as error:
            raise self._told(error) from getattr(error, "cause", None)

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        """Submit `requests` as one burst; gives each result as it arrives.

        Raises as :meth:`call` does. Leaving early, or being cancelled, aborts the rest and waits until that is done.
        """
        import ray

        stream = self._actor.generate_group.remote(requests)
        try:
            async for reference in stream:
                result = await reference
                yield result if isinstance(result, RolloutError) else unpack_sample(result)
        except ray.exceptions.RayError as error:
            raise self._told(error) from getattr(error, "cause", None)
        except (asyncio.CancelledError, GeneratorExit):
            ray.cancel(stream)
            await _ended(stream)
            raise

    def kill(self) -> None:
        """End the process now."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)

    def _told(self, error: ray.exceptions.RayError) -> Exception:
        import ray

        if isinstance(error, ray.exceptions.RayActorError):
            return ServerDied(None, f"{self.name} died: {_last_line(error)}")
        cause = getattr(error, "cause", None)
        if isinstance(cause, ConfigError):
            return cause
        return RolloutError(None, f"{self.name}: {str(cause or error) or repr(cause)}")


def _last_line(error: Exception) -> str:
    """Where Ray tells the reason; the lines before hold ids."""
    return next((line.strip(" .") for line in reversed(str(error).splitlines()) if line.strip(" .")), repr(error))


async def _ended(stream: Any) -> None:
    """Wait for a cancelled stream to end."""
    import ray

    try:
        async for _ in stream:
            pass
    except ray.exceptions.RayError:
        pass
