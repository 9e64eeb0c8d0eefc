"""The policy losses by name, and the KL term: what the training worker adds up for each micro-batch.

Shapes: B samples, W recorded steps of each, ``...`` latent dimensions. One step alone may come as [B] for [B, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from verl_omni.algorithms.flow_grpo import clipped_policy_loss, gaussian_kl
from verl_omni.workers.config import DiffusionLossConfig
from verl_omni.workers.config.named import NamedRegistry

T = TypeVar("T", bound=type)


class DiffusionLoss(Protocol):
    """What a registered class offers; it is made without arguments."""

    def compute_loss(
        self,
        *,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        config: DiffusionLossConfig,
        rollout_is_weights: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, a scalar with gradient, and scalar metrics without.

        Both are means over samples and steps, in which each sample counts by its `sample_weight` [B] (None: all the
        same): that is how the worker puts micro-batches together. Samples that only fill up a batch have weight 0.
        `log_prob`, `old_log_prob`, `advantages` and `rollout_is_weights` are float32 [B, W], or all [B] for one step;
        `rollout_is_weights` multiplies each element of the loss; the worker has none. A metric with ``_max`` in its
        name is put together by taking the largest.
        """


_LOSSES: NamedRegistry[type] = NamedRegistry("actor_rollout_ref.actor.diffusion_loss.loss_mode")


def register_diffusion_loss(name: str) -> Callable[[T], T]:
    """Class decorator: register a :class:`DiffusionLoss` for ``actor.diffusion_loss.loss_mode=<name>``.

    Raises ValueError if another class has the name already.
    """
    return _LOSSES.register(name)


def get_diffusion_loss_fn(name: str) -> DiffusionLoss:
    """The loss that is registered under `name`. Raises :class:`ConfigError` naming those there are."""
    loss: DiffusionLoss = _LOSSES.get(name)()
    return loss


@register_diffusion_loss("flow_grpo")
class FlowGRPO:
    """The clipped policy loss of Flow-GRPO (arXiv 2505.05470)."""

    @staticmethod
    def compute_loss(
        *,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        config: DiffusionLossConfig,
        rollout_is_weights: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`DiffusionLoss`; metrics are ratio_mean, ratio_max_dev and clip_fraction."""
        result = clipped_policy_loss(
            log_prob,
            old_log_prob,
            advantages,
            clip_ratio=config.clip_ratio,
            sample_weight=sample_weight,
            importance=rollout_is_weights,
        )
        metrics = result._asdict()
        return metrics.pop("loss"), metrics


class KLLoss:
    """KL to the reference policy, whose steps have the same standard deviation (Flow-GRPO, arXiv 2505.05470)."""

    @staticmethod
    def compute_loss(mean: Tensor, ref_mean: Tensor, std: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """``mean((μ - μ_ref)²) / (2 std²)``, a scalar with the gradient of `mean`, before its factor kl_loss_coef.

        `mean`, `ref_mean` [B, W, ...] float32; `std` [B, W]; `sample_weight` [B]: see :class:`DiffusionLoss`.
        """
        return gaussian_kl(mean, ref_mean, std, sample_weight=sample_weight)
