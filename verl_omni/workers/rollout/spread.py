"""Which rollout server gets which group of requests. A pure rule.

A group's requests share their prompt, which is encoded once where they meet: a group goes to one server as a whole. The
groups of a step are dealt out in one go, the costliest first (else in their order), each to the server with the least
work in flight, the first of those that have equally little. What is dealt stays where it is, unless its server dies.
This can only cost time: a request brings its seed, so it gives the same wherever it runs.

Work is counted in denoising steps of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_omni.workers.rollout.request import RolloutRequest


class LoadSpread:
    """Deals groups out to servers 0 … n-1, and knows what each of them still has to do."""

    def __init__(self, servers: int) -> None:
        self._load = dict.fromkeys(range(servers), 0)

    @property
    def load(self) -> dict[int, int]:
        """Work in flight of each server that is left."""
        return dict(self._load)

    def deal(self, costs: Sequence[int]) -> dict[int, list[int]]:
        """Server → the groups (numbers in `costs`, rising) that it gets; only servers that get any.

        Raises ValueError if no server is left.
        """
        if not self._load:
            raise ValueError("no server is left")
        dealt: dict[int, list[int]] = {}
        for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
            server = min(self._load, key=lambda server: (self._load[server], server))
            self._load[server] += costs[group]
            dealt.setdefault(server, []).append(group)
        return {server: sorted(dealt[server]) for server in sorted(dealt)}

    def finish(self, server: int, cost: int) -> None:
        """So much of what `server` had to do has ended."""
        if server in self._load:
            self._load[server] -= cost

    def drop(self, server: int) -> None:
        """`server` gets nothing any more. Dropping it twice is no error."""
        self._load.pop(server, None)

    def join(self, server: int) -> None:
        """`server`, which was dropped, gets its share again."""
        self._load[server] = 0


def work(request: RolloutRequest) -> int:
    """Rows × denoising steps of `request`; a number that it leaves open, or that is none, counts as one."""
    numbers = (request.num_outputs_per_prompt, request.num_inference_steps)
    rows, steps = (number if isinstance(number, int) and number > 0 else 1 for number in numbers)
    return rows * steps
