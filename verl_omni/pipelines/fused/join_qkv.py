"""From packed projections to joint attention's query, key and value, in one pass over memory.

A dual-stream block projects text and image to packed ``[q, k, v]``, normalises q and k of each head, rotates them (not
in all models) and puts text before image. As separate kernels that reads and writes q and k three times. Here each
head of each token is read once and written once.

Rounding is that of diffusers: the norm rounds to the dtype before its weight and after, the rotation is float32.

Shapes: B rows, L text tokens, S image tokens, H heads, D width of a head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_omni.pipelines.fused.upcast import upcast

_ROWS = 16
"""Heads a Triton program works on: 2 to 4 KB of each input, enough loads in flight on a Hopper."""


class Rotation(NamedTuple):
    """Angles of a rotary embedding that turns neighbouring pairs of a head."""

    cos: Tensor
    """[L + S, D / 2] float32, text first."""
    sin: Tensor
    """[L + S, D / 2] float32."""

    @classmethod
    def of(cls, text: Tensor, image: Tensor) -> Rotation:
        """From unit complex numbers [L, D / 2] and [S, D / 2]."""
        joint = torch.view_as_real(torch.cat([text, image])).float()
        return cls(joint[..., 0].contiguous(), joint[..., 1].contiguous())


def join_qkv(
    text: Tensor | None,
    image: Tensor,
    norms: tuple[Tensor, Tensor, Tensor, Tensor],
    rotation: Rotation | None,
    *,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each [B, L + S, H, D].

    Args:
        text: [B, L, 3 * H * D], or None for attention within the image.
        image: [B, S, 3 * H * D].
        norms: weights [D] of the norms of text q, text k, image q, image k.
        eps: of the norms.
    """
    text = image[:, :0] if text is None else text
    cos, sin = (None, None) if rotation is None else rotation
    q, k, v = _join(text, image, *norms, cos, sin, heads, eps)
    return q, k, v


@torch.library.custom_op("verl_omni::join_qkv", mutates_args=())
def _join(
    text: Tensor,
    image: Tensor,
    text_q: Tensor,
    text_k: Tensor,
    image_q: Tensor,
    image_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """In torch, on any device: what the kernel computes."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(upcast(x).square().mean(-1, keepdim=True) + eps)
        return (upcast(x) * scale).to(x.dtype) * weight

    def rotated(x: Tensor) -> Tensor:
        if cos is None or sin is None:
            return x
        even, odd = upcast(x).unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[:, None], sin[:, None]
        return torch.stack([even * c - odd * s, even * s + odd * c], dim=-1).flatten(-2).to(x.dtype)

    (tq, tk, tv), (iq, ik, iv) = (
        packed.unflatten(-1, (3, heads, -1)).unbind(2) for packed in (text.contiguous(), image.contiguous())
    )
    query = torch.cat([normed(tq, text_q), normed(iq, image_q)], dim=1)
    key = torch.cat([normed(tk, text_k), normed(ik, image_k)], dim=1)
    return rotated(query), rotated(key), torch.cat([tv, iv], dim=1)


@_join.register_fake
def _(text: Tensor, image: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    heads = args[-2]
    shape = (image.shape[0], text.shape[1] + image.shape[1], heads, image.shape[2] // (3 * heads))
    return image.new_empty(shape), image.new_empty(shape), image.new_empty(shape)


@_join.register_kernel("cuda")
def _(
    text: Tensor,
    image: Tensor,
    text_q: Tensor,
    text_k: Tensor,
    image_q: Tensor,
    image_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    text, image = text.contiguous(), image.contiguous()
    batch, length, width = image.shape[0], text.shape[1] + image.shape[1], image.shape[2] // (3 * heads)
    q, k, v = (image.new_empty(batch, length, heads, width) for _ in range(3))
    rows = batch * length * heads
    grid = ((rows + _ROWS - 1) // _ROWS,)
    weights = (text_q, text_k, image_q, image_k)
    _kernel()[grid](
        *(text, image, q, k, v, *weights, cos, sin, rows, length, text.shape[1], eps),
        HEADS=heads,
        WIDTH=width,
        ROTATE=cos is not None,
        ROWS=_ROWS,
    )
    return q, k, v


@functools.cache
def _kernel() -> Any:
    """The Triton kernel; Triton comes with torch for CUDA only."""
    from verl_omni.pipelines.fused.join_qkv_kernel import join_qkv_kernel

    return join_qkv_kernel
