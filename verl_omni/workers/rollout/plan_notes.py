"""What the user should know of a plan beside its reason; to be logged as warnings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verl_omni.workers.config.rollout import DiffusionPipelineConfig, RolloutMode
from verl_omni.workers.rollout.asked import ENGINE, ROLLOUT, Asked
from verl_omni.workers.rollout.bench_command import bench_command, beyond_bench
from verl_omni.workers.rollout.measured import MEMORY_SHARE, MeasuredRun
from verl_omni.workers.rollout.profile import ProfileKey, RolloutProfile


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A mode and its cap."""

    mode: RolloutMode
    """What is batched."""
    cap: int
    """Requests in a batch at most; 1 in serial mode."""
    reason: str
    """Why both."""
    run: MeasuredRun | None
    """What a matching profile shows of the mode, at the cap that was asked or at one that it shows to suit."""


def batch_notes(asked: Asked, made: Choice, dtype: str, micro: int | None) -> Iterable[str]:
    """What was asked without effect, and rows in a forward that are not the `micro` ones of the trainer's log-prob."""
    cap, serial = made.cap, made.mode is RolloutMode.SERIAL
    if serial and (asked.cap or 1) > 1:
        yield f"max_num_seqs={asked.cap} is not used, requests run one at a time: {made.reason}"
    if not serial and cap == 1:
        yield f"max_num_seqs=1 batches nothing; write a higher {ROLLOUT}.max_num_seqs"
    if asked.wait_ms > 0 and made.mode is not RolloutMode.REQUEST_LEVEL:
        yield f"request_batch_max_wait_ms={asked.wait_ms:g} has no effect: only request-level batches wait"
    rows = min(asked.rows or cap, cap)
    if micro is not None and rows != micro and dtype != "float32":
        yield (
            f"the rollout runs {rows} rows a forward, the trainer's log-prob {micro}: {dtype} kernels round otherwise "
            "at other batch shapes, and a clip ratio can be as small as 1e-5; check the first step's ratio, or write "
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={rows}"
        )


def memory_notes(asked: Asked, run: MeasuredRun | None, memory_gib: float | None) -> Iterable[str]:
    """A measured peak that does not fit the device."""
    if run is None or run.fits or run.point.mode == RolloutMode.SERIAL:
        return
    yield (
        ("no measured cap fits the device's memory: " if asked.cap is None else "")
        + f"at max_num_seqs={run.point.max_num_seqs} a peak of {run.point.peak_memory_gib:.4g} GiB was measured, above "
        f"{MEMORY_SHARE:.0%} of the device's {memory_gib:.4g} GiB; write a smaller {ROLLOUT}.max_num_seqs or "
        f"{ENGINE}.rows_per_forward"
    )


def stale_notes(profile: RolloutProfile, key: ProfileKey, pipeline: DiffusionPipelineConfig) -> Iterable[str]:
    """In what a profile differs from the run with `key`, and how to measure one that does not."""
    differences = profile.key.differences(key)
    if not differences:
        return
    scales = (scale for scale in (pipeline.true_cfg_scale, pipeline.guidance_scale) if scale is not None and scale > 1)
    command, beyond = bench_command(key, guidance=next(scales, None)), beyond_bench(key)
    how = "measure one for this run:"
    if beyond:
        how = f"the bench cannot measure {', '.join(beyond)}; as near as it comes:"
    yield f"the {profile.name} is stale and not used ({', '.join(differences)}); {how} {command}"


def overruled_notes(profile: RolloutProfile, asked: Asked, made: Choice, shown: Choice) -> Iterable[str]:
    """What keeps a profile from deciding, if it would decide otherwise or has nothing left to decide.

    `shown` is what it decides where it is free to; without a measured run it shows nothing.
    """
    settled = list(asked.settled())
    differs = shown.run is not None and (shown.mode, shown.cap) != (made.mode, made.cap)
    nothing_left = asked.sets_mode and (asked.cap is not None or made.mode is RolloutMode.SERIAL)
    if not settled or not (differs or nothing_left):
        return
    told, overrides = zip(*settled, strict=True)
    shows = ""
    if shown.run is not None:
        rate = f"{shown.run.point.images_per_s:.4g} images/s"
        shows = f"; it shows {shown.mode.value} with max_num_seqs={shown.cap}, {rate}"
    by = ", ".join(dict.fromkeys(told))
    yield f"the {profile.name} is overruled by {by}{shows}; to go by it, write {' '.join(overrides)}"
