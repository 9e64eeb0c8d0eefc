"""Rollout servers that live, die and are replaced, from the driver's side.

Each server is watched from its start on. One whose process or engine has ended, or that does not answer in time, is
killed, and a fresh one of the same name is started in the same place; it joins when it has the policy that the others
serve. After `START_ATTEMPTS` failed starts in a row the place stays empty. One log line tells each of these events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from verl_omni.utils.text import one_line
from verl_omni.workers.rollout.handle import Placement, ServerDied, ServerHandle
from verl_omni.workers.rollout.request import RolloutError
from verl_omni.workers.rollout.server import ServerSettings
from verl_omni.workers.rollout.spread import LoadSpread

logger = logging.getLogger(__name__)

START_ATTEMPTS = 2
"""How often a fresh server is started before its place stays empty: one failure may be chance."""

LOOK_ROUND_S = 5.0
"""How long servers may take to say that they live before more work is dealt to them."""

Admit = Callable[[ServerHandle], Awaitable[None]]
"""Gives a fresh server the policy and calls :meth:`Fleet.join`, with no change of the policy in between."""


class Fleet:
    """The servers of a run, one a place."""

    def __init__(
        self,
        settings: ServerSettings,
        placements: Sequence[Placement],
        environment: Mapping[str, str],
        *,
        start_timeout_s: float,
        admit: Admit,
    ) -> None:
        self.spread = LoadSpread(len(placements))
        """Over the places whose server lives."""
        self.restarted = 0
        """Fresh servers that have joined."""
        self.closed = False
        self._settings, self._placements, self._environment = settings, placements, environment
        self._start_timeout_s, self._admit = start_timeout_s, admit
        self._servers = [self._create(place) for place in range(len(placements))]
        self._watches: list[asyncio.Task[None]] = []
        self._revivals: dict[int, asyncio.Task[None]] = {}
        self._may_start = asyncio.Event()
        self._may_start.set()

    async def start(self) -> None:
        """Start all, side by side. Raises as :func:`come_up` does; nothing is left running then."""
        try:
            await come_up(self._servers, self._settings.model_path, self._start_timeout_s)
        except BaseException:
            self._kill()
            raise
        self._watches = [asyncio.create_task(self._watch(server)) for server in self._servers]

    @property
    def living(self) -> list[ServerHandle]:
        """The servers that can be asked."""
        return [self._servers[place] for place in sorted(self.spread.load)]

    @property
    def names(self) -> list[str]:
        """Of all places' servers."""
        return [server.name for server in self._servers]

    def at(self, place: int) -> ServerHandle:
        """The server in that place."""
        return self._servers[place]

    async def someone(self) -> None:
        """Wait until a server lives. Raises :class:`ServerDied` if none is left, and none is being started."""
        while not self.spread.load or self.closed:
            if self.closed:
                raise RolloutError(None, "the servers are closed; start others")
            if not self._revivals:
                raise ServerDied(None, f"no server is left: {', '.join(self.names)} died")
            if not self._may_start.is_set():
                raise RolloutError(None, "all servers died asleep; call wake_up() first")
            await asyncio.wait(self._revivals.values(), return_when=asyncio.FIRST_COMPLETED)

    def lose(self, server: ServerHandle, error: ServerDied) -> None:
        """`server`, which had joined, is dead, whatever is left of it: have it replaced. May be called again."""
        if self.closed or server.died is not None or server not in self.living:
            return
        server.died = error
        self.spread.drop(server.place)
        self._revivals[server.place] = asyncio.create_task(self._revive(server))
        server.kill()  # ends the calls that wait for it, too

    def join(self, server: ServerHandle) -> None:
        """`server` is as the others are, and gets requests from now on."""
        self.spread.join(server.place)

    async def lives(self, server: ServerHandle) -> bool:
        """Whether the process and the engine of `server` run; if not, it is lost."""
        if server.died is not None:
            return False
        try:
            if await server.call("alive"):
                return True
            error = ServerDied(None, f"{server.name} died: its engine has ended")
        except ServerDied as died:
            error = died
        except Exception as problem:  # the method itself raises nothing
            error = ServerDied(None, f"{server.name} died: {problem}")
        self.lose(server, error)
        return False

    async def look_round(self) -> None:
        """Lose the servers whose death nobody has noticed yet: what kills one may have killed others."""
        looking = [asyncio.create_task(self.lives(server)) for server in self.living]
        if looking:
            await asyncio.wait(looking, timeout=LOOK_ROUND_S)
        for look in looking:  # at one that is slow, or hangs
            look.cancel()

    @property
    def starting(self) -> bool:
        """Whether a fresh server is being started."""
        return bool(self._revivals) and self._may_start.is_set()

    async def settled(self) -> None:
        """Wait until no server is being started."""
        while self.starting:
            await asyncio.wait(self._revivals.values())

    def hold_starts(self) -> None:
        """Start no fresh server until :meth:`resume_starts`."""
        self._may_start.clear()

    def resume_starts(self) -> None:
        """Undo :meth:`hold_starts`."""
        self._may_start.set()

    async def close(self, grace_s: float) -> None:
        """End all servers; kills those that have not ended `grace_s` later."""
        self.closed = True
        tasks = [*self._watches, *self._revivals.values()]
        for task in tasks:
            task.cancel()
        closing = [asyncio.create_task(server.call("close")) for server in self.living]
        try:
            if ending := [*tasks, *closing]:
                await asyncio.wait(ending, timeout=grace_s)
        finally:
            self._kill()  # ends the calls that wait for them, too
            for call in closing:
                call.cancel()
            await asyncio.gather(*tasks, *closing, return_exceptions=True)

    async def _watch(self, server: ServerHandle) -> None:
        try:
            error = ServerDied(None, f"{server.name} died: {await server.call('ended')}")
        except ServerDied as died:
            error = died
        except Exception as problem:  # whatever it is, nobody would see this server die
            error = ServerDied(None, f"{server.name} can't be watched: {problem}")
        self.lose(server, error)

    async def _revive(self, lost: ServerHandle) -> None:
        """Replace `lost`."""
        place, died = lost.place, time.monotonic()
        try:
            if lost.bursts:  # until it is known how many of its requests are run again
                await asyncio.wait(lost.bursts)
            logger.error("%s; %s; a fresh server takes its place", one_line(lost.died), lost.told())
            for attempt in range(1, START_ATTEMPTS + 1):
                await self._may_start.wait()
                if await self._start_fresh(place, attempt):
                    self.restarted += 1
                    logger.warning("%s serves again, %.1f s after it died", lost.name, time.monotonic() - died)
                    return
            logger.error("%s is left out; servers that go on: %d", lost.name, len(self.spread.load))
        finally:
            del self._revivals[place]

    async def _start_fresh(self, place: int, attempt: int) -> bool:
        try:
            server = self._servers[place] = self._create(place)
            await come_up([server], self._settings.model_path, self._start_timeout_s)
            await self._admit(server)
        except Exception as error:
            self._servers[place].kill()  # if none could be made, the dead one
            text = "%s did not start again, attempt %d of %d: %s"
            logger.error(text, self._servers[place].name, attempt, START_ATTEMPTS, one_line(error))
            return False
        self._watches.append(asyncio.create_task(self._watch(server)))
        return True

    def _create(self, place: int) -> ServerHandle:
        return ServerHandle.create(self._settings, place, self._placements[place], self._environment)

    def _kill(self) -> None:
        for server in self._servers:
            server.kill()


async def come_up(servers: Sequence[ServerHandle], model_path: str, timeout_s: float) -> None:
    """Wait until each of `servers` has loaded its model.

    Raises TimeoutError telling what it waited for, and what :meth:`ServerHandle.start` raises.
    """
    processes = [asyncio.create_task(server.call("alive")) for server in servers]
    starts = [asyncio.create_task(server.start(timeout_s)) for server in servers]
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*starts)
    except TimeoutError as error:
        states = [
            f"{server.name} is loading {model_path}"
            if process.done()
            else f"{server.name} has no process yet, as it needs {server.placement.needs()}"
            for server, process, start in zip(servers, processes, starts, strict=True)
            if start.cancelled()
        ]
        raise TimeoutError(f"not up after {timeout_s:g} s: {'; '.join(states)}") from error
    finally:
        for task in (*processes, *starts):
            task.cancel()
        await asyncio.gather(*processes, *starts, return_exceptions=True)
