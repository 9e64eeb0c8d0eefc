"""A linear layer and its GELU in one kernel: the matrix product writes what the activation would read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.library.custom_op("verl_omni::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x @ weight.T + bias)`` in its tanh form: x [..., K], weight [N, K], bias [N] → [..., N].

    On CUDA the sum is not rounded before the activation, as it is between two kernels. A custom operator because
    Inductor would take the fused one apart.
    """
    return functional.gelu(functional.linear(x.contiguous(), weight, bias), approximate="tanh")


@linear_gelu.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)  # tanh, on CUDA only
    return out.view(*x.shape[:-1], weight.shape[0])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
