"""Media of requests that took their last step: decoded together, or each alone where that fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_omni.pipelines.hooks import check_shape
from verl_omni.pipelines.memory import RowLimit
from verl_omni.pipelines.rows import rollout_of
from verl_omni.pipelines.together import together

if TYPE_CHECKING:
    from vllm_omni.diffusion.worker.utils import StepRequestState

Decode = Callable[[Tensor, tuple[int, int]], Tensor]
"""Images [B, 3, H, W] in -1…1 from final latents [B, ...] and a size in pixels."""


def make_media(
    states: Sequence[StepRequestState], decode: Decode, rows_at_once: int, limit: RowLimit, device: torch.device
) -> None:
    """Give each request its media [n, ...], and a flag [n] on the device whether latents and pixels are finite.

    `states` share one image size. Decodes take `rows_at_once`, or fewer if `limit`, in pixels, says so. Where decoding
    fails for one request alone, its error is kept on it; where it may not be repeated for each alone, on all.
    """
    for kind in dict.fromkeys(rollout_of(state).params.output_type for state in states):
        chosen = [state for state in states if rollout_of(state).params.output_type == kind]
        run = functools.partial(_make, kind=kind, decode=decode, rows_at_once=rows_at_once, limit=limit)
        together(chosen, run, "decoding", device=device, repeats=limit.repeats)


def _make(states: Sequence[StepRequestState], *, kind: str, decode: Decode, rows_at_once: int, limit: RowLimit) -> None:
    rollouts = [rollout_of(state) for state in states]
    size = (rollouts[0].params.height, rollouts[0].params.width)
    latents = torch.cat([rollout.next_latents for rollout in rollouts if rollout.next_latents is not None])
    media, finite = latents, torch.isfinite(latents.flatten(1)).all(1)
    if kind != "latent":
        media, sound = _pixels(latents, size, decode, rows_at_once, limit)
        finite &= sound
    counts = [len(rollout.rows) for rollout in rollouts]
    for rollout, rows, ok in zip(rollouts, media.split(counts), finite.split(counts), strict=True):
        rollout.media, rollout.finite = rows, ok


def _pixels(
    latents: Tensor, size: tuple[int, int], decode: Decode, rows_at_once: int, limit: RowLimit
) -> tuple[Tensor, Tensor]:
    """uint8 [B, 3, H, W], and [B] whether they were finite before, which the rounding of NaN to black hides.

    `rows_at_once` at a time: the VAE's activations are the peak of a rollout's memory.
    """
    height, width = size

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        images = check_shape("decode", decode(rows, size), (len(rows), 3, height, width))
        pixels = (images.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
        return pixels, torch.isfinite(images.flatten(1)).all(1)

    parts = limit.run(
        latents.split(rows_at_once), run, cost=lambda _: height * width, describe=lambda _: f"{height}x{width} pixels"
    )
    return torch.cat([pixels for _, (pixels, _) in parts]), torch.cat([finite for _, (_, finite) in parts])
