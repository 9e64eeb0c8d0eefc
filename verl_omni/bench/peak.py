"""The fastest matrix product of this machine, which model FLOP are compared with."""

from __future__ import annotations

import time

import torch

CUDA_SIZE, CPU_SIZE = 8192, 2048
"""Edge of the square matrices: large enough that larger ones are not faster."""
_REPEATS = 10


def matrix_peak(dtype: torch.dtype) -> float:
    """FLOP a second of a large square matrix product on random data, the best of some in a row; on the GPU if there is
    one. Of a machine that others use, take the best of several calls over time."""
    cuda = torch.cuda.is_available()
    size = CUDA_SIZE if cuda else CPU_SIZE
    device = "cuda" if cuda else "cpu"
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for repeat in range(2 + _REPEATS):
        start = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize()
        if repeat >= 2:
            seconds.append(time.perf_counter() - start)
    del a, b
    if cuda:
        torch.cuda.empty_cache()
    return 2 * size**3 / min(seconds)
