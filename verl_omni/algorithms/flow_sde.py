"""One denoising step of a flow-matching model as an SDE, with its log-probability, for many rows at once.

A row is one image. Time runs from sigma 1 (noise) to 0 (image); a step goes from ``sigma`` to ``sigma_next`` with
``dt = sigma_next - sigma < 0``; ``v`` is the model's velocity and ``a`` the noise level. Formulas: "sde" is Flow-GRPO
(arXiv 2505.05470), "cps" is coefficients-preserving sampling (arXiv 2509.05952), "dance_sde" is DanceGRPO's form
(arXiv 2505.07818).

In all of them the mean is affine in the sample and the velocity, so a step is five numbers a row::

    mean = latent * x + velocity * v          x' = mean + noise * eps
    log p(x') = mean over the row of -(x' - mean)**2 * precision, minus log_norm

They depend only on the schedule and on ``a``, never on the sample: they are computed once, in float64, and the step
itself is then the same few operations for every row, whatever its type and wherever in its schedule it stands. The ODE
step is the row with ``noise = 0``.

Shapes: B rows, T steps, ``...`` the latent dimensions of the model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SDE_TYPES = ("sde", "cps", "dance_sde")
LEAST_NOISE = 1e-7
"""Standard deviation up to which noise counts as none: about one unit in the last place of a float32 latent near 1. Of
less, latents keep rounding alone, and so would the log-prob."""
_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd and far from 1: rows of one request never meet the seeds of its neighbours
_SEED_RANGE = 2**63 - 1


class StepCoefficients(NamedTuple):
    """The numbers that make one step, one of each a row (any common shape; [B] in :func:`sde_step`)."""

    latent: Tensor
    velocity: Tensor
    noise: Tensor
    """Standard deviation of the drawn noise; 0 makes the step deterministic, and such a step has no log-prob."""
    precision: Tensor
    log_norm: Tensor
    std: Tensor
    """What FlowGRPO's KL divides by: sde, ``a * sqrt(sigma / (1 - sigma))``; cps and dance_sde, the noise itself."""


class SDEStep(NamedTuple):
    next_latents: Tensor
    """[B, ...] float32."""
    log_prob: Tensor
    """[B] float32, the mean over a row's elements; 0 where the row's step is deterministic."""
    mean: Tensor
    """[B, ...] float32."""


def ode_coefficients(sigma: Tensor, sigma_next: Tensor) -> StepCoefficients:
    """Coefficients of the Euler step ``x + v * dt``; float64, the shape of `sigma`."""
    sigma, sigma_next = sigma.double(), sigma_next.double()
    zero = torch.zeros_like(sigma)
    return StepCoefficients(torch.ones_like(sigma), sigma_next - sigma, zero, zero, zero, zero)


def sde_coefficients(
    sigma: Tensor, sigma_next: Tensor, *, noise_level: float, sde_type: str, second_sigma: float
) -> StepCoefficients:
    """Coefficients of the stochastic step from `sigma` to `sigma_next` (float64, the shape of `sigma`).

    `second_sigma` is the schedule's second entry: it stands in for sigma = 1 where "sde" divides by 1 - sigma. Where
    the noise comes out as 0 (``noise_level`` 0, or cps going to sigma 0) or within `LEAST_NOISE` of it, the step is the
    ODE step.

    Raises ValueError for an unknown `sde_type`.
    """
    if sde_type not in SDE_TYPES:
        raise ValueError(f"sde_type={sde_type!r} is unknown; use one of {', '.join(SDE_TYPES)}")
    s, s_next, a = sigma.double(), sigma_next.double(), float(noise_level)
    dt = s_next - s
    if sde_type == "sde":
        std = a * torch.sqrt(s / (1 - torch.where(s >= 1, second_sigma, s)))
        drift = std**2 / (2 * s) * dt
        latent, velocity, noise = 1 + drift, dt + drift * (1 - s), std * torch.sqrt(-dt)
    elif sde_type == "cps":
        std = noise = s_next * math.sin(a * math.pi / 2)
        kept = torch.sqrt((s_next**2 - std**2).clamp_min(0))
        latent, velocity = 1 - s_next + kept, kept * (1 - s) - (1 - s_next) * s
    else:
        std = noise = a * torch.sqrt(-dt)
        drift = 0.5 * a**2 * dt / s
        latent, velocity = 1 + drift, dt + drift * (1 - s)
    if sde_type == "cps":
        precision, log_norm = torch.ones_like(s), torch.zeros_like(s)
    else:
        precision, log_norm = 1 / (2 * noise**2), torch.log(noise) + 0.5 * math.log(2 * math.pi)
    stochastic = StepCoefficients(latent, velocity, noise, precision, log_norm, std)
    return StepCoefficients(
        *(torch.where(noise > LEAST_NOISE, x, y) for x, y in zip(stochastic, ode_coefficients(s, s_next), strict=True))
    )


def sde_step(
    latents: Tensor,
    velocity: Tensor,
    coefficients: StepCoefficients,
    *,
    noise: Tensor | None = None,
    next_latents: Tensor | None = None,
) -> SDEStep:
    """Take one step for all rows, or score a step that was taken.

    Args:
        latents: [B, ...] float32, the samples now.
        velocity: [B, ...], any float dtype; used in float32.
        coefficients: each [B] float32, on the device of `latents`.
        noise: [B, ...] float32 standard normal draws (0 for deterministic rows); None when no row is stochastic.
        next_latents: [B, ...] float32, the samples that were taken: their log-prob is computed, nothing is drawn.
    """
    shape = (-1,) + (1,) * (latents.ndim - 1)
    latent, weight, std, precision = (c.view(shape) for c in coefficients[:4])
    mean = torch.addcmul(latent * latents, weight, velocity.float())
    if next_latents is None:
        next_latents = mean if noise is None else torch.addcmul(mean, std, noise)
    error = next_latents.detach() - mean
    log_prob = -(error.square() * precision).flatten(1).mean(1) - coefficients.log_norm
    return SDEStep(next_latents, log_prob, mean)


def row_seed(seed: int, row: int) -> int:
    """Seed of the `row`-th image of a request with `seed`: row 0 keeps the seed, the others are spread far from it."""
    return (seed + row * _SEED_STRIDE) % _SEED_RANGE


def sample_sde_window(
    *,
    sde_window_size: int | None,
    sde_window_range: tuple[int, int] | None,
    num_timesteps: int,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[int, int]:
    """Draw the steps ``start <= i < stop`` that are stochastic.

    Without a size these are steps 0 … T - 2 (nothing is drawn). With one, the start is uniform over the places where
    the window fits into ``[lo, hi)``, by default ``[0, T - 1)``, or all steps where the size is T.

    Raises ValueError when the window does not fit.
    """
    if sde_window_size is None:
        return 0, max(num_timesteps - 1, 0)
    size = sde_window_size
    lo, hi = sde_window_range if sde_window_range is not None else (0, max(num_timesteps - 1, size))
    if not (size >= 0 and lo >= 0 and lo + size <= hi <= num_timesteps):
        if sde_window_range is None:
            raise ValueError(f"sde_window_size={size} does not fit into {num_timesteps} steps")
        raise ValueError(
            f"sde_window_size={size} does not fit into sde_window_range=[{lo}, {hi}] of {num_timesteps} steps; "
            f"need 0 <= lo, lo + size <= hi <= num_inference_steps"
        )
    start = int(torch.randint(lo, hi - size + 1, (1,), generator=generator, device=device))
    return start, start + size
