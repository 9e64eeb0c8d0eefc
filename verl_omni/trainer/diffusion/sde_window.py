"""Where the stochastic steps lie as training goes on: MixGRPO's moving window (arXiv 2507.21802).

MixGRPO samples and trains only the steps of one window, the same for all samples, and moves it from the early steps,
which decide most of an image, to the late ones: every `interval` training steps by `stride` denoising steps. At the end
of its range it stays. Pure; imports neither torch nor the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_omni.trainer.diffusion.settings import SDEWindowScheduleConfig
    from verl_omni.workers.config import DiffusionRolloutAlgoConfig


def window_at(step: int, *, size: int, lo: int, hi: int, interval: int, stride: int) -> tuple[int, int]:
    """The denoising steps ``start <= i < stop`` of the window in training step `step`, the first of which is 1.

    ``start = min(lo + stride * ((step - 1) // interval), hi - size)``. Raises ValueError when the window does not fit
    into ``[lo, hi)``, or `step`, `interval` or `stride` is below 1.
    """
    if min(step, interval, stride) < 1:
        raise ValueError(f"step={step}, interval={interval} and stride={stride} must be at least 1")
    if not (size >= 0 and 0 <= lo <= hi - size):
        raise ValueError(f"a window of {size} steps does not fit into [{lo}, {hi})")
    start = min(lo + stride * ((step - 1) // interval), hi - size)
    return start, start + size


def window_range(algo: DiffusionRolloutAlgoConfig, num_inference_steps: int) -> tuple[int, int]:
    """[lo, hi): the denoising steps in which the windows of `algo` lie."""
    return algo.sde_window_range or (0, max(num_inference_steps - 1, algo.sde_window_size or 0))


def scheduled_range(
    step: int, schedule: SDEWindowScheduleConfig, algo: DiffusionRolloutAlgoConfig, num_inference_steps: int | None
) -> tuple[int, int] | None:
    """What ``rollout.algo.sde_window_range`` is in training step `step`, the first of which is 1.

    "fixed": as configured. "moving": the one place of :func:`window_at`. `num_inference_steps` may be None where the
    range is configured. Raises ValueError for a moving window without a size, or as :func:`window_at` does.
    """
    if schedule.type == "fixed":
        return algo.sde_window_range
    if algo.sde_window_size is None or (algo.sde_window_range is None and num_inference_steps is None):
        raise ValueError("a moving window needs sde_window_size, and sde_window_range or num_inference_steps")
    lo, hi = window_range(algo, num_inference_steps or 0)
    return window_at(step, size=algo.sde_window_size, lo=lo, hi=hi, interval=schedule.interval, stride=schedule.stride)
