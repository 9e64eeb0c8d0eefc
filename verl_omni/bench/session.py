"""All that one command measures: every mode, cap and number of replicas, some rounds of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import torch

from verl_omni.bench.arguments import CPU_CAPS, GPU_CAPS
from verl_omni.bench.measure import Bench, Point, Run, measure
from verl_omni.bench.model import BenchModel
from verl_omni.bench.peak import matrix_peak
from verl_omni.bench.record import add_ratios, failed_row, make_record, make_row
from verl_omni.bench.report import say
from verl_omni.bench.workload import RECIPES, Recipe, Workload
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.config.rollout import DiffusionPipelineConfig, check_engine_keys
from verl_omni.workers.rollout.engine_keys import engine_keys
from verl_omni.workers.rollout.plan import AdapterCapabilities, RolloutMode

TINY_SIZE = 64
"""Pixels of tiny models, whatever the recipe of the large ones."""

logger = logging.getLogger(__name__)


def make_bench(args: argparse.Namespace, model: BenchModel) -> Bench:
    """What is measured. Raises :class:`ConfigError` for engine arguments that are unknown."""
    recipe = RECIPES.get(model.architecture) or Recipe(limits=(None,) * getattr(model.adapter, "num_encoders", 1))
    size = args.size or [TINY_SIZE if args.tiny else recipe.size]
    n = args.n or recipe.n
    load = Workload(
        height=size[0],
        width=size[-1],
        steps=args.steps,
        cfg=recipe.cfg if args.cfg is None else args.cfg,
        cfg_key=getattr(model.adapter, "cfg_key", "true_cfg_scale"),
        n=n if args.requests is None else min(n, args.requests),
        text=args.text,
        negative_text=args.negative_text,
        seed=args.seed,
        recipe=recipe,
    )
    if args.requests is not None and args.replicas > 1 and args.requests % load.n:
        raise ConfigError(f"--requests {args.requests} must be whole groups of --n {load.n}, which replicas share out")
    return Bench(
        model=model,
        load=load,
        rollout=rollout_config(args, load),
        lora_ranks=tuple(args.lora_rank),
        arrivals=tuple(args.arrivals),
        requests=args.requests,
        waves=4 if "staggered" in args.arrivals else 2,
        repeats=args.repeats,
        warmup=args.warmup,
        servers=args.replicas > 1,
        log_prob_gap=tuple(args.log_prob_gap),
        kernels=args.kernels,
    )


def rollout_config(args: argparse.Namespace, load: Workload) -> DiffusionRolloutConfig:
    """The configuration of a run that does what is measured."""
    options = {**({"enforce_eager": True} if args.eager else {}), **args.engine}
    pipeline = DiffusionPipelineConfig(height=load.height, width=load.width, num_inference_steps=load.steps)
    rollout = DiffusionRolloutConfig(
        dtype=args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32"),
        engine_kwargs={"vllm_omni": options},
        pipeline=pipeline,
        merge_lora=args.merge_lora,
    )
    check_engine_keys(rollout.engine_options(), engine_keys())
    return rollout


class Session:
    """All engine starts of one command. The record is written after each, so that what was measured is kept."""

    def __init__(self, args: argparse.Namespace, bench: Bench, command: str) -> None:
        self._args, self._bench, self._command = args, bench, command
        self._runs: dict[Point, list[Run]] = defaultdict(list)
        self._failed: dict[Point, Exception] = {}
        self._peak = matrix_peak(getattr(torch, bench.rollout.dtype))

    def run(self) -> dict[str, Any]:
        """The record."""
        starts = list(self._starts())
        for number in range(self._args.rounds):
            for i, (mode, cap, replicas) in enumerate(starts):
                done = f"{number * len(starts) + i + 1}/{self._args.rounds * len(starts)}"
                say(f"{done} {mode.value}, cap {cap}" + (f", {replicas} replica(s)" if self._bench.servers else ""))
                self._start(mode, cap, replicas)
                record = self._record()
                if self._args.out is not None:
                    self._args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return record

    def _starts(self) -> Iterator[tuple[RolloutMode, int, int]]:
        modes = AdapterCapabilities.of(self._bench.model.adapter).modes
        caps = self._args.caps or (GPU_CAPS if torch.cuda.is_available() else CPU_CAPS)
        for mode in self._args.modes or modes:
            if mode not in modes:
                raise ConfigError(
                    f"{self._bench.model.adapter.__name__} has no mode {mode.value}, but {', '.join(modes)}"
                )
            for cap in [1] if mode is RolloutMode.SERIAL else caps:
                yield from ((mode, cap, replicas) for replicas in sorted({1, self._args.replicas}))

    def _start(self, mode: RolloutMode, cap: int, replicas: int) -> None:
        points = self._bench.points(mode, cap, replicas)
        try:
            asyncio.run(self._measure(mode, cap, replicas))
        except ConfigError:
            raise
        except Exception as error:  # out of memory, most likely: what else is measured must not be lost
            logger.exception("%s with cap %d was not measured", mode.value, cap)
            self._failed |= {point: error for point in points if point not in self._runs}

    async def _measure(self, mode: RolloutMode, cap: int, replicas: int) -> None:
        async with aclosing(measure(self._bench, mode, cap, replicas)) as runs:
            async for run in runs:
                self._runs[run.point].append(run)

    def _record(self) -> dict[str, Any]:
        bench = self._bench
        rows = []
        for runs in self._runs.values():
            prompts = -(-runs[0].requests // bench.load.n)
            flop = bench.model.image_flop(bench.load, bench.load.lengths(prompts))
            rows.append(make_row(runs, image_flop=flop, peak=self._peak))
        add_ratios(rows)
        rows += [failed_row(point, error) for point, error in self._failed.items() if point not in self._runs]
        return make_record(bench, rows, command=self._command, peak=self._peak, rounds=self._args.rounds)
