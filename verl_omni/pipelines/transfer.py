"""What leaves the device: all that finishes in one step goes in one go, and what a group shares goes once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from verl_omni.pipelines.diffusion_rollout_output import rollout_output
from verl_omni.pipelines.prompt_cache import NEGATIVE, PromptEmbeds
from verl_omni.pipelines.rows import Rollout, Row

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput


class HostCopies:
    """Copies of tensors on the host, each made once while its tensor lives."""

    def __init__(self) -> None:
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, embeds: PromptEmbeds) -> PromptEmbeds:
        """`embeds` on the host; equal tensors for equal tensors, so they are not to be written to."""
        for tensor in embeds.values():
            if tensor not in self._copies:
                self._copies[tensor] = tensor.cpu()
        return {name: self._copies[tensor] for name, tensor in embeds.items()}


def results_to_host(rollouts: Sequence[Rollout]) -> None:
    """Move media, flags and recorded trajectories of finished `rollouts`, which share an image size, to the host."""
    rows: dict[int, list[Row]] = {}
    for row in (row for rollout in rollouts for row in rollout.rows):
        if row.steps:
            rows.setdefault(len(row.steps), []).append(row)
    media: dict[torch.dtype, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.media is not None:
            media.setdefault(rollout.media.dtype, []).append(rollout)

    latents = [torch.stack([x for row in group for x in row.latents]) for group in rows.values()]
    log_probs = [torch.stack([x for row in group for x in row.log_probs]) for group in rows.values()]
    images = [torch.cat([r.media for r in group if r.media is not None]) for group in media.values()]
    finite = [torch.cat([r.finite for r in group if r.finite is not None]) for group in media.values()]
    moved = iter(_to_host([*latents, *log_probs, *images, *finite]))

    for group, part in [(g, name) for name in ("latents", "log_probs") for g in rows.values()]:
        for row, own in zip(group, next(moved).chunk(len(group)), strict=True):
            setattr(row, part, list(own.unbind()))
    for owners, part in [(g, name) for name in ("media", "finite") for g in media.values()]:
        for rollout, own in zip(owners, next(moved).split([len(r.rows) for r in owners]), strict=True):
            setattr(rollout, part, own)


def finished_output(rollout: Rollout, host_copies: HostCopies) -> DiffusionOutput:
    """The engine's output of a rollout whose results are on the host."""
    embeddings = host_copies.of(rollout.cond)
    if rollout.uncond is not None:
        embeddings |= {f"{NEGATIVE}{name}": tensor for name, tensor in host_copies.of(rollout.uncond).items()}
    trajectories = [trajectory for row in rollout.rows if (trajectory := row.trajectory()) is not None]
    latents, log_probs, timesteps = map(torch.stack, zip(*trajectories, strict=True)) if trajectories else (None,) * 3
    return rollout_output(
        media=rollout.media,
        trajectory_latents=latents,
        trajectory_log_probs=log_probs,
        trajectory_timesteps=timesteps,
        prompt_embeddings=embeddings,
        rl={
            "sde_window": [list(row.window) for row in rollout.rows],
            "true_cfg": rollout.uncond is not None,
            "seed": rollout.params.seed,
        },
    )


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `tensors` through pinned memory, all under way at once; waits for them."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
