"""Small things to and from a device that has work queued: nothing here waits for that work.

A host that waits launches nothing meanwhile, and once it goes on the device is idle until the next launch. So what a
request brings is copied through pinned memory, and what must be read back is computed in a stream of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which is on the host, on `device`; the copy takes its turn there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def ahead_of_queue(device: torch.device) -> Iterator[None]:
    """What is launched inside runs beside the queue of `device`.

    It must not use tensors that the queue still computes, and what it makes is to be read inside.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_express(device)):
        yield


@functools.lru_cache
def _express(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
