"""The flow-matching schedule of a checkpoint, as both its rollout and its training follow it."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def flow_schedule(scheduler: Any, steps: int, image_tokens: int, *, even: bool) -> tuple[Tensor, Tensor]:
    """Timesteps [T] in 0–1000 and sigmas [T+1], float32, of an image of `image_tokens` tokens.

    `scheduler` is the checkpoint's ``FlowMatchEulerDiscreteScheduler``; it is left set to this schedule. With `even` it
    shifts the sigmas 1, 1 - 1/T … 1/T, as Qwen-Image was trained, otherwise those of its own training timesteps. Where
    it shifts by resolution, the shift grows linearly in the tokens between the two points of its config, as in
    Stable Diffusion 3 (arXiv 2403.03206, section 5.3.2) and FLUX.
    """
    sigmas = np.linspace(1.0, 1 / steps, steps) if even else None
    mu = _shift(scheduler.config, image_tokens) if scheduler.config["use_dynamic_shifting"] else None
    scheduler.set_timesteps(steps, sigmas=sigmas, mu=mu)
    return scheduler.timesteps, scheduler.sigmas


def _shift(config: Any, image_tokens: int) -> float:
    # The order of these operations is the stock pipelines': another one would move a timestep by its last bit.
    low, high = config["base_image_seq_len"], config["max_image_seq_len"]
    slope = (config["max_shift"] - config["base_shift"]) / (high - low)
    return float(image_tokens * slope + (config["base_shift"] - slope * low))
