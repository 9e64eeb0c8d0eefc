"""Gated residuals, layer norm and modulation of a DiT block in one pass over memory.

``h = x + Σ gate · residual``, then for each modulation ``norm(h) * (1 + scale) + shift``. Inductor reads long rows
twice for that. Sums are float32; h is rounded once, the norm is that of the rounded h, and each result is rounded once.

Shapes: B rows, N tokens, D width; x and residuals [B, N, D]; gate, shift and scale [B, D].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from verl_omni.pipelines.fused.upcast import upcast

_MOST = 2
"""Residuals, and modulations, that the kernel takes at a time: SD3.5 has blocks with two attentions."""


def modulate(
    x: Tensor,
    modulations: Sequence[Sequence[Tensor]],
    residuals: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """h, then one tensor a modulation, each [B, N, D].

    Args:
        modulations: shift and scale of each; one or two.
        residuals: gate and residual of each; at most two. Without any, h is `x`.
        eps: of the norm, which has no weights.
    """
    gates, added = [gate for gate, _ in residuals], [residual for _, residual in residuals]
    shifts, scales = [shift for shift, _ in modulations], [scale for _, scale in modulations]
    results = _modulate(x, gates, added, shifts, scales, eps)
    return (*results,) if residuals else (x, *results)


@torch.library.custom_op("verl_omni::modulate", mutates_args=())
def _modulate(
    x: Tensor, gates: list[Tensor], residuals: list[Tensor], shifts: list[Tensor], scales: list[Tensor], eps: float
) -> list[Tensor]:
    """In torch, on any device: what the kernel computes. h only if there are residuals."""
    total = upcast(x.contiguous())  # the layout of the results is the kernel's
    for gate, residual in zip(gates, residuals, strict=True):
        total = total + upcast(gate)[:, None] * upcast(residual)
    h = total.to(x.dtype)
    normed = functional.layer_norm(upcast(h), h.shape[-1:], eps=eps)
    modulated = [
        (normed * (1 + upcast(scale)[:, None]) + upcast(shift)[:, None]).to(x.dtype)
        for shift, scale in zip(shifts, scales, strict=True)
    ]
    return [h, *modulated] if residuals else modulated


@_modulate.register_fake
def _(x: Tensor, gates: list[Tensor], residuals: list[Tensor], shifts: list[Tensor], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for _ in range(bool(residuals) + len(shifts))]


@_modulate.register_kernel("cuda")
def _(
    x: Tensor, gates: list[Tensor], residuals: list[Tensor], shifts: list[Tensor], scales: list[Tensor], eps: float
) -> list[Tensor]:
    if not (len(residuals) <= _MOST and 1 <= len(shifts) <= _MOST):
        raise ValueError(f"{len(residuals)} residuals and {len(shifts)} modulations; the kernel takes up to {_MOST}")
    x, residuals = x.contiguous(), [residual.contiguous() for residual in residuals]
    per_row = [[vector.contiguous() for vector in vectors] for vectors in (gates, shifts, scales)]
    h = torch.empty_like(x) if residuals else x
    results = [torch.empty_like(x) for _ in shifts]
    width = x.shape[-1]

    def pair(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [*tensors, *[x] * (_MOST - len(tensors))]  # what the kernel is not told to use

    gate, shift, scale = map(pair, per_row)
    _kernel()[(x.shape[0] * x.shape[1],)](
        *(x, *pair(residuals), *gate, *shift, *scale, h, *pair(results), x.shape[1], eps),
        RESIDUALS=len(residuals),
        MODULATIONS=len(shifts),
        WIDTH=width,
        BLOCK=1 << (width - 1).bit_length(),
        num_warps=4 if width <= 2048 else 8,
    )
    return [h, *results] if residuals else results


@functools.cache
def _kernel() -> Any:
    """The Triton kernel; Triton comes with torch for CUDA only."""
    from verl_omni.pipelines.fused.modulate_kernel import modulate_kernel

    return modulate_kernel
