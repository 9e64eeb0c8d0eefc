"""FlowGRPO: group advantages, the clipped policy loss and the KL term (Flow-GRPO, arXiv 2505.05470).

Shapes: B samples (images), W recorded SDE steps, ``...`` latent dimensions. Rewards and advantages belong to a sample;
log-probs to each of its steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ADVANTAGE_LIMIT = 5.0  # the public code's clamp: one outlier in a nearly uniform group must not dominate the step


class PolicyLoss(NamedTuple):
    """What the clipped loss gives; scalars, of which only `loss` has a gradient."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of (sample, step) pairs whose ratio lies outside 1 ± clip_ratio."""
    ratio_mean: Tensor
    ratio_max_dev: Tensor
    """Largest distance of a ratio from 1."""


def group_advantages(
    rewards: Tensor,
    groups: Sequence[Hashable],
    *,
    epsilon: float = 1e-4,
    norm_by_std: bool = True,
    global_std: bool = True,
) -> Tensor:
    """Advantages [B] float32: reward minus its group's mean, over a standard deviation plus `epsilon`, clamped to ±5.

    The deviation is the population's: of the whole batch with `global_std`, else of the group. A group of one has no
    mean to beat and gets 0. `groups` holds one key a sample, such as the prompt's id.

    Raises ValueError when there are not as many groups as rewards.
    """
    if rewards.ndim != 1 or len(groups) != len(rewards):
        raise ValueError(f"need one reward and one group a sample, got {list(rewards.shape)} and {len(groups)}")
    numbers: dict[Hashable, int] = {}
    index = torch.tensor([numbers.setdefault(g, len(numbers)) for g in groups], device=rewards.device)
    values = rewards.double()
    size = torch.zeros(len(numbers), dtype=torch.float64, device=rewards.device).index_add_(
        0, index, torch.ones_like(values)
    )
    centred = values - (torch.zeros_like(size).index_add_(0, index, values) / size)[index]
    if norm_by_std:
        if global_std:
            std = values.std(unbiased=False)
        else:
            std = (torch.zeros_like(size).index_add_(0, index, centred.square()) / size).sqrt()[index]
        centred = centred / (std + epsilon)
    centred = torch.where(size[index] > 1, centred, 0.0)
    return centred.clamp(-ADVANTAGE_LIMIT, ADVANTAGE_LIMIT).float()


def clipped_policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_ratio: float,
    sample_weight: Tensor | None = None,
    importance: Tensor | None = None,
) -> PolicyLoss:
    """Mean of ``max(-A * ratio, -A * clip(ratio, 1 ± clip_ratio))`` with ``ratio = exp(log_prob - old_log_prob)``.

    The log-probs are [B, W], or [B] for one step; advantages and `importance` the same, or [B] or [B, 1] for all steps
    of a sample. `importance` multiplies each element of the loss. `sample_weight` [B] is of a sample in the means, in
    the loss as in the other figures; without it all count the same. Samples of weight 0 must be finite too, and where
    all have it the loss is 0. Computed in float32.

    Raises ValueError when the shapes do not belong together.
    """
    if log_prob.ndim not in (1, 2) or log_prob.shape != old_log_prob.shape:
        raise ValueError(f"log-probs must be [B, W] or [B], both: {list(log_prob.shape)}, {list(old_log_prob.shape)}")
    rows = len(log_prob)
    ratio = torch.exp(log_prob.float() - old_log_prob.float()).reshape(rows, -1)
    advantages = _by_step("advantages", advantages, ratio)
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if importance is not None:
        loss = loss * _by_step("importance", importance, ratio)
    away = (ratio.detach() - 1).abs()
    counted = away if sample_weight is None else away[sample_weight > 0]
    return PolicyLoss(
        loss=sample_mean(loss, sample_weight),
        clip_fraction=sample_mean((away > clip_ratio).float(), sample_weight),
        ratio_mean=sample_mean(ratio.detach(), sample_weight),
        ratio_max_dev=counted.max() if counted.numel() else away.new_zeros(()),
    )


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
    """KL between the steps of policy and reference, which share `std`: ``mean((μ - μ_ref)²) / (2 std²)``, averaged.

    `std` is [B, W], or [B] for one step, :attr:`StepCoefficients.std`; `mean` and `reference_mean` are the same shape
    with latent dimensions after it, float32. `sample_weight` [B]: see :func:`clipped_policy_loss`.
    """
    square = (mean - reference_mean).square().flatten(std.ndim).mean(-1)
    return sample_mean(square / (2 * std.square()), sample_weight)


def sample_mean(values: Tensor, sample_weight: Tensor | None = None) -> Tensor:
    """Mean of [B, ...] over all but the samples, then over the samples by their weight [B]; None: all count the same.

    0 where no sample has weight. Raises ValueError for a weight of another shape.
    """
    if sample_weight is None:
        return values.mean()
    if sample_weight.shape != values.shape[:1]:
        raise ValueError(f"sample_weight must be [{len(values)}], got {list(sample_weight.shape)}")
    weight = sample_weight.float()
    total = weight.sum()
    return (values.reshape(len(values), -1).mean(1) * weight).sum() / torch.where(total > 0, total, 1.0)


def _by_step(name: str, values: Tensor, like: Tensor) -> Tensor:
    """`values` as float32 [B, W] or [B, 1]."""
    rows, steps = like.shape
    if values.numel() not in (rows, rows * steps) or len(values) != rows:
        raise ValueError(f"{name} must be [{rows}], [{rows}, 1] or [{rows}, {steps}], got {list(values.shape)}")
    return values.reshape(rows, -1).float()
