"""Training processes for tests: each a process of its own, as an engine has its process group for itself."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from verl_omni.platforms import verl_cpu_environment


class Ranks:
    """Processes of one gloo group, which run the same function at once."""

    def __init__(self, pools: list[ProcessPoolExecutor]) -> None:
        self._pools = pools

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on each rank; the results by rank. Raises what a rank raised."""
        futures = [pool.submit(function, *args) for pool in self._pools]
        return [future.result() for future in futures]


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    """Start so many processes, in which verl runs on the CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(1, mp_context=context, initializer=_join, initargs=(rank, world, port))
            )
            for rank in range(world)
        ]
        yield Ranks(pools)


def _join(rank: int, world: int, port: int) -> None:
    os.environ.update(verl_cpu_environment())
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    )
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
