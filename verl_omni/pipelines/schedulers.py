"""The SDE step in the shape of a diffusers scheduler."""

from __future__ import annotations

from typing import NamedTuple

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from verl_omni.algorithms.flow_sde import sde_coefficients, sde_step


class FlowMatchSDEDiscreteSchedulerOutput(NamedTuple):
    """What a step gives; float32."""

    prev_sample: Tensor
    """[B, ...]: the sample at the next, less noisy timestep (diffusers' name for it)."""
    log_prob: Tensor | None
    """[B]; 0 where the step is deterministic."""
    prev_sample_mean: Tensor
    """[B, ...]."""
    std: Tensor
    """[B, 1, …]: the standard deviation that FlowGRPO's KL divides by."""


class FlowMatchSDEDiscreteScheduler(FlowMatchEulerDiscreteScheduler):
    """``FlowMatchEulerDiscreteScheduler`` whose step is stochastic and knows its log-probability."""

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor | float,
        sample: Tensor,
        *,
        generator: torch.Generator | list[torch.Generator] | None = None,
        noise_level: float = 0.7,
        prev_sample: Tensor | None = None,
        sde_type: str = "sde",
        return_logprobs: bool = True,
        return_dict: bool = True,
    ) -> FlowMatchSDEDiscreteSchedulerOutput | tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Step from `timestep` to the next, or score `prev_sample` as that step's outcome.

        Args:
            model_output: velocity [B, ...].
            timestep: a timestep of ``self.timesteps``, or [B] of them: rows may stand at different steps.
            sample: [B, ...], used in float32.
            generator: one for all rows, or one a row.
            prev_sample: [B, ...], the step that was taken; nothing is drawn.
            sde_type: "sde", "cps" or "dance_sde"; see :mod:`verl_omni.algorithms.flow_sde`.

        Returns:
            (prev_sample, log_prob, prev_sample_mean, std), as a named tuple with `return_dict`; log_prob is None
            without `return_logprobs`.

        Raises:
            ValueError: unknown `sde_type`, or a timestep that is not in the schedule.
        """
        rows = torch.as_tensor(timestep, dtype=torch.float32).flatten().cpu().expand(sample.shape[0])
        schedule = self.timesteps.float().cpu()
        match = schedule == rows[:, None]
        if not bool(match.any(dim=1).all()):
            missing = rows[~match.any(dim=1)][0].item()
            raise ValueError(f"timestep {missing} is not in the schedule; call set_timesteps() and pass its timesteps")
        index = match.float().argmax(dim=1)
        sigmas = self.sigmas.double().cpu()
        coefficients = sde_coefficients(
            sigmas[index],
            sigmas[index + 1],
            noise_level=noise_level,
            sde_type=sde_type,
            second_sigma=float(sigmas[1]),
        )
        coefficients = type(coefficients)(*(c.float().to(sample.device) for c in coefficients))
        noise = None
        if prev_sample is None:
            noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=torch.float32)
        step = sde_step(
            sample.float(),
            model_output,
            coefficients,
            noise=noise,
            next_latents=None if prev_sample is None else prev_sample.float(),
        )
        std = coefficients.std.view((-1,) + (1,) * (sample.ndim - 1))
        log_prob = step.log_prob if return_logprobs else None
        output = (step.next_latents, log_prob, step.mean, std)
        return FlowMatchSDEDiscreteSchedulerOutput(*output) if return_dict else output
