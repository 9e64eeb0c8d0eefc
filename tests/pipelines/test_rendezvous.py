"""The engine's workers find each other on this machine, where no other can reach them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm_omni.platforms import current_omni_platform

from verl_omni.pipelines import worker_extension
from verl_omni.workers.rollout.launch import own_rendezvous

WORKERS = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from verl_omni.pipelines.rendezvous import join_on_loopback

rank, port = int(sys.argv[1]), int(sys.argv[2])
join_on_loopback(rank=rank, world_size=2, port=port, backend="gloo")
join_on_loopback(rank=rank, world_size=2, port=port, backend="gloo")  # there is one
number = torch.tensor(rank + 1)
dist.all_reduce(number)
listening = [line.split()[1] for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}") if " 0A " in line]
print(number.item(), [place.split(":")[0] for place in listening if int(place.split(":")[1], 16) == port])
dist.barrier()
"""


@pytest.mark.slow
def test_two_workers_meet_at_a_port_that_listens_at_loopback_alone():
    with own_rendezvous():  # holds the port until the first worker listens
        port = os.environ["MASTER_PORT"]
        workers = [
            subprocess.Popen([sys.executable, "-c", WORKERS, str(rank), port], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        told = [worker.communicate(timeout=120)[0].strip() for worker in workers]
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert told == [f"3 ['{loopback}']"] * 2


def test_the_port_is_held_at_loopback_too():
    with own_rendezvous():
        port = int(os.environ["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_the_worker_joins_before_the_engine_would(monkeypatch):
    said = []

    class EnginesWorker:
        def __init__(self, *, local_rank, rank, od_config, skip_load_model):
            said.append(("worker", local_rank, rank, skip_load_model))

    monkeypatch.setattr(worker_extension, "join_on_loopback", lambda **given: said.append(given))
    worker = type("Worker", (worker_extension.RolloutWorkerExtension, EnginesWorker), {})
    config = SimpleNamespace(master_port=1234, num_gpus=4)
    worker(local_rank=1, rank=1, od_config=config, skip_load_model=True)
    backend = current_omni_platform.dist_backend
    assert said == [{"rank": 1, "world_size": 4, "port": 1234, "backend": backend}, ("worker", 1, 1, True)]
