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
    """What the clipped loss gives; scalars."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of (sample, step) pairs whose ratio lies outside 1 ± clip_ratio."""
    ratio_mean: Tensor


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


def clipped_policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, clip_ratio: float) -> PolicyLoss:
    """Mean of ``max(-A * ratio, -A * clip(ratio, 1 ± clip_ratio))`` with ``ratio = exp(log_prob - old_log_prob)``.

    All three are [B, W]; advantages may be [B] or [B, 1]. Computed in float32.
    """
    advantages = advantages.view(len(advantages), -1).float()
    ratio = torch.exp(log_prob.float() - old_log_prob.float())
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
    outside = (ratio.detach() - 1).abs() > clip_ratio
    return PolicyLoss(loss, outside.float().mean(), ratio.detach().mean())


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """KL between the steps of policy and reference, which share `std`: ``mean((μ - μ_ref)²) / (2 std²)``, averaged.

    `mean`, `reference_mean` [B, W, ...] float32; `std` [B, W], :attr:`StepCoefficients.std`.
    """
    square = (mean - reference_mean).square().flatten(2).mean(2)
    return (square / (2 * std.square())).mean()
