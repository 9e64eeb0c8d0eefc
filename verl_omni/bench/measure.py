"""Starts an engine for one mode and cap, and times it: warm-up, then counted repeats, for each LoRA and arrival."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from verl_omni.bench.log_prob_gap import log_prob_gap
from verl_omni.bench.model import BenchModel
from verl_omni.bench.random_lora import random_lora
from verl_omni.bench.workload import Workload, arrival_times, request_count
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.config import DiffusionRolloutConfig
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.staging import LoraAdapter

_COUNTED = 8
"""Requests of the burst in which waits for the device are counted; how many does not matter to a step."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one row of the table is about."""

    mode: str
    cap: int
    replicas: int
    lora_rank: int
    """0: no LoRA."""
    arrivals: str
    """One of `workload.ARRIVALS`."""


@dataclass(kw_only=True)
class Run:
    """One point, measured on one engine."""

    point: Point
    requests: int
    """In a repeat, of all replicas together."""
    start_s: float
    """Seconds that the engine took to start."""
    first_s: float
    """Seconds of the first warm-up, which compiles."""
    seconds: list[float] = field(default_factory=list)
    """Of each repeat, from the first submission to the last result."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    """What the engines counted over all repeats."""
    peak_memory_mb: float = 0.0
    """The highest of any request and replica, MiB."""
    syncs_per_step: float | None = None
    """Waits for the device in one denoising step; None: not counted."""
    log_prob_gap: dict[str, dict[str, list[float]]] | None = None
    """See :func:`~verl_omni.bench.log_prob_gap.log_prob_gap`; None: not looked at."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, whatever the mode and cap."""

    model: BenchModel
    load: Workload
    rollout: DiffusionRolloutConfig
    """Dtype, engine options, merged LoRA; its pipeline has the sizes of `load`."""
    lora_ranks: tuple[int, ...] = (0,)
    arrivals: tuple[str, ...] = ("burst",)
    requests: int | None = None
    """In a repeat, of each replica; None: at least `waves` full batches."""
    waves: int = 2
    repeats: int = 3
    warmup: int = 1
    servers: bool = False
    """Engines in processes of their own even if there is one: what several are to be compared with."""
    log_prob_gap: tuple[int, ...] = ()
    """Rows in a forward with which bursts without LoRA are scored again; none: not looked at."""
    kernels: str | None = None
    """Begin of the files for the time by kernel; None: not looked at."""

    def count(self, cap: int) -> int:
        """Requests of one replica in a repeat."""
        return request_count(cap, self.load.n, self.waves) if self.requests is None else self.requests

    def points(self, mode: RolloutMode, cap: int, replicas: int) -> list[Point]:
        """What one engine start measures, in order."""
        return [
            Point(mode=mode.value, cap=cap, replicas=replicas, lora_rank=rank, arrivals=arrivals)
            for rank in self.lora_ranks
            for arrivals in self.arrivals
        ]


class Target(Protocol):
    """What is timed: an engine in this process, or servers."""

    async def generate(self, request: RolloutRequest) -> RolloutSample: ...
    def generate_all(
        self, requests: Sequence[RolloutRequest]
    ) -> AsyncGenerator[RolloutSample | RolloutError, None]: ...
    async def stats(self, reset: bool = False) -> RolloutStats: ...
    async def load_lora(self, adapter: LoraAdapter) -> None: ...
    async def close(self) -> None: ...


async def measure(bench: Bench, mode: RolloutMode, cap: int, replicas: int) -> AsyncGenerator[Run, None]:
    """Start the engines, and measure their points one by one. Raises what a start or a request raises."""
    start = time.perf_counter()
    target = await _start(bench, mode, cap, replicas)
    started = time.perf_counter() - start
    try:
        rank = 0
        for point in bench.points(mode, cap, replicas):
            if point.lora_rank != rank:
                rank = point.lora_rank
                await target.load_lora(random_lora(bench.model.transformer, rank, getattr(torch, bench.rollout.dtype)))
            yield await Timing(bench, target, point, started).run()
    finally:
        await target.close()
        gc.collect()
        if torch.cuda.is_available():  # the next engine in this process must not find its memory taken
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


async def _start(bench: Bench, mode: RolloutMode, cap: int, replicas: int) -> Target:
    plan = RolloutPlan(
        mode=mode,
        max_num_seqs=cap,
        request_batch_max_wait_ms=0.0,
        rows_per_forward=bench.rollout.vllm_omni.get("rows_per_forward"),
        reason="benchmark",
    )
    common: dict[str, Any] = dict(
        model_path=str(bench.model.path),
        plan=plan,
        adapter=bench.model.adapter_path,
        dtype=bench.rollout.dtype,
        engine_kwargs=bench.rollout.engine_options(),
        merge_lora=bench.rollout.merge_lora,
    )
    if not bench.servers:
        return await RolloutEngine.start(**common)
    from verl_omni.bench.servers import Servers, ServerSettings

    return await Servers.start(ServerSettings(**common), replicas)


class Timing:
    """The repeats of one point on a running engine."""

    def __init__(self, bench: Bench, target: Target, point: Point, start_s: float) -> None:
        self.bench, self.target, self.point = bench, target, point
        self.count = bench.count(point.cap) * point.replicas
        self.result = Run(point=point, requests=self.count, start_s=start_s, first_s=math.nan)
        self.numbers = itertools.count()
        self.burst_s = math.inf
        """Seconds of the fastest burst so far."""

    async def run(self) -> Run:
        """Warm up, time, then count what counting would slow down."""
        result, target, bench = self.result, self.target, self.bench
        staggered = self.point.arrivals == "staggered"
        for i in range(bench.warmup + staggered):  # the last one, warm, tells the seconds of a step
            took = await self.burst(self.requests(warmup=True))
            result.first_s = took if i == 0 else result.first_s
        once = self.staggered if staggered else self.burst
        if staggered:
            await once(self.requests(warmup=True))
        await target.stats(reset=True)
        for _ in range(bench.repeats):
            result.seconds.append(await once(self.requests()))
            result.stats = RolloutStats.merged([result.stats, await target.stats(reset=True)])
        if isinstance(target, RolloutEngine) and torch.cuda.is_available():
            await target.call_worker("count_host_syncs", True)
            await self.burst(self.requests()[:_COUNTED])
            counted = await target.call_worker("count_host_syncs", False)
            result.syncs_per_step = counted["syncs"] / max(counted["steps"], 1)
        if bench.log_prob_gap and isinstance(target, RolloutEngine) and not staggered and not self.point.lora_rank:
            asked = self.requests()[: max(bench.log_prob_gap)]
            result.log_prob_gap = await log_prob_gap(target, asked, bench.log_prob_gap)
        if bench.kernels is not None and not staggered:
            await self.kernels(bench.kernels)
        await target.stats(reset=True)
        return result

    def requests(self, *, warmup: bool = False) -> list[RolloutRequest]:
        """The next ones, which no point of this engine had before."""
        tag = f"{self.point.lora_rank}-{self.point.arrivals}-{next(self.numbers)}"
        return self.bench.load.requests(self.count, tag, warmup=warmup)

    async def burst(self, requests: Sequence[RolloutRequest]) -> float:
        """Seconds from the submission of all requests to the last result."""
        start = time.perf_counter()
        async for sample in self.target.generate_all(requests):
            if isinstance(sample, RolloutError):
                raise sample
            self.result.peak_memory_mb = max(self.result.peak_memory_mb, sample.peak_memory_mb)
        took = time.perf_counter() - start
        self.burst_s = min(self.burst_s, took)
        return took

    async def staggered(self, requests: Sequence[RolloutRequest]) -> float:
        """Seconds from the first submission to the last result."""
        load, cap = self.bench.load, self.point.cap * self.point.replicas
        step_s = self.burst_s / math.ceil(len(requests) / cap) / load.steps
        times = arrival_times(len(requests), cap=cap, steps=load.steps, step_s=step_s, seed=load.seed)

        async def arrive(request: RolloutRequest, after: float) -> None:
            await asyncio.sleep(after)
            sample = await self.target.generate(request)
            self.result.peak_memory_mb = max(self.result.peak_memory_mb, sample.peak_memory_mb)

        start = time.perf_counter()
        await asyncio.gather(*map(arrive, requests, times))
        return time.perf_counter() - start

    async def kernels(self, begin: str) -> None:
        """Write where the time of one more burst goes, by kernel."""
        with torch.profiler.profile() as profiler:
            await self.burst(self.requests())
        table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=40)
        name = f"{begin}.{self.point.mode}.{self.point.cap}.lora{self.point.lora_rank}.txt"
        Path(name).write_text(table, encoding="utf-8")
