"""Old log-probs, and the update of the policy from scored rows.

A mini-batch, over all ranks, is one optimizer step. It goes through the transformer in micro-batches, one recorded step
at a time, each with a backward of its own, so that activations of one step at most are held. Each contributes by its
share of the mini-batch's weight: the gradient is that of the mini-batch's mean, however it is cut and spread.

Old log-probs are computed in the same mini-batches, as the mates of a row decide how it is rounded: with micro-batches
of one size, nothing but the update itself moves the ratio away from 1.

Legend: B rows of this rank, W recorded steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils.device import get_device_id

from verl_omni.workers.config import FSDPDiffusionActorConfig
from verl_omni.workers.diffusion_losses import KLLoss, get_diffusion_loss_fn

if TYPE_CHECKING:
    from verl_omni.pipelines.training import StepKnobs
    from verl_omni.workers.engine.fsdp_diffusion import DiffusionFSDPEngine

Rows = Mapping[str, Tensor]
"""Tensors of one length, on the host: those that ``score_step`` takes, and what each step adds."""


@torch.no_grad()
def recorded_log_probs(
    engine: DiffusionFSDPEngine, rows: Rows, knobs: StepKnobs, *, mini_batch_size: int, micro_batch_size: int
) -> Tensor:
    """Log-probs float32 [B, W] of the recorded steps under the policy, on the host.

    `mini_batch_size` is that of the update to come, see :meth:`PolicyUpdate.run`. Raises ValueError if the rows do not
    fill the mini-batches.
    """
    steps = range(rows["sde_steps"].shape[1])
    scored = []
    with engine.eval_mode():
        for mini in _mini_batches(rows, mini_batch_size):
            for micro in _split(mini, micro_batch_size):
                on_device = _to_device(micro)
                scored.append(torch.stack([engine.score(on_device, column, knobs).log_prob for column in steps], dim=1))
    return torch.cat(scored).cpu()


class PolicyUpdate:
    """Updates of one policy."""

    def __init__(self, *, engine: DiffusionFSDPEngine, config: FSDPDiffusionActorConfig) -> None:
        """`config` tells loss, KL term, epochs and micro-batches. Raises ConfigError for a loss that is not there."""
        self._engine, self._config = engine, config
        self._policy_loss = get_diffusion_loss_fn(config.diffusion_loss.loss_mode)

    def run(self, rows: Rows, knobs: StepKnobs, *, mini_batch_size: int) -> dict[str, float]:
        """Go through `rows` in mini-batches of `mini_batch_size` rows of this rank, ``ppo_epochs`` times.

        `rows` holds ``old_log_probs`` [B, W], ``advantages`` [B, W] or [B, 1], ``sample_weight`` [B]. Returns the same
        on all ranks, by names without prefix: lr; means over the mini-batches of grad_norm, skipped_steps, loss,
        pg_loss, kl_loss (with the KL term) and the loss's own metrics; of those with ``_max`` in their names the
        largest. ``first_ratio_max_dev`` is that of the first mini-batch, before any update. skipped_steps is 1 for a
        mini-batch whose gradient is NaN or infinite: the policy stays as it was. A mini-batch without weight is left
        out; with none left the result is empty.

        Raises ValueError if the rows do not fill the mini-batches.
        """
        with self._engine.train_mode():
            found = [
                self._mini_batch(mini, knobs)
                for _ in range(self._config.ppo_epochs)
                for mini in _mini_batches(rows, mini_batch_size)
            ]
        return _summary([metrics for metrics in found if metrics])

    def _mini_batch(self, rows: Rows, knobs: StepKnobs) -> dict[str, float]:
        """One optimizer step."""
        engine, size = self._engine, self._config.ppo_micro_batch_size_per_gpu
        steps = rows["sde_steps"].shape[1]
        weight = rows["sample_weight"].sum().to(get_device_id())
        dist.all_reduce(weight)
        if not weight > 0:
            return {}
        engine.optimizer_zero_grad()
        tally = _Tally()
        micros = list(_split(rows, size))
        for number, micro in enumerate(micros, 1):
            on_device = _to_device(micro)
            share = on_device["sample_weight"].sum() / (weight * steps)
            for column in range(steps):
                last = number == len(micros) and column == steps - 1
                with engine._gradient_sync_context(is_last_micro_batch=last):
                    loss, metrics = self._loss(on_device, column, knobs)
                    # FSDP averages gradients over the ranks, and their shares add up to 1
                    (loss * share * engine.get_data_parallel_size()).backward()
                tally.add(metrics, share)
        lr = engine.optimizer.param_groups[0]["lr"]
        grad_norm = engine.optimizer_step()
        engine.lr_scheduler_step()
        skipped = float(not math.isfinite(grad_norm))  # by verl's engine
        return {**tally.over_ranks(), "grad_norm": grad_norm, "skipped_steps": skipped, "lr": lr}

    def _loss(self, rows: Rows, column: int, knobs: StepKnobs) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of one recorded step of a micro-batch, and metrics without gradient."""
        config, weight = self._config, rows["sample_weight"]
        reference = self._engine.reference_mean(rows, column, knobs) if config.use_kl_loss else None
        score = self._engine.score(rows, column, knobs)
        loss, metrics = self._policy_loss.compute_loss(
            old_log_prob=rows["old_log_probs"][:, column],
            log_prob=score.log_prob,
            advantages=rows["advantages"].expand_as(rows["old_log_probs"])[:, column],
            config=config.diffusion_loss,
            sample_weight=weight,
        )
        metrics = {**metrics, "pg_loss": loss}
        if reference is not None:
            kl = KLLoss.compute_loss(score.mean, reference, score.std, weight)
            loss = loss + config.kl_loss_coef * kl
            metrics["kl_loss"] = kl
        return loss, {name: value.detach() for name, value in {**metrics, "loss": loss}.items()}


@dataclass
class _Tally:
    """Metrics of a mini-batch: weighted sums, or the largest."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    tops: dict[str, Tensor] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Tensor], share: Tensor) -> None:
        for name, value in metrics.items():
            if _is_top(name):
                self.tops[name] = torch.maximum(self.tops.get(name, value), value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value * share

    def over_ranks(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for values, operation in ((self.sums, dist.ReduceOp.SUM), (self.tops, dist.ReduceOp.MAX)):
            if values:
                numbers = torch.stack([value.float() for value in values.values()])
                dist.all_reduce(numbers, op=operation)
                found.update(zip(values, numbers.tolist(), strict=True))
        return found


def _summary(found: list[dict[str, float]]) -> dict[str, float]:
    """Over the mini-batches; see :meth:`PolicyUpdate.run`."""
    if not found:
        return {}
    summary = {}
    for name in found[0]:
        values = [metrics[name] for metrics in found]
        summary[name] = max(values) if _is_top(name) else sum(values) / len(values)
    if "ratio_max_dev" in summary:
        summary["first_ratio_max_dev"] = found[0]["ratio_max_dev"]
    return {**summary, "lr": found[-1]["lr"]}


def _is_top(name: str) -> bool:
    return "_max" in name


def _mini_batches(rows: Rows, size: int) -> Iterator[Rows]:
    count = len(rows["sample_weight"])
    if count % size:
        raise ValueError(
            f"{count} rows a rank do not fill mini-batches of {size}; pad the batch with rows of sample_weight 0"
        )
    return _split(rows, size)


def _split(rows: Rows, size: int) -> Iterator[Rows]:
    for start in range(0, len(rows["sample_weight"]), size):
        yield {name: tensor[start : start + size] for name, tensor in rows.items()}


def _to_device(rows: Rows) -> Rows:
    return {name: tensor.to(get_device_id()) for name, tensor in rows.items()}
