"""From scored samples to the batch that the training workers take.

Shapes: B samples, W recorded steps, L text tokens of the longest prompt, D text width, ``...`` the latent dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_omni.pipelines.prompt_cache import NEGATIVE, with_masks
from verl_omni.workers.rollout.request import RolloutRequest, RolloutSample

if TYPE_CHECKING:
    from verl import DataProto

    from verl_omni.reward_loop.item import RewardResult


@dataclass(frozen=True, kw_only=True)
class ScoredSample:
    """One image of one prompt, with its reward."""

    uid: str
    """Group: the prompt's id."""
    request: RolloutRequest
    """What was asked."""
    sample: RolloutSample
    """What came."""
    reward: RewardResult
    """What it is worth."""


def make_batch(samples: Sequence[ScoredSample], *, cfg_key: str, default_cfg_scale: float) -> DataProto:
    """The batch of `samples`, in their order: tensors on the host, B of each.

    - ``all_latents`` float32 [B, W+1, ...], ``all_timesteps``, ``rollout_log_probs`` float32 [B, W]
    - ``sde_steps`` int64 [B, W]: where in the schedule the recorded steps lie
    - ``prompt_embeds`` [B, L, D] padded with zeros on the right, ``prompt_embeds_mask`` bool [B, L], and what else the
      transformer takes of a prompt; all of them once more with ``negative_`` if any sample is guided
    - ``cfg_scale`` float32 [B], 1 where a sample is not guided; ``sample_weight`` float32 [B], all 1
    - ``rm_scores`` float32 [B, 1]: the rewards

    Non-tensors: ``uid``, ``policy_version``. `cfg_key` names the request's guidance scale; one that leaves it open has
    `default_cfg_scale`. Raises ValueError if the samples recorded nothing, or not equally many steps.
    """
    from verl import DataProto

    recorded = [_recorded(item) for item in samples]
    if len({len(steps) for *_, steps in recorded}) != 1:
        raise ValueError("the samples of a batch recorded different numbers of steps; give them windows of one size")
    latents, log_probs, timesteps, steps = (torch.stack(column) for column in zip(*recorded, strict=True))
    guided = [any(name.startswith(NEGATIVE) for name in item.sample.prompt_embeddings) for item in samples]
    scales = [
        float(default_cfg_scale if (scale := getattr(item.request, cfg_key)) is None else scale) if is_guided else 1.0
        for item, is_guided in zip(samples, guided, strict=True)
    ]
    tensors = {
        "all_latents": latents,
        "all_timesteps": timesteps,
        "rollout_log_probs": log_probs,
        "sde_steps": steps,
        "cfg_scale": torch.tensor(scales, dtype=torch.float32),
        "sample_weight": torch.ones(len(samples)),
        "rm_scores": torch.tensor([[item.reward.total] for item in samples], dtype=torch.float32),
        **_conditioning([item.sample.prompt_embeddings for item in samples], guided),
    }
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={
            "uid": np.array([item.uid for item in samples], dtype=object),
            "policy_version": np.array([item.sample.policy_version for item in samples], dtype=object),
        },
    )


def deal(batch: DataProto, *, mini_batches: int, ranks: int) -> tuple[DataProto, int]:
    """Order `batch` so that chunks of equal length, one a rank, hold the same mini-batches as the whole does.

    Returns the ordered batch and the samples of a mini-batch over all ranks. The batch is filled up with copies of its
    first sample that weigh nothing where its length does not come out.
    """
    from verl import DataProto

    size = -(-len(batch) // (mini_batches * ranks)) * ranks
    missing = size * mini_batches - len(batch)
    if missing:
        filling = batch.select_idxs([0] * missing)
        filling.batch["sample_weight"] = torch.zeros(missing)
        batch = DataProto.concat([batch, filling])
    order = torch.arange(len(batch)).view(mini_batches, ranks, -1).transpose(0, 1).flatten()
    return batch.select_idxs(order), size


def counted(batch: DataProto, *names: str) -> list[Tensor]:
    """The tensors of these names, without the samples that only fill the batch up."""
    kept = batch.batch["sample_weight"] > 0
    return [batch.batch[name][kept] for name in names]


def _recorded(item: ScoredSample) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents [W+1, ...], log-probs [W], timesteps [W] and steps [W] of one sample's only image."""
    sample = item.sample
    if sample.trajectory_latents is None or sample.trajectory_log_probs is None or sample.trajectory_timesteps is None:
        raise ValueError(f"{sample.request_id} recorded no stochastic step; raise noise_level or sde_window_size")
    timesteps = sample.trajectory_timesteps[0]
    start = sample.sde_windows[0][0]
    steps = torch.arange(start, start + len(timesteps))
    return sample.trajectory_latents[0], sample.trajectory_log_probs[0], timesteps, steps


def _conditioning(embeddings: Sequence[Mapping[str, Tensor]], guided: Sequence[bool]) -> dict[str, Tensor]:
    """The prompts' tensors by name, stacked; sequences padded, each with its mask."""
    prompts = [with_masks(prompt) for prompt in embeddings]
    names = [name for name in prompts[0] if not name.startswith(NEGATIVE)]
    tensors: dict[str, Tensor] = {}
    for prefix in ["", NEGATIVE] if any(guided) else [""]:
        for name in names:
            # an unguided sample has no negative: its own prompt stands in, and is not used
            rows = [
                prompt[prefix + name if is_guided else name] for prompt, is_guided in zip(prompts, guided, strict=True)
            ]
            tensors[prefix + name] = pad_sequence(rows, batch_first=True) if rows[0].ndim else torch.stack(rows)
    return tensors
