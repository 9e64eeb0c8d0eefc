"""The Triton kernel of :mod:`~verl_omni.pipelines.fused.modulate`. Importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_modulated(unit, shift_ptr, scale_ptr, out_ptr, row, of_batch_row, inside):
    scale = tl.load(scale_ptr + of_batch_row, inside, 0.0).to(tl.float32)
    shift = tl.load(shift_ptr + of_batch_row, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row, (unit * (1 + scale) + shift).to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def modulate_kernel(
    x_ptr,
    residual0_ptr,
    residual1_ptr,
    gate0_ptr,
    gate1_ptr,
    shift0_ptr,
    shift1_ptr,
    scale0_ptr,
    scale1_ptr,
    h_ptr,
    out0_ptr,
    out1_ptr,
    tokens,
    eps,
    RESIDUALS: tl.constexpr,
    MODULATIONS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one token of one batch row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = token * WIDTH + column
    of_batch_row = (token // tokens) * WIDTH + column

    h = tl.load(x_ptr + row, inside, 0.0).to(tl.float32)
    if RESIDUALS > 0:
        gate = tl.load(gate0_ptr + of_batch_row, inside, 0.0).to(tl.float32)
        h += gate * tl.load(residual0_ptr + row, inside, 0.0).to(tl.float32)
        if RESIDUALS > 1:
            gate = tl.load(gate1_ptr + of_batch_row, inside, 0.0).to(tl.float32)
            h += gate * tl.load(residual1_ptr + row, inside, 0.0).to(tl.float32)
        rounded = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row, rounded, inside)
        h = rounded.to(tl.float32)

    mean = tl.sum(h, 0) / WIDTH
    centred = tl.where(inside, h - mean, 0.0)
    unit = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    _store_modulated(unit, shift0_ptr, scale0_ptr, out0_ptr, row, of_batch_row, inside)
    if MODULATIONS > 1:
        _store_modulated(unit, shift1_ptr, scale1_ptr, out1_ptr, row, of_batch_row, inside)
