"""Starts an engine for one mode and cap, and times it: warm-up, then counted repeats, for each LoRA and arrival."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from verl_omni.bench.log_prob_gap import log_prob_gap
from verl_omni.bench.model import BenchModel
from verl_omni.bench.random_lora import random_lora
from verl_omni.bench.workload import SERIAL_REQUESTS, Workload, arrival_times, request_count
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.config import DiffusionRolloutConfig
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.staging import LoraAdapter

_COUNTED = 16
"""Requests of the burst in which waits for the device are counted: an adapter decodes as many at once at most, and for
another number its VAE would be compiled once more."""

logger = logging.getLogger(__name__)


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
    peak_memory_mb: float | None = None
    """The highest of any request and replica, MiB; None: not known, as on a CPU the engines of a process share one."""
    syncs_per_step: float | None = None
    """Waits for the device while a small burst is served, over its denoising steps; None: not counted."""
    log_prob_gap: dict[str, dict[str, list[float]]] | None = None
    """See :func:`~verl_omni.bench.log_prob_gap.log_prob_gap`; None: not looked at."""
    problem: str | None = None
    """What failed after the repeats were timed."""


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
    most_serial: int | None = SERIAL_REQUESTS
    """Most of them in serial mode; None: as many as in other modes."""
    waves: int = 2
    repeats: int = 3
    warmup: int = 1
    servers: bool = False
    """Engines in processes of their own even if there is one: what several are to be compared with."""
    log_prob_gap: tuple[int, ...] = ()
    """Rows in a forward with which bursts are scored again; none: not looked at."""
    torch_profile: str | None = None
    """Begin of the names of the files for the time by kernel; None: not looked at."""

    def workload(self, mode: str) -> Workload:
        """`load`, in serial mode with groups that are no larger than `most_serial`."""
        if mode != RolloutMode.SERIAL or self.most_serial is None:
            return self.load
        return replace(self.load, n=min(self.load.n, self.most_serial))

    def count(self, mode: str, cap: int) -> int:
        """Requests of one replica in a repeat."""
        n = self.workload(mode).n
        count = request_count(cap, n, self.waves) if self.requests is None else self.requests
        if mode != RolloutMode.SERIAL or self.most_serial is None:
            return count
        return min(count, self.most_serial // n * n)

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
        self.load = bench.workload(point.mode)
        self.count = bench.count(point.mode, point.cap) * point.replicas
        self.result = Run(point=point, requests=self.count, start_s=start_s, first_s=math.nan)
        self.numbers = itertools.count()
        self.is_staggered = point.arrivals == "staggered"
        self.burst_s = math.inf
        """Seconds of the fastest burst so far."""

    async def run(self) -> Run:
        """Warm up, time, then look at what looking at would slow down."""
        result = self.result
        for i in range(self.bench.warmup + self.is_staggered):  # the last one, warm, tells the seconds of a step
            took = await self.burst(self.requests(warmup=True))
            result.first_s = took if i == 0 else result.first_s
        once = self.staggered if self.is_staggered else self.burst
        if self.is_staggered:
            await once(self.requests(warmup=True))
        await self.target.stats(reset=True)
        for _ in range(self.bench.repeats):
            result.seconds.append(await once(self.requests()))
            result.stats = RolloutStats.merged([result.stats, await self.target.stats(reset=True)])
        if isinstance(self.target, RolloutEngine):
            try:
                await self.look_closer(self.target)
            except Exception as error:  # what was timed is not lost for it
                logger.exception(
                    "%s with cap %d was timed, but not all of it was looked at", result.point.mode, result.point.cap
                )
                result.problem = described(error)
        return result

    async def look_closer(self, engine: RolloutEngine) -> None:
        """Count waits for the device, score bursts again, find the time by kernel."""
        bench = self.bench
        if torch.cuda.is_available():
            await engine.call_worker("count_host_syncs", True)
            try:
                await self.burst(self.requests(min(self.count, self.point.cap, _COUNTED)))
            finally:  # what is timed next must not be counted
                counted = await engine.call_worker("count_host_syncs", False)
            self.result.syncs_per_step = counted["syncs"] / max(counted["steps"], 1)
        in_weights = self.point.lora_rank == 0 or bench.rollout.merge_lora
        if bench.log_prob_gap and in_weights and not self.is_staggered:
            asked = self.requests(max(bench.log_prob_gap))
            self.result.log_prob_gap = await log_prob_gap(engine, asked, bench.log_prob_gap)
        if bench.torch_profile is not None and not self.is_staggered:
            await self.torch_profile(bench.torch_profile)

    def requests(self, count: int | None = None, *, warmup: bool = False) -> list[RolloutRequest]:
        """The next `count` (None: those of a repeat), which no point of this engine had before."""
        tag = f"{self.point.lora_rank}-{self.point.arrivals}-{next(self.numbers)}"
        return self.load.requests(count or self.count, tag, warmup=warmup)

    async def burst(self, requests: Sequence[RolloutRequest]) -> float:
        """Seconds from the submission of all requests to the last result."""
        start = time.perf_counter()
        async with aclosing(self.target.generate_all(requests)) as results:
            async for sample in results:
                if isinstance(sample, RolloutError):
                    raise sample
                self.note_memory(sample)
        took = time.perf_counter() - start
        self.burst_s = min(self.burst_s, took)
        return took

    async def staggered(self, requests: Sequence[RolloutRequest]) -> float:
        """Seconds from the first submission to the last result."""
        load, cap = self.load, self.point.cap * self.point.replicas
        step_s = self.burst_s / math.ceil(len(requests) / cap) / load.steps
        times = arrival_times(len(requests), cap=cap, steps=load.steps, step_s=step_s, seed=load.seed)

        async def arrive(request: RolloutRequest, after: float) -> None:
            await asyncio.sleep(after)
            sample = await self.target.generate(request)
            self.note_memory(sample)

        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for request, after in zip(requests, times, strict=True):
                    group.create_task(arrive(request, after))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return time.perf_counter() - start

    def note_memory(self, sample: RolloutSample) -> None:
        """Keep the peak of `sample`, where it is that of this engine alone."""
        if torch.cuda.is_available() or self.bench.servers:
            self.result.peak_memory_mb = max(self.result.peak_memory_mb or 0.0, sample.peak_memory_mb)

    async def torch_profile(self, prefix: str) -> None:
        """Write where the time of one more burst goes, by kernel."""
        with torch.profiler.profile() as profiler:
            await self.burst(self.requests())
        table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=40)
        name = f"{prefix}.{self.point.mode}.{self.point.cap}.lora{self.point.lora_rank}.txt"
        Path(name).write_text(table, encoding="utf-8")


def described(error: BaseException) -> str:
    """Kind and message of `error`, which itself would keep the memory of all that failed."""
    return f"{type(error).__name__}: {error}"
