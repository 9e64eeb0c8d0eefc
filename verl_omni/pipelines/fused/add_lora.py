"""A LoRA added to the output of its linear layer, and the activation after it, in one pass over that output.

As separate kernels, what the LoRA adds is written, read and added, and in a packed layer the whole output is copied for
each of its parts: of a block of SD3.5, whose layers are narrow, that doubles the time of the matrix products.

Shapes: M tokens, K inputs, N outputs; of each part the rank R and its share of the outputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

# Triton comes with torch for CUDA only. Not imported by the first call, as in the custom operators: Dynamo traces it.
if importlib.util.find_spec("triton"):
    from verl_omni.pipelines.fused.add_lora_kernel import add_lora_kernel

_TOKENS, _COLUMNS, _WARPS = 64, 128, 8
"""Of a Triton program: the fastest of 32 to 128 by 128 or 256 on an H200, with rank 64."""
_LEAST_STEP, _MOST_STEP = 16, 64
"""Of the rank, in a product of tiles: of a smaller rank the rest is zeros, a larger one takes several steps."""


def add_lora(
    out: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], starts: Sequence[int], *, gelu: bool = False
) -> Tensor:
    """``out[:, start : start + len(b)] + x @ a.T @ b.T`` for each part, then tanh GELU if `gelu`; [M, N].

    It may be written into `out`. ``x @ a.T`` is rounded to the dtype. The kernel, for dtypes of 16 bits on CUDA, does
    not round the sum before the activation; elsewhere these are products and sums of their own. No custom operator, as
    those of the other fused parts are: there are some ten layers a block, and Inductor launches the kernel in a
    fraction of the time that Python takes.

    Args:
        out: [M, N], what the layer gives without a LoRA.
        x: [M, K], its input.
        a: [R, K] of each part, all of one rank.
        b: [width, R] of each part, contiguous.
        starts: the first column of each part; with `gelu` there is one part, of all columns.
    """
    shrunk = functional.linear(x, a[0] if len(a) == 1 else torch.cat(a))  # x is read once for all parts
    tokens, rank = len(x), len(a[0])
    if not out.is_cuda or out.dtype.itemsize != 2 or out.stride(1) != 1:  # in float32 Triton takes ten times as long
        for i, (expand, start) in enumerate(zip(b, starts, strict=True)):
            out[:, start : start + len(expand)] += shrunk[:, i * rank : (i + 1) * rank] @ expand.t()
        return functional.gelu(out, approximate="tanh") if gelu else out
    for i, (expand, start) in enumerate(zip(b, starts, strict=True)):
        add_lora_kernel[(-(-len(expand) // _COLUMNS), -(-tokens // _TOKENS))](
            *(out, shrunk, expand, tokens, out.stride(0), shrunk.stride(0)),
            START=start,
            WIDTH=len(expand),
            RANK=rank,
            PART=i,
            GELU=gelu,
            TOKENS=_TOKENS,
            COLUMNS=_COLUMNS,
            STEP=min(max(_LEAST_STEP, 1 << (rank - 1).bit_length()), _MOST_STEP),
            num_warps=_WARPS,
        )
    return out
