"""Plays the rounds of a workload to a real engine and notes how each request ended."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from verl_omni.testing.soak.checks import CANCELLED, Flight, Outcome
from verl_omni.testing.soak.policies import Policies
from verl_omni.testing.soak.workload import Action, Job, Kill, Policy, Refuse, Round, Send, Sleep, Stop, Swap
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.request import RolloutError, RolloutSample

POLL_S = 0.001
"""Between two looks at how far the round is."""
LIMITING = ("no memory", "scarce")
"""Faults after which the engine runs fewer rows at a time, until its caches are released."""
NOTICED_S = 30.0
"""Within so many seconds of a kill everything in flight must have ended: the engine looks every 5 s."""
WORKER = "DiffusionWorker"
"""In the name of the engine's process."""


class Hang(RuntimeError):
    """Something did not end in time."""


@dataclass(kw_only=True)
class Played:
    """What became of one round."""

    flights: list[Flight] = field(default_factory=list)
    """First attempts and retries."""
    problems: list[str] = field(default_factory=list)
    """What went wrong beside the requests."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("swaps", "refused", "sleeps", "kills"), 0))
    """What happened, how often."""
    death_s: float | None = None
    """Seconds from the kill to the end of the last request in flight."""


class Driver:
    """One engine after the other under one policy, which each takes over from the one before."""

    def __init__(self, policies: Policies, start: Callable[[], Awaitable[RolloutEngine]], *, deadline_s: float) -> None:
        self.policy = Policy()
        """In force."""
        self.version = 0
        """Its version."""
        self.versions: dict[int, Policy] = {0: self.policy}
        """Every version there was."""
        self.life = 0
        """Number of the engine's process."""
        self._policies = policies
        self._start_engine = start
        self._deadline_s = deadline_s
        self._engine: RolloutEngine | None = None
        self._changing = asyncio.Lock()
        self._sleeping = False
        self._now = Played()
        self._singles: dict[str, asyncio.Task[None]] = {}

    @property
    def engine(self) -> RolloutEngine:
        """The engine of now."""
        assert self._engine is not None, "start() comes first"
        return self._engine

    async def start(self) -> None:
        """Start the first engine, or the next one after the last was closed; it takes over the policy."""
        self._engine = await self._start_engine()
        if self.version:
            await self._policies.install(self._engine, self.policy, self.version)

    async def install(self, policy: Policy) -> None:
        """Make `policy` that of the engine, as a new version, whatever there was before."""
        self._took(policy)
        await self.within(self._policies.install(self.engine, policy, self.version), f"the policy {policy}")

    async def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            await self._engine.close()

    async def within(self, work: Awaitable[object], what: str) -> object:
        """`work`, if it ends in time. Raises :class:`Hang` naming `what`."""
        try:
            return await asyncio.wait_for(work, self._deadline_s)
        except TimeoutError as error:
            raise Hang(f"{what} did not end within {self._deadline_s:g} s") from error

    async def play(self, script: Round) -> Played:
        """Play a round, with one retry of what ended because the engine died or slept.

        Raises :class:`Hang` if something does not end in time.
        """
        self._now, self._singles = Played(), {}
        await self._in_time(self._actions(script))
        if self._now.counts["kills"]:
            await self.within(self._replace_engine(), "the start of a fresh engine")
        if retries := tuple(flight.job for flight in self._now.flights if flight.to_retry):
            await self._in_time(self._actions((Send(jobs=retries),)))
        if any(flight.job.fault in LIMITING for flight in self._now.flights):
            await self.within(self.engine.release_caches(), "release_caches")
        return self._now

    async def _in_time(self, actions: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(actions, self._deadline_s)
        except TimeoutError as error:
            names = ", ".join(flight.name for flight in self._in_flight()) or "no request, but an action"
            raise Hang(f"not ended within {self._deadline_s:g} s: {names}") from error

    async def _actions(self, script: Iterable[Action]) -> None:
        tasks: list[asyncio.Task[None]] = []
        for action in script:
            while sum(bool(f.outcomes) for f in self._now.flights) < action.after and self._in_flight():
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(action.wait_s)
            tasks += self._begin(action)
        await asyncio.gather(*tasks)

    def _begin(self, action: Action) -> list[asyncio.Task[None]]:
        match action:
            case Send():
                return self._send(action)
            case Stop():
                return [asyncio.create_task(self._stop(action))]
            case Swap():
                return [asyncio.create_task(self._swap(action.policy))]
            case Refuse():
                return [asyncio.create_task(self._refuse(action.kind))]
            case Sleep():
                return [asyncio.create_task(self._sleep())]
            case Kill():
                return [asyncio.create_task(self._kill())]
        raise ValueError(f"no such action: {action}")

    # ---- requests

    def _send(self, action: Send) -> list[asyncio.Task[None]]:
        flights = [self._takes_off(job) for job in action.jobs]
        if action.burst or action.leave_after is not None:
            burst = asyncio.create_task(self._burst(flights, action.leave_after))
            if action.leave_after == 0:
                asyncio.get_running_loop().call_later(action.wait_s, burst.cancel)
            return [burst]
        singles = {flight.name: asyncio.create_task(self._single(flight)) for flight in flights}
        self._singles |= singles
        return list(singles.values())

    def _takes_off(self, job: Job) -> Flight:
        flight = Flight(job=job, low=self.engine.policy_version, slept=self._sleeping)
        self._now.flights.append(flight)
        return flight

    def _in_flight(self) -> list[Flight]:
        return [flight for flight in self._now.flights if not flight.outcomes]

    def _ends(self, flight: Flight, outcome: Outcome) -> None:
        flight.outcomes.append(outcome)
        flight.high = self.engine.policy_version

    async def _single(self, flight: Flight) -> None:
        outcome: Outcome
        try:
            outcome = await self.engine.generate(flight.job.request)
        except asyncio.CancelledError:
            if not flight.stopped:
                raise
            outcome = CANCELLED
        except Exception as error:
            outcome = error
        self._ends(flight, outcome)

    async def _burst(self, flights: list[Flight], leave_after: int | None) -> None:
        by_name = {flight.name: flight for flight in flights}
        problem: Exception | None = None
        left = False
        try:
            async with aclosing(self.engine.generate_all([flight.job.request for flight in flights])) as results:
                async for result in results:
                    flight = by_name.get(str(result.request_id))
                    if flight is None:
                        self._now.problems.append(f"a burst gave a result that is none of its requests': {result}")
                    else:
                        self._ends(flight, result)
                    if leave_after and sum(bool(flight.outcomes) for flight in flights) >= leave_after:
                        left = True
                        break
        except asyncio.CancelledError:
            if leave_after != 0:
                raise
            left = True
        except Exception as error:
            problem = error
        for flight in flights:
            if not flight.outcomes and (left or problem is not None):
                flight.stopped = left
                self._ends(flight, CANCELLED if problem is None else problem)

    async def _stop(self, action: Stop) -> None:
        ids = action.request_ids
        for flight in self._in_flight():
            if ids is None or flight.name in ids:
                flight.stopped = True
                if action.cancel:
                    self._singles[flight.name].cancel()
        if not action.cancel:
            await self.engine.abort(ids)

    # ---- the policy and the engine

    def _took(self, policy: Policy) -> None:
        self.policy, self.version = policy, self.version + 1
        self.versions[self.version] = policy

    async def _swap(self, policy: Policy) -> None:
        async with self._changing:
            # Those sent from now on may be tagged with it before we are told that it came.
            self.versions[self.version + 1] = policy
            try:
                await self._policies.change(self.engine, self.policy, policy, self.version + 1)
            except RolloutError as error:
                if not self._now.counts["kills"]:
                    self._now.problems.append(f"the policy {policy} was refused: {error}")
                return
            self._took(policy)
            self._now.counts["swaps"] += 1
            if self.engine.policy_version != self.version:
                self._now.problems.append(f"policy {self.version} is called {self.engine.policy_version}")

    async def _refuse(self, kind: str) -> None:
        async with self._changing:
            try:
                await self._policies.offer_misfit(self.engine, kind)
            except (RolloutError, ValueError):
                self._now.counts["refused"] += 1
            else:
                self._now.problems.append(f"{kind} that do not fit were taken")
            if self.engine.policy_version != self.version:
                self._now.problems.append(f"a refused policy made {self.engine.policy_version} of {self.version}")

    async def _sleep(self) -> None:
        async with self._changing:
            self._sleeping = True
            for flight in self._in_flight():
                flight.slept = True
            try:
                await self.engine.sleep()
                await self.engine.wake_up()
                self._now.counts["sleeps"] += 1
            except RolloutError as error:
                if not self._now.counts["kills"]:
                    self._now.problems.append(f"sleep or wake_up failed: {error}")
            finally:
                self._sleeping = False

    async def _kill(self) -> None:
        (worker,) = (child for child in multiprocessing.active_children() if WORKER in child.name)
        for flight in self._in_flight():
            flight.killed = True
        self._now.counts["kills"] += 1
        begin = time.monotonic()
        worker.kill()
        while self._in_flight() or await self.engine.alive():
            await asyncio.sleep(POLL_S)
        self._now.death_s = time.monotonic() - begin
        if self._now.death_s > NOTICED_S:
            self._now.problems.append(f"it took {self._now.death_s:.0f} s to notice that the engine's process had died")

    async def _replace_engine(self) -> None:
        await self.engine.close()
        self.life += 1
        await self.start()


async def solo(driver: Driver, job: Job) -> RolloutSample | RolloutError:
    """What the request of `job` gives alone under the policy of now. Raises :class:`Hang`."""
    try:
        sample = await driver.within(driver.engine.generate(job.request), f"{job.request.request_id} alone")
    except RolloutError as error:
        return error
    assert isinstance(sample, RolloutSample)
    return sample
