"""The Triton kernel of :mod:`~verl_omni.pipelines.fused.add_lora`. Importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def add_lora_kernel(
    out_ptr,
    shrunk_ptr,
    b_ptr,
    tokens,
    out_stride,
    shrunk_stride,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PART: tl.constexpr,
    GELU: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program: some columns of some tokens of one part."""
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    added = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for first in range(0, RANK, STEP):
        r = first + tl.arange(0, STEP)
        in_row, in_column = r[None, :], r[:, None]
        shrunk_row = shrunk_ptr + token * shrunk_stride + PART * RANK
        shrunk = tl.load(shrunk_row + in_row, (token < tokens) & (in_row < RANK), 0.0)
        b = tl.load(b_ptr + column * RANK + in_column, (column < WIDTH) & (in_column < RANK), 0.0)
        added = tl.dot(shrunk, b, added)

    inside = (token < tokens) & (column < WIDTH)
    place = out_ptr + token * out_stride + START + column
    y = tl.load(place, inside, 0.0).to(tl.float32) + added
    if GELU:
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)  # sqrt(2 / pi)
        y *= tl.sigmoid(2 * inner)  # (1 + tanh(u)) / 2 = sigmoid(2 u)
    tl.store(place, y.to(out_ptr.dtype.element_ty), inside)
