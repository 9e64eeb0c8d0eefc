"""Where the engine's workers, which are all on one machine, find each other: at 127.0.0.1 and nowhere else."""

from __future__ import annotations

import socket

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def join_on_loopback(*, rank: int, world_size: int, port: int, backend: str) -> None:
    """Make torch.distributed's group, unless there is one. Called by all workers with the same `port`.

    By itself torch has the first worker listen at all addresses of the machine, for whoever asks.
    """
    if dist.is_initialized():
        return
    listening = None
    if rank == 0:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # `own_rendezvous` holds the port
            listener.bind((LOOPBACK, port))
            listener.listen()
            listening = listener.detach()  # the store closes it
    store = dist.TCPStore(LOOPBACK, port, world_size, is_master=rank == 0, master_listen_fd=listening)
    dist.init_process_group(backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size)
