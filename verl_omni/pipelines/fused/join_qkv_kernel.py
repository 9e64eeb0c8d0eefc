"""The Triton kernel of :mod:`~verl_omni.pipelines.fused.join_qkv`. Importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight_text, weight_image, is_text, eps, WIDTH: tl.constexpr):
    dtype = x.dtype
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    unit = (x * scale[:, None]).to(dtype).to(tl.float32)
    weight = tl.where(is_text[:, None], weight_text[None, :], weight_image[None, :])
    return (unit * weight.to(tl.float32)).to(dtype)


@triton.jit
def _rotated(x, cos, sin, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (ROWS, WIDTH // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (ROWS, WIDTH)).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "length", "text_length"])
def join_qkv_kernel(
    text_ptr,
    image_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    text_q_ptr,
    text_k_ptr,
    image_q_ptr,
    image_k_ptr,
    cos_ptr,
    sin_ptr,
    rows,
    length,
    text_length,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS heads of q, k and v. A row of the output is (batch row, token, head)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    token, head = row // HEADS, row % HEADS
    batch, place = token // length, token % length
    is_text = place < text_length
    inside = row < rows
    text_token = batch * text_length + place
    image_token = batch * (length - text_length) + place - text_length
    stream_token = tl.where(is_text, text_token, image_token)
    source = (stream_token * 3 * HEADS + head)[:, None] * WIDTH + column[None, :]
    target = row[:, None] * WIDTH + column[None, :]
    from_text, from_image = (is_text & inside)[:, None], (inside & (is_text == 0))[:, None]
    part: tl.constexpr = HEADS * WIDTH

    q = tl.load(text_ptr + source, from_text, 0.0) + tl.load(image_ptr + source, from_image, 0.0)
    k = tl.load(text_ptr + source + part, from_text, 0.0) + tl.load(image_ptr + source + part, from_image, 0.0)
    v = tl.load(text_ptr + source + 2 * part, from_text, 0.0)
    v += tl.load(image_ptr + source + 2 * part, from_image, 0.0)
    tl.store(v_ptr + target, v, inside[:, None])

    q = _normed(q, tl.load(text_q_ptr + column), tl.load(image_q_ptr + column), is_text, eps, WIDTH)
    k = _normed(k, tl.load(text_k_ptr + column), tl.load(image_k_ptr + column), is_text, eps, WIDTH)
    if ROTATE:
        half = tl.arange(0, WIDTH // 2)
        angle = place[:, None] * (WIDTH // 2) + half[None, :]
        cos = tl.load(cos_ptr + angle, inside[:, None], 0.0)
        sin = tl.load(sin_ptr + angle, inside[:, None], 0.0)
        q = _rotated(q, cos, sin, ROWS, WIDTH)
        k = _rotated(k, cos, sin, ROWS, WIDTH)
    tl.store(q_ptr + target, q, inside[:, None])
    tl.store(k_ptr + target, k, inside[:, None])
