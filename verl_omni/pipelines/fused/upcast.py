"""The precision in which the fused operators compute."""

from __future__ import annotations

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in float32; what is in float64 stays so, to have an exact result to compare with."""
    return x if x.dtype is torch.float64 else x.float()
