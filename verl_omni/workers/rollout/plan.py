"""Which batching mode a rollout runs in, and why. A pure function of the configuration, the adapter and a profile.

1. ``batching_mode`` step_wise, request_level or serial: that mode. The adapter must support it, and
   ``step_execution`` and ``max_num_seqs`` must not say otherwise: serial is a cap of 1, ``step_execution=true`` is
   step-wise, and ``false`` under ``engine_kwargs.vllm_omni`` is not (``rollout.step_execution=false`` is the default
   and asks for nothing).
2. ``batching_mode`` auto: of the modes that the adapter supports (and that an explicit ``step_execution`` leaves),
   the one that a matching profile shows to be fastest, each at the cap at which it would run. Modes within `TIE` of
   the fastest are tied. Tied, or not all batching modes measured at this cap: step-wise before request-level before
   serial. Of two batching modes of which one fits the device's memory, the other is left out; memory alone makes no
   run serial. A batching mode that failed when it was to be measured (at this cap; unset, at all caps) is left out
   too, unless all of them are.
3. ``batching_mode`` null: ``step_execution=true`` is step-wise; otherwise a cap above 1 is request-level, and a cap
   of 1 or none is serial. Where request-level is meant, an adapter with neither batching mode runs serially, with a
   note; one that batches only step-wise is an error, because what would batch it is one override away.

The cap is ``max_num_seqs``, in ``rollout`` or in ``engine_kwargs.vllm_omni`` (two values: error). Unset, it is what a
matching profile shows to suit the mode, the memory and the trainer (the rule is told in ``measured.py``), else
`DEFAULT_MAX_NUM_SEQS`. The trainer's log-prob micro-batch counts unless the dtype is float32, in which batch shapes
hardly matter, or ``rows_per_forward`` is below it. Serial has cap 1.

A profile matches if its key is that of the run (see ``profile_key.py``). One that does not is not used; a note says in
what it differs and how to measure one that matches. Where the configuration overrules what a profile shows, or leaves
it nothing to decide, a note says so too. What can't be is a :class:`PlanError`: what was asked, why it can't be, what
to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from verl_omni.workers.config import DiffusionRolloutConfig
from verl_omni.workers.config.rollout import RolloutMode
from verl_omni.workers.rollout.asked import ROLLOUT, Asked, PlanError
from verl_omni.workers.rollout.measured import TIE, MeasuredRun, could_not_run, measured_run
from verl_omni.workers.rollout.plan_notes import Choice, batch_notes, memory_notes, overruled_notes, stale_notes
from verl_omni.workers.rollout.profile import ProfileKey, RolloutProfile

Measured = Mapping[RolloutMode, MeasuredRun]
"""What a matching profile shows of each mode that it covers."""

DEFAULT_MAX_NUM_SEQS = 16
"""Batching saturates near 8 rows at 512x512; twice that leaves room for smaller images."""
STEP_METHODS = ("prepare_encode", "denoise_step", "step_scheduler", "post_decode")
"""The methods that make an adapter step-wise."""


@dataclass(frozen=True, kw_only=True)
class AdapterCapabilities:
    """What an adapter class can do, read off it."""

    name: str
    """Class name, for messages."""
    request_batch: bool
    """``forward`` takes a batch of requests."""
    missing_step_methods: tuple[str, ...]
    """What it lacks for step-wise batching; empty if it lacks nothing."""

    @property
    def step_wise(self) -> bool:
        """Whether it can be driven step by step."""
        return not self.missing_step_methods

    @property
    def modes(self) -> tuple[RolloutMode, ...]:
        """The modes it supports, the preferred one first."""
        batching = ((RolloutMode.STEP_WISE, self.step_wise), (RolloutMode.REQUEST_LEVEL, self.request_batch))
        return (*(mode for mode, supported in batching if supported), RolloutMode.SERIAL)

    @classmethod
    def of(cls, adapter: type) -> AdapterCapabilities:
        """Read them off the class; nothing is instantiated."""
        missing = tuple(name for name in STEP_METHODS if not callable(getattr(adapter, name, None)))
        if not getattr(adapter, "supports_step_execution", False):
            missing = (*missing, "supports_step_execution = True")
        return cls(
            name=adapter.__name__,
            request_batch=bool(getattr(adapter, "supports_request_batch", False)),
            missing_step_methods=missing,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """How the engine is to be started. It starts with exactly this."""

    mode: RolloutMode
    """What is batched."""
    max_num_seqs: int
    """Requests in a batch at most; 1 in serial mode."""
    request_batch_max_wait_ms: float
    """How long a request-level batch waits for more requests, in ms, when nothing runs."""
    rows_per_forward: int | None
    """Rows in one transformer forward at most; None: as many as are in flight."""
    reason: str
    """Why this mode and this cap."""
    notes: tuple[str, ...] = ()
    """What the user should know beside the reason; to be logged as warnings."""

    def engine_kwargs(self) -> dict[str, Any]:
        """The engine's switches."""
        return {
            "step_execution": self.mode is RolloutMode.STEP_WISE,
            "max_num_seqs": self.max_num_seqs,
            "request_batch_max_wait_ms": self.request_batch_max_wait_ms,
        }

    def log_line(self) -> str:
        """Mode, cap and reason in one line."""
        return f"rollout plan: mode={self.mode.value} max_num_seqs={self.max_num_seqs} ({self.reason})"


def resolve_plan(
    rollout: DiffusionRolloutConfig,
    capabilities: AdapterCapabilities,
    profile: RolloutProfile | None = None,
    log_prob_micro_batch: int | None = None,
    *,
    key: ProfileKey | None = None,
    memory_gib: float | None = None,
) -> RolloutPlan:
    """Decide by the rule at the head of this module.

    `log_prob_micro_batch` is the row count of the trainer's log-prob forward (None: the configured one). `key` tells
    what the run is, to be compared with the profile's; without it only size, steps and dtype are compared, and the rest
    is taken on trust. `memory_gib` is what the device has, in GiB (None: unknown, everything fits).

    Raises :class:`PlanError`.
    """
    asked = Asked.read(rollout)
    micro = log_prob_micro_batch or rollout.log_prob_micro_batch_size_per_gpu
    key = None if profile is None else key or profile.key.with_request_shape(rollout)
    stale = profile if profile is not None and key is not None and profile.key.differences(key) else None
    usable = profile if stale is None else None
    suiting = None if rollout.dtype == "float32" else micro
    made = _choose(asked, capabilities, usable, suiting, memory_gib)
    notes = [*batch_notes(asked, made, rollout.dtype, micro), *memory_notes(asked, made.run, memory_gib)]
    if profile is not None and key is not None:
        shown = _choose(asked.freed(), capabilities, usable, suiting, memory_gib)
        notes += [*stale_notes(profile, key, rollout.pipeline), *overruled_notes(profile, asked, made, shown)]
    concerned = asked.batching_mode == "auto" or (made.mode is not RolloutMode.SERIAL and asked.cap is None)
    return RolloutPlan(
        mode=made.mode,
        max_num_seqs=made.cap,
        request_batch_max_wait_ms=asked.wait_ms,
        rows_per_forward=asked.rows,
        reason=made.reason + (f"; the {stale.name} is stale and not used" if stale is not None and concerned else ""),
        notes=tuple(notes),
    )


def _choose(
    asked: Asked,
    capabilities: AdapterCapabilities,
    profile: RolloutProfile | None,
    micro_batch: int | None,
    memory_gib: float | None,
) -> Choice:
    """Mode and cap by what was asked and by a profile that matches. `micro_batch`: rows that suit the trainer."""
    measured = _measured(profile, asked, micro_batch, memory_gib)
    failed = {mode for mode in RolloutMode if profile is not None and could_not_run(profile, mode, asked.cap)}
    mode, reason = _mode(asked, capabilities, measured, failed)
    cap, cap_reason = _cap(asked, mode, measured)
    return Choice(mode=mode, cap=cap, reason=reason + cap_reason, run=measured.get(mode))


def _measured(
    profile: RolloutProfile | None, asked: Asked, micro_batch: int | None, memory_gib: float | None
) -> Measured:
    if profile is None:
        return {}
    if micro_batch is not None and asked.rows is not None and asked.rows < micro_batch:
        micro_batch = None  # no cap gives the forward so many rows
    runs = (
        (mode, measured_run(profile, mode, asked.cap, micro_batch=micro_batch, memory_gib=memory_gib))
        for mode in RolloutMode
    )
    return {mode: run for mode, run in runs if run is not None}


def _mode(
    asked: Asked, capabilities: AdapterCapabilities, measured: Measured, failed: Set[RolloutMode]
) -> tuple[RolloutMode, str]:
    if asked.batching_mode == "auto":
        return _auto(asked, capabilities, measured, failed)
    if asked.batching_mode is not None:
        mode = RolloutMode(asked.batching_mode)
        asked.check_agreement(mode)
        _check_support(asked, mode, f"{ROLLOUT}.batching_mode={mode.value}", capabilities)
        return mode, f"batching_mode={mode.value}"
    if asked.step:
        _check_support(asked, RolloutMode.STEP_WISE, "step_execution=true", capabilities)
        return RolloutMode.STEP_WISE, "step_execution=true"
    if asked.cap is None or asked.cap == 1:
        return RolloutMode.SERIAL, "neither step_execution nor a max_num_seqs above 1 is set"
    if capabilities.request_batch:
        return RolloutMode.REQUEST_LEVEL, f"max_num_seqs={asked.cap} without step_execution"
    if capabilities.step_wise:
        raise PlanError(
            f"max_num_seqs={asked.cap} without step_execution asks for request-level batching; {capabilities.name} "
            f"does not set supports_request_batch = True, but it batches step-wise",
            asked.overrides_to(RolloutMode.STEP_WISE),
        )
    return RolloutMode.SERIAL, f"{capabilities.name} supports neither step-wise nor request-level batching"


def _check_support(asked: Asked, mode: RolloutMode, wanted: str, capabilities: AdapterCapabilities) -> None:
    """Raise if the adapter lacks `mode`."""
    if mode in capabilities.modes:
        return
    lack = "does not set supports_request_batch = True"
    if mode is RolloutMode.STEP_WISE:
        lack = f"lacks {', '.join(capabilities.missing_step_methods)}"
    raise PlanError(f"{wanted} can't be: {capabilities.name} {lack}", asked.overrides_to(capabilities.modes[0]))


def _auto(
    asked: Asked, capabilities: AdapterCapabilities, measured: Measured, failed: Set[RolloutMode]
) -> tuple[RolloutMode, str]:
    modes = capabilities.modes
    if asked.step:
        _check_support(asked, RolloutMode.STEP_WISE, "step_execution=true", capabilities)
        return RolloutMode.STEP_WISE, "auto, and step_execution=true"
    if asked.step is False:
        modes = tuple(mode for mode in modes if mode is not RolloutMode.STEP_WISE)
    if modes == (RolloutMode.SERIAL,):
        left = "" if asked.step is None else " that step_execution=false leaves"
        return RolloutMode.SERIAL, f"auto: {capabilities.name} supports no batching mode{left}"
    batching = [mode for mode in modes if mode is not RolloutMode.SERIAL]
    able = [mode for mode in batching if mode not in failed] or batching
    told = "".join(f"; {mode.value} failed when it was to be measured" for mode in batching if mode in failed)
    if any(mode not in measured for mode in able):
        where = "" if asked.cap is None else f" at max_num_seqs={asked.cap}"
        return able[0], f"auto: not measured{where}, {able[0].value} is preferred{told}"
    mode, reason = _fastest({mode: measured[mode] for mode in modes if mode in measured})
    return mode, reason + told


def _fastest(runs: Measured) -> tuple[RolloutMode, str]:
    """The fastest of `runs`, the preferred ones first, and why."""
    too_large = [mode for mode, run in runs.items() if not run.fits and mode is not RolloutMode.SERIAL]
    if len(too_large) == len(runs.keys() - {RolloutMode.SERIAL}):
        too_large = []
    rates = {mode: run.point.images_per_s for mode, run in runs.items() if mode not in too_large}
    tied = [mode for mode, rate in rates.items() if rate >= (1 - TIE) * max(rates.values())]
    shown = [f"{mode.value} {rate:.4g} images/s" for mode, rate in rates.items()]
    shown += [f"{mode.value} does not fit the device's memory" for mode in too_large]
    verdict = f"tied within {TIE:.0%}, {tied[0].value} is preferred" if len(tied) > 1 else f"{tied[0].value} is fastest"
    return tied[0], f"auto: measured {', '.join(shown)}: {verdict}"


def _cap(asked: Asked, mode: RolloutMode, measured: Measured) -> tuple[int, str]:
    if mode is RolloutMode.SERIAL:
        return 1, ""
    if asked.cap is not None:
        return asked.cap, ""
    if mode not in measured:
        return DEFAULT_MAX_NUM_SEQS, f"; max_num_seqs is unset, {DEFAULT_MAX_NUM_SEQS} is the default"
    cap = measured[mode].point.max_num_seqs
    return cap, f"; max_num_seqs is unset, {cap} is {measured[mode].why}"
