"""All that one command measures: every mode, cap and number of replicas, some rounds of them."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import torch

from verl_omni.bench.measure import Bench, Point, Run, described, measure
from verl_omni.bench.model import BenchModel
from verl_omni.bench.outputs import Outputs
from verl_omni.bench.peak import matrix_peak
from verl_omni.bench.record import add_ratios, failed_row, make_record, make_row, planned_row
from verl_omni.bench.report import say
from verl_omni.bench.workload import RECIPES, SERIAL_REQUESTS, Recipe, Workload
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.config.rollout import DiffusionPipelineConfig, check_engine_keys
from verl_omni.workers.rollout.engine_keys import check_engine_values, engine_keys
from verl_omni.workers.rollout.plan import AdapterCapabilities, RolloutMode
from verl_omni.workers.rollout.profile import ProfileKey
from verl_omni.workers.rollout.profile_key import DEFAULT_ATTENTION, attention_backend
from verl_omni.workers.rollout.request import RolloutError

TINY_SIZE = 64
"""Pixels of tiny models, whatever the recipe of the large ones."""

_ELSEWHERE = ("memory", "the engine died", "was closed")
"""What a failure says that may not come with another mode or a smaller cap."""
_HEAD_SIZE = 128
"""Of an attention head, as that of most models; no backend is refused for it."""

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
        max_sequence_length=args.max_sequence_length,
        seed=args.seed,
        recipe=recipe,
    )
    if model.architecture in RECIPES and any(pixels % model.edge for pixels in size):
        near = " ".join(str(max(1, round(pixels / model.edge)) * model.edge) for pixels in size)
        raise ConfigError(
            f"--size {' '.join(map(str, size))} must be multiples of {model.edge} for this model; write --size {near}"
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
        most_serial=None if args.requests is not None and args.modes == [RolloutMode.SERIAL] else SERIAL_REQUESTS,
        waves=4 if "staggered" in args.arrivals else 2,
        repeats=args.repeats,
        warmup=args.warmup,
        servers=args.replicas > 1,
        log_prob_gap=tuple(args.log_prob_gap),
        torch_profile=args.torch_profile,
    )


def rollout_config(args: argparse.Namespace, load: Workload) -> DiffusionRolloutConfig:
    """The configuration of a run that does what is measured. Raises :class:`ConfigError`."""
    options = {**({"enforce_eager": True} if args.eager else {}), **args.engine}
    pipeline = DiffusionPipelineConfig(
        height=load.height,
        width=load.width,
        num_inference_steps=load.steps,
        max_sequence_length=load.text_limit,
    )
    with _engine_keys_as_option():
        rollout = DiffusionRolloutConfig(
            dtype=args.dtype,
            engine_kwargs={"vllm_omni": options},
            pipeline=pipeline,
            merge_lora=args.merge_lora,
        )
        check_engine_keys(rollout.engine_options(), engine_keys())
    return rollout


def checked_key(bench: Bench, lora_rank: int) -> ProfileKey:
    """What the measurement holds for. Raises :class:`ConfigError` for engine arguments that the engine refuses."""
    from verl_omni.trainer.rollout_setup import device_name

    guided = bench.load.cfg > 1
    with _engine_keys_as_option():
        key = ProfileKey.of(
            bench.rollout, model=bench.model.path, device=device_name(), cfg=guided, lora_rank=lora_rank
        )
        _check_attention(attention_backend(bench.rollout.engine_options()).split()[0])
        check_engine_values(bench.rollout.engine_options())
    return key


def _check_attention(name: str) -> None:
    from vllm_omni.platforms import current_omni_platform

    if name == DEFAULT_ATTENTION:
        return
    try:
        current_omni_platform.get_diffusion_attn_backend_cls(name, _HEAD_SIZE)
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _engine_keys_as_option() -> Iterator[None]:
    """Let errors name the option that holds a key of the engine."""
    try:
        yield
    except ConfigError as error:
        key = f"{DiffusionRolloutConfig.KEY}.engine_kwargs.vllm_omni"
        raise ConfigError(str(error).replace(key, "--engine")) from error


class Session:
    """All engine starts of one command. The record is written after each, so that what was measured is kept."""

    def __init__(self, args: argparse.Namespace, bench: Bench, command: str, outputs: Outputs) -> None:
        self._args, self._bench, self._command, self._outputs = args, bench, command, outputs
        self._runs: dict[Point, list[Run]] = defaultdict(list)
        self._failed: dict[Point, dict[int, str]] = defaultdict(dict)
        """Why, by the number of the round from 1."""
        self._peak = 0.0
        """FLOP a second of the fastest matrix product so far."""

    def run(self) -> dict[str, Any]:
        """The record. Raises :class:`ConfigError` if the first engine does not come up, or fails its first requests."""
        starts = list(self._starts())
        for number in range(1, self._args.rounds + 1):
            for i, (mode, cap, replicas) in enumerate(starts, 1):
                done = f"{(number - 1) * len(starts) + i}/{self._args.rounds * len(starts)}"
                say(f"{done} {mode.value}, cap {cap}" + (f", {replicas} replica(s)" if self._bench.servers else ""))
                self._start(number, mode, cap, replicas)
                record = self.keep()
        return record

    def keep(self) -> dict[str, Any]:
        """Write the record of what was measured so far, unless that is nothing, and return it."""
        record = self._record()
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        if self._args.out is not None and record["rows"]:
            self._outputs.write(self._args.out, lambda path: Path(path).write_text(text, encoding="utf-8"))
        return record

    def planned(self) -> dict[str, Any]:
        """A record with all rows that are to be measured, and no figures."""
        bench = self._bench
        rows = [
            planned_row(point, bench.count(mode.value, cap) * replicas)
            for mode, cap, replicas in self._starts()
            for point in bench.points(mode, cap, replicas)
        ]
        return make_record(bench, rows, command=self._command, peak=0.0, rounds=self._args.rounds)

    def _starts(self) -> Iterator[tuple[RolloutMode, int, int]]:
        modes = AdapterCapabilities.of(self._bench.model.adapter).modes
        for mode in self._args.modes or modes:
            if mode not in modes:
                raise ConfigError(
                    f"{self._bench.model.adapter.__name__} has no mode {mode.value}, but {', '.join(modes)}"
                )
            for cap in [1] if mode is RolloutMode.SERIAL else self._args.caps:
                yield from ((mode, cap, replicas) for replicas in sorted({1, self._args.replicas}))

    def _start(self, number: int, mode: RolloutMode, cap: int, replicas: int) -> None:
        self._peak = max(self._peak, matrix_peak(getattr(torch, self._bench.rollout.dtype)))
        waiting = self._bench.points(mode, cap, replicas)
        try:
            asyncio.run(self._measure(number, mode, cap, replicas, waiting))
        except ConfigError:
            raise
        except Exception as error:  # out of memory, most likely: what else is measured must not be lost
            if not self._runs and not any(words in described(error).lower() for words in _ELSEWHERE):
                raise ConfigError(
                    f"{mode.value} with cap {cap} failed before anything was measured, so nothing else is tried: "
                    f"{_reason(error)}"
                ) from error
            is_told = isinstance(error, RolloutError)
            logger.error("%s with cap %d was not measured: %s", mode.value, cap, described(error), exc_info=not is_told)
            for point in waiting:
                self._failed[point][number] = described(error)
        free_memory()

    async def _measure(self, number: int, mode: RolloutMode, cap: int, replicas: int, waiting: list[Point]) -> None:
        """Takes from `waiting` what was measured."""
        async with aclosing(measure(self._bench, mode, cap, replicas)) as runs:
            async for run in runs:
                waiting.remove(run.point)
                self._runs[run.point].append(run)
                if run.problem is not None:
                    self._failed[run.point][number] = run.problem

    def _record(self) -> dict[str, Any]:
        bench = self._bench
        rows = []
        for point, runs in self._runs.items():
            load = bench.workload(point.mode)
            flop = bench.model.image_flop(load, load.lengths(-(-runs[0].requests // load.n)))
            rows.append(make_row(runs, image_flop=flop, peak=self._peak, failed_rounds=self._failed.get(point)))
        add_ratios(rows)
        failed = {point: reasons for point, reasons in self._failed.items() if point not in self._runs}
        rows += [failed_row(point, reasons.values()) for point, reasons in failed.items()]
        return make_record(bench, rows, command=self._command, peak=self._peak, rounds=self._args.rounds)


def _reason(error: Exception) -> str:
    """What failed. A request that is refused is so in every mode; an engine that does not start may in another."""
    if isinstance(error, RolloutError) and error.request_id is not None:
        return error.message
    return f"{described(error)}. If another mode can do it, name that alone after --modes"


def free_memory() -> None:
    """Give back what the last engine in this process held: the next one must not find its memory taken."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
