"""What leaves the device: all that finishes in one step goes in one go, and what a group shares goes once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from verl_omni.pipelines.diffusion_rollout_output import rollout_output
from verl_omni.pipelines.prompt_cache import NEGATIVE, PromptEmbeds
from verl_omni.pipelines.rows import Rollout, Row, rollout_of
from verl_omni.pipelines.together import together

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.worker.utils import StepRequestState


class HostCopies:
    """Copies of tensors on the host, each made once while its tensor lives."""

    def __init__(self) -> None:
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, embeds: PromptEmbeds) -> PromptEmbeds:
        """`embeds` on the host, where they are not to be written to: equal tensors have one copy."""
        return {name: self._copy(tensor) for name, tensor in embeds.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":  # its own copy: kept here it would keep itself alive
            return tensor
        if tensor not in self._copies:
            self._copies[tensor] = tensor.cpu()
        copy: Tensor = self._copies[tensor]
        return copy


def results_to_host(states: Sequence[StepRequestState], device: torch.device) -> None:
    """Move media, flags and recorded trajectories of `states` that finished, which share an image size, to the host.

    What fails together, for want of memory say, is moved one by one; an error of one alone is kept on it.
    """
    together(states, _move, "moving the results", device=device)


def _move(states: Sequence[StepRequestState]) -> None:
    rollouts = [rollout for state in states if (rollout := rollout_of(state)).error is None]
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
    moved = _to_host([*latents, *log_probs, *images, *finite])

    n, m = len(rows), len(media)
    latents, log_probs, images, finite = moved[:n], moved[n : 2 * n], moved[2 * n : 2 * n + m], moved[2 * n + m :]
    for group, all_latents, all_log_probs in zip(rows.values(), latents, log_probs, strict=True):
        parts = zip(group, all_latents.chunk(len(group)), all_log_probs.chunk(len(group)), strict=True)
        for row, own_latents, own_log_probs in parts:
            row.latents, row.log_probs = list(own_latents), list(own_log_probs)
    for owners, all_images, all_finite in zip(media.values(), images, finite, strict=True):
        counts = [len(rollout.rows) for rollout in owners]
        for rollout, own, flags in zip(owners, all_images.split(counts), all_finite.split(counts), strict=True):
            rollout.media, rollout.finite = own, flags


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
