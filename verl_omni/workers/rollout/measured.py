"""What a profile says of a mode: the cap at which it would run, how fast that was, and whether it fits the device.

A cap that is set is that cap, if it was measured. An unset one is chosen among the measured caps whose peak memory is
within `MEMORY_SHARE` of the device's, where both are known. Those within `TIE` of the fastest of them are the plateau.
Of the plateau it is the trainer's log-prob micro-batch if that is one of it, else the smallest. If no measured cap fits
the memory, it is the smallest of all.

Speed still rises where the plateau is the largest measured cap alone, above smaller ones, and no larger one failed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from verl_omni.workers.config.rollout import RolloutMode
from verl_omni.workers.rollout.profile import ProfilePoint, RolloutProfile

TIE = 0.03
"""Run-to-run noise of the measurements: what lies within it is no difference."""
MEMORY_SHARE = 0.9
"""What a measured peak may take of the device: the rest is for its driver, other processes and longer prompts."""
STILL_RISING = "images/s still rise there, so larger --caps are worth measuring"
"""What is said of the largest measured cap where :func:`still_rises`."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A mode at the cap at which it would run."""

    point: ProfilePoint
    """What was measured there."""
    fits: bool
    """Whether its peak memory fits the device; true where it is unknown."""
    why: str
    """Why this cap."""


def measured_run(
    profile: RolloutProfile,
    mode: RolloutMode,
    cap: int | None,
    *,
    micro_batch: int | None = None,
    memory_gib: float | None = None,
) -> MeasuredRun | None:
    """Decide by the rule at the head of this module; None if the mode was not measured (at `cap`).

    `cap` None: unset. `micro_batch`: rows that suit the trainer; None: any do. `memory_gib`: of the device, in GiB;
    None: everything fits.
    """
    points = profile.measured(mode)
    cap = 1 if mode is RolloutMode.SERIAL else cap
    if cap is not None:
        points = {cap: points[cap]} if cap in points else {}
    if not points:
        return None
    fitting = {cap: point for cap, point in points.items() if _fits(point, memory_gib)}
    if not fitting:
        return MeasuredRun(
            point=points[min(points)], fits=False, why="the smallest measured, and none fits the device's memory"
        )
    plateau = _plateau({cap: point.images_per_s for cap, point in fitting.items()})
    rates = {cap: point.images_per_s for cap, point in points.items()}
    if plateau == [max(points)] and still_rises(rates, profile.failed_caps(mode)):
        return MeasuredRun(point=points[max(points)], fits=True, why=f"the largest measured; {STILL_RISING}")
    where = f"measured within {TIE:.0%} of the plateau" + (
        " of the caps that fit the memory" if fitting != points else ""
    )
    if micro_batch in plateau:
        return MeasuredRun(point=fitting[micro_batch], fits=True, why=f"the trainer's log-prob micro-batch, {where}")
    return MeasuredRun(point=fitting[min(plateau)], fits=True, why=f"the smallest {where}")


def could_not_run(profile: RolloutProfile, mode: RolloutMode, cap: int | None) -> bool:
    """Whether `mode` failed when it was to be measured: at `cap`; None: at every cap that was tried."""
    failed = profile.failed_caps(mode)
    return cap in failed if cap is not None else bool(failed) and not profile.measured(mode)


def still_rises(rates: Mapping[int, float], failed: Collection[int] = ()) -> bool:
    """Whether speed still rises at the largest cap: by the rule at the head of this module.

    `rates`: cap → images/s of one mode; `failed`: caps that could not be measured.
    """
    largest = max(rates, default=0)
    return len(rates) > 1 and _plateau(rates) == [largest] and max(failed, default=0) < largest


def _plateau(rates: Mapping[int, float]) -> list[int]:
    """The caps within `TIE` of the fastest."""
    return [cap for cap, rate in rates.items() if rate >= (1 - TIE) * max(rates.values())]


def _fits(point: ProfilePoint, memory_gib: float | None) -> bool:
    return memory_gib is None or (point.peak_memory_gib or 0.0) <= MEMORY_SHARE * memory_gib
