"""Requests on their way through the servers of a fleet: each ends with one result, whatever happens to its server.

What a dead server leaves behind is run again, from the same seeds: by those that live, at once, as a start takes longer
than most bursts; if there is none, by the first fresh one. Whose second server dies too ends as an error that says so.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing

from verl_omni.workers.config import DiffusionRolloutConfig
from verl_omni.workers.rollout.fleet import Fleet
from verl_omni.workers.rollout.handle import ServerDied, ServerHandle
from verl_omni.workers.rollout.request import ABORTED, RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.spread import work

Groups = Sequence[Sequence[RolloutRequest]]
Results = asyncio.Queue[RolloutSample | RolloutError | None]
"""None: no more will come."""


class Bursts:
    """Deals groups of requests out to a fleet, and sees to it that all of them end."""

    def __init__(self, fleet: Fleet, *, result_timeout_s: float | None) -> None:
        self.retried = 0
        """Requests that were run again."""
        self._fleet, self._result_timeout_s = fleet, result_timeout_s
        self._aborts = 0

    def abort(self) -> None:
        """End the requests that wait for a fresh server as aborted; those in the servers are not ended by this."""
        self._aborts += 1

    async def serve(self, groups: Groups, results: Results) -> None:
        """Run `groups`; puts one result a request, unless cancelled, and None when it ends, for whatever reason."""
        try:
            await self._serve(groups, results, aborts=self._aborts, earlier=None)
        finally:
            results.put_nowait(None)

    async def _serve(self, groups: Groups, results: Results, *, aborts: int, earlier: ServerDied | None) -> None:
        """`aborts`: how many there were when `groups` came; `earlier`: how their first server died."""
        try:
            if earlier is not None:
                await self._fleet.look_round()
            await self._fleet.someone()
            if aborts != self._aborts:
                raise RolloutError(None, ABORTED)
        except RolloutError as error:
            _fail(groups, error.message, results)
            return
        spread = self._fleet.spread
        dealt = spread.deal([sum(map(work, group)) for group in groups])
        await asyncio.gather(
            *(
                self._burst(self._fleet.at(place), [groups[g] for g in mine], results, aborts=aborts, earlier=earlier)
                for place, mine in dealt.items()
            )
        )

    async def _burst(
        self, server: ServerHandle, groups: Groups, results: Results, *, aborts: int, earlier: ServerDied | None
    ) -> None:
        """Run `groups` on `server`, and what it leaves behind if it dies elsewhere."""
        unfinished = Counter(request.request_id for group in groups for request in group)
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        server.bursts.add(known)
        try:
            problem = await self._run(server, groups, unfinished, results)
            left = _left(groups, unfinished)
            if server.died is not None and earlier is None:
                server.retried += unfinished.total()
                self.retried += unfinished.total()
            elif server.died is not None:
                server.failed += unfinished.total()
        finally:
            self._finish(server, groups, unfinished)
            known.set_result(None)
            server.bursts.discard(known)
        if server.died is None:
            _fail(left, problem, results)
        elif earlier is not None:
            _fail(left, f"it was run twice, and both servers died: {earlier.message}; {server.died.message}", results)
        elif left:
            await self._serve(left, results, aborts=aborts, earlier=server.died)

    async def _run(self, server: ServerHandle, groups: Groups, unfinished: Counter[str], results: Results) -> str:
        """Put what `server` gives, and strike it out in `unfinished`; returns why the other requests have no result."""
        costs = {request.request_id: work(request) for group in groups for request in group}
        watchdog = asyncio.create_task(self._watchdog(server))
        try:
            async with aclosing(server.generate([request for group in groups for request in group])) as stream:
                async for result in stream:
                    server.heard = asyncio.get_running_loop().time()
                    if isinstance(result, RolloutError) and not await self._goes_on(server):
                        continue  # no fault of the request
                    request_id = str(result.request_id)
                    unfinished[request_id] -= 1
                    if server.died is None:
                        self._fleet.spread.finish(server.place, costs[request_id])
                    results.put_nowait(result)
        except ServerDied as error:
            self._fleet.lose(server, error)
        except Exception as error:  # whatever it is, who waits for these results must not wait forever
            await self._fleet.lives(server)
            return error.message if isinstance(error, RolloutError) else f"{server.name}: {error!r}"
        finally:
            watchdog.cancel()
        return "its server gave no result"

    async def _goes_on(self, server: ServerHandle) -> bool:
        """Whether `server` lives, or ends because all do."""
        return self._fleet.closed or await self._fleet.lives(server)

    async def _watchdog(self, server: ServerHandle) -> None:
        """Give `server` up if it gives no result for too long."""
        limit, loop = self._result_timeout_s, asyncio.get_running_loop()
        if limit is None:
            return
        begun = loop.time()
        while (quiet := loop.time() - max(begun, server.heard)) < limit:
            await asyncio.sleep(limit - quiet)
        key = f"{DiffusionRolloutConfig.KEY}.result_timeout_s={limit:g}"
        self._fleet.lose(server, ServerDied(None, f"{server.name} gave no result for {limit:g} s ({key})"))

    def _finish(self, server: ServerHandle, groups: Groups, unfinished: Counter[str]) -> None:
        """What `server` still had to do, it has not any more."""
        if server.died is None:
            left = sum(work(request) for group in _left(groups, unfinished) for request in group)
            self._fleet.spread.finish(server.place, left)


def _left(groups: Groups, unfinished: Counter[str]) -> list[list[RolloutRequest]]:
    """The requests of each group that are `unfinished`."""
    open_ = unfinished.copy()
    left: list[list[RolloutRequest]] = []
    for group in groups:
        members = []
        for request in group:
            if open_[request.request_id] > 0:
                open_[request.request_id] -= 1
                members.append(request)
        left.append(members)
    return [members for members in left if members]


def _fail(groups: Groups, problem: str, results: Results) -> None:
    for group in groups:
        for request in group:
            results.put_nowait(RolloutError(request.request_id, problem))
