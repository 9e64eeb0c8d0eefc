"""Advantage estimators by name, and the place from which users import what they register losses with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from verl_omni.algorithms.flow_grpo import group_advantages
from verl_omni.workers.config.named import NamedRegistry
from verl_omni.workers.diffusion_losses import (
    DiffusionLoss,
    FlowGRPO,
    KLLoss,
    get_diffusion_loss_fn,
    register_diffusion_loss,
)

if TYPE_CHECKING:
    from verl_omni.trainer.diffusion.settings import AlgorithmConfig

__all__ = [
    "DiffusionLoss",
    "FlowGRPO",
    "KLLoss",
    "compute_flow_grpo_outcome_advantage",
    "get_diffusion_adv_estimator_fn",
    "get_diffusion_loss_fn",
    "register_diffusion_adv_est",
    "register_diffusion_loss",
]

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]
F = TypeVar("F", bound=AdvantageEstimator)

_ESTIMATORS: NamedRegistry[AdvantageEstimator] = NamedRegistry("algorithm.adv_estimator")


def register_diffusion_adv_est(name: str) -> Callable[[F], F]:
    """Decorator: register a function for ``algorithm.adv_estimator=<name>``.

    It is called with the keywords of :func:`compute_flow_grpo_outcome_advantage` and returns the same.
    Raises ValueError if another function has the name already.
    """
    return _ESTIMATORS.register(name)


def get_diffusion_adv_estimator_fn(name: str) -> AdvantageEstimator:
    """The function registered under `name`. Raises :class:`ConfigError` naming those there are."""
    return _ESTIMATORS.get(name)


@register_diffusion_adv_est("flow_grpo")
def compute_flow_grpo_outcome_advantage(
    sample_level_rewards: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-4,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: AlgorithmConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages of samples within their groups (Flow-GRPO, arXiv 2505.05470); see :func:`group_advantages`.

    Args:
        sample_level_rewards: [B], [B, 1], or [B, W] with a reward a step: then each step is compared among samples.
        index: the group of each sample, such as the prompt's uid; a list or an array [B].
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: divide by the standard deviation.
        global_std: that deviation is the whole batch's, else the group's.
        config: all of ``algorithm``, for estimators with settings beyond these; not read here.

    Returns:
        advantages and returns, which are the same, float32 in the shape of the rewards. Raises ValueError when there
        are not as many groups as samples.
    """
    groups = list(index)
    columns = [
        group_advantages(column, groups, epsilon=epsilon, norm_by_std=norm_adv_by_std_in_grpo, global_std=global_std)
        for column in sample_level_rewards.reshape(len(sample_level_rewards), -1).unbind(1)
    ]
    advantages = torch.stack(columns, dim=1).reshape(sample_level_rewards.shape)
    return advantages, advantages
