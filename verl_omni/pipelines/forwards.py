"""Rows through a step: in as few forwards as fit, guided; each request alone where they fail together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_omni.pipelines.hooks import ModelHooks, check_shape
from verl_omni.pipelines.memory import forecast_rows, forward_limit
from verl_omni.pipelines.rows import Forward, RowBatch, fuses_guidance, rollout_of
from verl_omni.pipelines.stage_clock import StageClock
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.pipelines.together import together

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.worker.utils import StepRequestState


class RowForwards(ModelHooks):
    """The part of the rollout adapter that takes steps."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        self.stats = RolloutStats()
        self.clock = StageClock(self.device)
        self._batch: RowBatch | None = None
        self.rows_per_forward: int | None = (od_config.custom_pipeline_args or {}).get("rows_per_forward")
        self._compiling: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        devices = od_config.parallel_config.world_size
        self._forwards = forward_limit(self.device, self._count_halving, devices=devices)

    def advance(self, states: Sequence[StepRequestState]) -> Tensor:
        """Take the step of `states`; the guided velocity [B, ...] float32, zeros where it failed."""
        parts = together(states, self._step, "the step", device=self.device, repeats=self._forwards.repeats)
        if len(parts) < len(states) and parts[0] is not None:
            return parts[0]
        return torch.cat(
            [
                torch.zeros_like(rollout_of(state).latents) if part is None else part
                for state, part in zip(states, parts, strict=True)
            ]
        )

    def _step(self, states: Sequence[StepRequestState]) -> Tensor:
        batch, self._batch = self._batch, None
        if batch is None or not batch.stands_at(states):
            batch = self.gather(states)
        with self.clock.stage("denoise"):
            velocity = self.guided_velocity(batch)
        with self.clock.stage("step"):
            batch.advance(velocity)
        self._batch = batch
        return velocity

    def gather(self, states: Sequence[StepRequestState]) -> RowBatch:
        """The rows of prepared `states` of one image size, at whatever steps they stand.

        Where the plan gives no ``rows_per_forward``, the free memory does, and few rows are guided in one forward.
        """
        limit, fused = self.rows_per_forward, False
        if limit is None:
            latents = rollout_of(states[0]).latents
            fused = fuses_guidance(states, image_tokens=self.image_tokens(tuple(latents.shape[1:])))
            limit = forecast_rows(
                states,
                functools.partial(self._row_bytes, latents),
                fuse_guidance=fused,
                most=self._forwards.most,
                device=self.device,
                devices=self._forwards.devices,
            )
        return RowBatch(states, masks_text=self.masks_text, rows_per_forward=limit, fuse_guidance=fused)

    def guided_velocity(self, batch: RowBatch) -> Tensor:
        """Velocity [B, ...] float32 of all rows at their current latents and timesteps, guidance applied."""
        latents, timesteps, guided = batch.latents, batch.timesteps, len(batch.cfg_scale)
        if guided:
            latents = torch.cat([latents, latents[batch.guided]])
            timesteps = torch.cat([timesteps, timesteps[batch.guided]])
        with self._compiling():
            velocity = self._predict(batch, latents, timesteps)
        rows = len(batch.rows)
        for forward in batch.forwards:
            if images := sum(row < rows for row in forward.rows):
                self.stats.batch_sizes[images] += 1
        if not guided:
            return velocity
        cond, uncond = velocity.split([rows, guided])
        velocity = self.guide(cond[batch.guided], uncond, batch.cfg_scale)
        return velocity if isinstance(batch.guided, slice) else cond.index_copy(0, batch.guided, velocity)

    def _predict(self, batch: RowBatch, latents: Tensor, timesteps: Tensor) -> Tensor:
        """Velocity float32 of the rows that ``batch.forwards`` cover, which have these `latents` and `timesteps`.

        Forwards that ran out of memory are replaced by those that did not, for the steps to come.
        """
        height, width = batch.size

        def run(forward: Forward) -> Tensor:
            part = latents[forward.index]
            velocity = self.predict_velocity(part, timesteps[forward.index], forward.text, batch.size).float()
            return check_shape("predict_velocity", velocity, part.shape)

        parts = self._forwards.run(
            batch.forwards,
            run,
            cost=lambda forward: self._row_bytes(latents, forward.text.embeds.shape[1]),
            describe=lambda forward: f"{height}x{width} pixels, {forward.text.embeds.shape[1]} text tokens",
        )
        batch.forwards = [forward for forward, _ in parts]
        if len(parts) == 1:
            return parts[0][1]
        velocity = torch.empty_like(latents)
        for forward, part in parts:
            velocity[forward.index] = part
        return velocity

    def _row_bytes(self, latents: Tensor, text_tokens: int) -> int:
        return max(1, self.row_bytes(self.image_tokens(tuple(latents.shape[1:])), text_tokens))

    def _count_halving(self) -> None:
        self.stats.out_of_memory += 1
