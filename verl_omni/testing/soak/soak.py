"""A whole soak: seed after seed, round after round, every result checked."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.testing.soak.checks import (
    Flight,
    check_end,
    check_memory,
    check_policies,
    check_sample,
    check_solo,
    check_stats,
    error_kind,
    quarters,
)
from verl_omni.testing.soak.drive import WORKER, Driver, Hang, Played, solo
from verl_omni.testing.soak.policies import Policies
from verl_omni.testing.soak.settings import SoakSettings
from verl_omni.testing.soak.workload import CFG_KEYS, Job, Policy, make_workload
from verl_omni.utils.console import own_stderr
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

ADAPTERS = {"qwen_image": "SoakQwenImage", "sd3": "SoakStableDiffusion3"}
"""Family → class in ``adapters``."""
SAMPLE_EVERY = 20
"""Requests between two looks at the memory."""
MOST_VIOLATIONS = 20
"""After so many, the soak ends."""


@dataclass(kw_only=True)
class Tally:
    """What has happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    """Of requests, successes, checks, and what befell the engine."""
    errors: Counter[str] = field(default_factory=Counter)
    """By kind, see ``error_kind``."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    apart: float = 0.0
    """Largest difference of a latent or log-prob from its solo run."""
    death_s: list[float] = field(default_factory=list)
    """Seconds from each kill to the end of the last request in flight."""
    memory: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """Process → life → its resident memory over time, MiB."""
    violations: list[dict[str, Any]] = field(default_factory=list)

    def longest_lives(self) -> dict[str, list[float]]:
        """Process → memory over the longest of its lives."""
        return {process: max(lives.values(), key=len) for process, lives in self.memory.items()}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        forwards = sum(self.stats.batch_sizes.values())
        rows = sum(size * count for size, count in self.stats.batch_sizes.items())
        return {
            **{name: self.counts[name] for name in ("requests", "successes", "checked")},
            "errors": dict(sorted(self.errors.items())),
            **{name: self.counts[name] for name in ("retried", "swaps", "refused", "sleeps", "kills", "hangs")},
            "death_s": self.death_s,
            "waves": self.stats.waves,
            "batch_size_mean": rows / forwards if forwards else 0.0,
            "out_of_memory": self.stats.out_of_memory,
            "largest_difference": self.apart,
            "memory_mib_by_quarter": {process: quarters(samples) for process, samples in self.longest_lives().items()},
            "violations": self.violations,
        }


class Soak:
    """One soak of the model in the folder `model`."""

    def __init__(self, model: Path, settings: SoakSettings, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.tally = Tally()
        self._model, self._say = model, say
        self._driver = Driver(Policies(model), self._engine, deadline_s=settings.deadline_s)
        self._known: dict[str, RolloutSample] = {}
        self._sampled = 0

    async def run(self) -> dict[str, Any]:
        """All seeds, to the end or to ``MOST_VIOLATIONS``; returns the record."""
        begin = time.monotonic()
        try:
            await self._driver.start()
            for index, seed in enumerate(self.settings.seeds):
                try:
                    await self._seed(self.settings.of_seed(index), seed)
                except Hang as hang:
                    self._violated(seed, [str(hang)])
                    self.tally.counts["hangs"] += 1
                    break
                except Exception as error:  # whatever it is, the seed must be told
                    traceback.print_exc(file=own_stderr())
                    self._violated(seed, [f"the soak broke down: {error!r}"])
                    break
                if len(self.tally.violations) >= MOST_VIOLATIONS:
                    break
        finally:
            if not self.tally.counts["hangs"]:  # else this could wait for ever too
                await self._driver.close()
        for process, samples in self.tally.longest_lives().items():
            self._violated(None, check_memory(process, samples))
        return {"command": self.settings.command, **self.tally.as_dict(), "seconds": time.monotonic() - begin}

    async def _engine(self) -> RolloutEngine:
        settings = self.settings
        plan = RolloutPlan(
            mode=settings.mode,
            max_num_seqs=1 if settings.mode is RolloutMode.SERIAL else settings.cap,
            request_batch_max_wait_ms=0.0,
            rows_per_forward=None,
            reason="asked for",
        )
        return await RolloutEngine.start(
            model_path=self._model,
            plan=plan,
            adapter=f"verl_omni.testing.soak.adapters.{ADAPTERS[settings.family]}",
            dtype="float32",
            executor=settings.executor,
        )

    async def _seed(self, settings: SoakSettings, seed: int) -> None:
        begin = time.monotonic()
        await self._driver.install(Policy())
        to_compare: list[Flight] = []
        for script in make_workload(settings, seed):
            life = self._driver.life
            played = await self._driver.play(script)
            self._violated(seed, played.problems)
            to_compare += [flight for flight in played.flights if flight.sample and flight.job.checked]
            await self._count(seed, played, fresh=self._driver.life != life)
            if len(self.tally.violations) >= MOST_VIOLATIONS:
                return
        await self._compare(seed, to_compare)
        self._say(
            f"seed {seed}: {settings.requests} requests in {time.monotonic() - begin:.0f} s, "
            f"{len(self.tally.violations)} violations so far"
        )

    async def _count(self, seed: int, played: Played, *, fresh: bool) -> None:
        tally, flights = self.tally, played.flights
        retried = {flight.name for flight in flights if flight.to_retry}
        stats = await self._driver.within(self._driver.engine.stats(reset=True), "stats")
        assert isinstance(stats, RolloutStats)
        for flight in flights:
            self._violated(seed, [*check_end(flight), *check_sample(flight)])
            tally.counts["requests"] += not flight.to_retry
            tally.counts["successes"] += flight.sample is not None
            if (kind := error_kind(flight)) is not None:
                tally.errors[kind] += 1
        # A fresh engine counts from its start: what the one before it made is gone with it.
        first = len({flight.name for flight in flights}) if fresh else 0
        self._violated(seed, check_stats(stats, [f.job.request for f in flights[first:] if f.sample]))
        tally.counts.update(played.counts)
        tally.counts["retried"] += len(retried)
        tally.stats = RolloutStats.merged([tally.stats, stats])
        if played.death_s is not None:
            tally.death_s.append(played.death_s)
        self._look_at_memory()

    async def _compare(self, seed: int, flights: Sequence[Flight]) -> None:
        """Each sample with its solo run under its policy, and policies with each other."""
        by_policy: dict[Policy, list[Flight]] = {Policy(): []}
        for flight in flights:
            assert flight.sample is not None
            policy = self._driver.versions.get(flight.sample.policy_version)
            if policy is not None:  # else it has been told already
                by_policy.setdefault(policy, []).append(flight)
        told: dict[str, RolloutSample] = {}
        for policy, theirs in by_policy.items():
            await self._driver.install(policy)
            alone = await solo(self._driver, witness(self.settings.family))
            if isinstance(alone, RolloutError):
                self._violated(seed, [f"{policy}: {alone}"])
            else:
                told[str(policy)] = alone
            for flight in theirs:
                await self._compare_one(seed, flight)
        self._violated(seed, check_policies(told, self._known))
        self._known |= told
        await self._driver.within(self._driver.engine.release_caches(), "release_caches")
        await self._driver.within(self._driver.engine.stats(reset=True), "stats")

    async def _compare_one(self, seed: int, flight: Flight) -> None:
        alone = await solo(self._driver, flight.job)
        self.tally.counts["checked"] += 1
        if isinstance(alone, RolloutError):
            self._violated(seed, [f"{flight.name}: succeeded in company, failed alone: {alone}"])
            return
        assert flight.sample is not None
        self._violated(seed, check_solo(flight.name, flight.sample, alone))
        for name in ("latents", "trajectory_latents", "trajectory_log_probs"):
            a, b = getattr(flight.sample, name), getattr(alone, name)
            if a is not None and b is not None and a.shape == b.shape and a.numel():
                self.tally.apart = max(self.tally.apart, float((a - b).abs().max()))

    def _violated(self, seed: int | None, lines: Iterable[str]) -> None:
        for line in lines:
            settings = self.settings
            if seed is not None:
                settings = settings.of_seed(settings.seeds.index(seed))
            self.tally.violations.append({"seed": seed, "what": line, "command": settings.command})
            self._say(f"VIOLATION (seed {seed}): {line}")

    def _look_at_memory(self) -> None:
        if self.tally.counts["requests"] < self._sampled + SAMPLE_EVERY:
            return
        self._sampled = self.tally.counts["requests"]
        self._note_memory("this process", 0, os.getpid())
        for child in multiprocessing.active_children():
            if WORKER in child.name and child.pid is not None:
                self._note_memory("the engine's process", self._driver.life, child.pid)

    def _note_memory(self, process: str, life: int, pid: int) -> None:
        mib = psutil.Process(pid).memory_info().rss / 2**20
        self.tally.memory.setdefault(process, {}).setdefault(life, []).append(mib)


def witness(family: str) -> Job:
    """The request that tells policies apart."""
    scale: dict[str, Any] = {CFG_KEYS[family]: 2.0}
    request = RolloutRequest(
        request_id="witness",
        prompt="a red circle",
        negative_prompt="blurry",
        height=64,
        width=64,
        num_inference_steps=4,
        max_sequence_length=128,
        seed=7,
        output_type="latent",
        **scale,
    )
    return Job(request=request)
