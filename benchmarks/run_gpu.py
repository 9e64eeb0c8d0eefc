"""Request-level and step-wise rollouts of full-size random models on one GPU, in bfloat16, compiled.

``python benchmarks/run_gpu.py {qwen_image,sd3} --caps 16 32`` prints a table and writes
``benchmarks/gpu_<family>.json``: images/s of bursts of `cap` requests, share of a measured matrix-product peak, peak
memory, and how far the recorded latents of the modes, and of one request alone, lie apart. ``--tiny`` runs the same on
a tiny model, on a CPU too. The attention backend is the one that ``DIFFUSION_ATTENTION_BACKEND`` names.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks import full_size  # noqa: E402
from verl_omni.testing import tiny_models  # noqa: E402
from verl_omni.utils.console import own_stdout  # noqa: E402
from verl_omni.workers.rollout.engine import RolloutEngine  # noqa: E402
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan  # noqa: E402
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample  # noqa: E402

TFLOP = {"qwen_image": 313.0, "sd3": 15.2}
"""TFLOP an image: 512², true guidance, 10 steps; 384², no guidance, 10 steps (2 FLOPs a multiply-add)."""
SIZE = {"qwen_image": 512, "sd3": 384}
GROUP = {"qwen_image": 16, "sd3": 8}
"""Images of a prompt, as in the training recipes."""


def requests(args: argparse.Namespace, count: int, tag: str) -> list[RolloutRequest]:
    """`count` images; request ids end in their number."""
    knobs: dict[str, Any] = dict(height=args.size, width=args.size, num_inference_steps=10)
    knobs |= dict(sde_window_size=2, sde_window_range=(0, 5))
    made = []
    for i in range(count):
        text = [7 + i // GROUP[args.family]] * args.text
        if args.family == "qwen_image":
            template, negative = [9] * 34, [8] * 6
            own: dict[str, Any] = dict(prompt_token_ids=template + text, true_cfg_scale=4.0)
            own |= dict(negative_prompt_token_ids=template + negative)
        else:
            own = dict(prompt_token_ids=text, prompt_token_ids_2=text, prompt_token_ids_3=text)
        made.append(RolloutRequest(request_id=f"{tag}-{i}", seed=i, **own, **knobs))
    return made


async def burst(engine: RolloutEngine, asked: list[RolloutRequest]) -> tuple[float, list[RolloutSample]]:
    """Seconds from submission to the last sample, and the samples in request order."""
    start, samples = time.perf_counter(), []
    async for sample in engine.generate_all(asked):
        if isinstance(sample, RolloutError):
            raise sample
        samples.append(sample)
    took = time.perf_counter() - start
    return took, sorted(samples, key=lambda sample: int(sample.request_id.split("-")[1]))


async def measure(model: Path, mode: RolloutMode, cap: int, args: argparse.Namespace) -> dict[str, Any]:
    """One engine: a warm-up burst, then `repeats` counted ones, then one request alone."""
    plan = RolloutPlan(
        mode=mode, max_num_seqs=cap, request_batch_max_wait_ms=0.0, rows_per_forward=None, reason="benchmark"
    )
    adapter = full_size.ADAPTERS[args.family]
    adapter = adapter.__mro__[2] if args.tiny else adapter  # the class that reads its weights
    start = time.perf_counter()
    async with await RolloutEngine.start(
        model_path=model,
        plan=plan,
        adapter=f"{adapter.__module__}.{adapter.__name__}",
        dtype="float32" if args.tiny else "bfloat16",
        engine_kwargs={"enforce_eager": args.eager or args.tiny, **args.engine},
    ) as engine:
        started = time.perf_counter() - start
        first, _ = await burst(engine, requests(args, cap, "warm"))
        await engine.stats(reset=True)
        runs = [await burst(engine, requests(args, cap, f"run{repeat}")) for repeat in range(args.repeats)]
        stats = (await engine.stats()).as_dict()
        _, alone = await burst(engine, requests(args, 1, "alone"))
        if args.profile:
            with torch.profiler.profile() as profiler:
                await burst(engine, requests(args, cap, "profile"))
            table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=40)
            args.profile.with_suffix(f".{mode.value}.txt").write_text(table)
    seconds, samples = [took for took, _ in runs], runs[-1][1]
    latents = torch.cat([sample.trajectory_latents for sample in samples if sample.trajectory_latents is not None])
    solo = alone[0].trajectory_latents
    assert solo is not None
    return {
        "mode": mode.value,
        "max_num_seqs": cap,
        "start_s": started,
        "first_burst_s": first,
        "seconds": seconds,
        "images_per_s": cap / statistics.median(seconds),
        "peak_memory_gib": max(sample.peak_memory_mb for sample in samples) / 1024,
        "solo_latent_gap": gap(solo, latents[:1]),
        "latents": latents,
        **stats,
    }


def gap(a: Tensor, b: Tensor) -> list[float]:
    """Largest difference at each recorded latent [W+1] of trajectories [n, W+1, ...] that start from the same noise."""
    return (a - b).abs().transpose(0, 1).flatten(1).amax(1).tolist()


def matrix_peak() -> float:
    """TFLOP/s of a bfloat16 8192³ matrix product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / start.elapsed_time(end) / 1e9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=list(full_size.ADAPTERS))
    parser.add_argument("--caps", type=int, nargs="+", default=[16])
    both = [RolloutMode.REQUEST_LEVEL, RolloutMode.STEP_WISE]
    parser.add_argument("--modes", nargs="+", type=RolloutMode, default=both)
    parser.add_argument("--size", type=int, help="pixels; the recipe's by default")
    parser.add_argument("--text", type=int, default=64, help="text tokens")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine arguments, as JSON")
    parser.add_argument("--profile", type=Path, help="write where the time of one more burst goes, by kernel")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.size = args.size or (64 if args.tiny else SIZE[args.family])
    args.out = args.out or HERE / f"gpu_{args.family}.json"
    return args


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    peak = matrix_peak() if gpu else float("nan")
    with tempfile.TemporaryDirectory() as folder:
        make = tiny_models.build if args.tiny else full_size.build
        model = make(args.family, Path(folder) / "model")
        rows = [asyncio.run(measure(model, mode, cap, args)) for cap in args.caps for mode in args.modes]
    reference: dict[int, Tensor] = {}
    for row in rows:
        latents = row.pop("latents")
        row["mode_latent_gap"] = gap(latents, reference.setdefault(row["max_num_seqs"], latents))
        row["share_of_peak"] = row["images_per_s"] * TFLOP[args.family] / peak
    result = {
        "command": " ".join(["python", "benchmarks/run_gpu.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "attention": os.environ.get("DIFFUSION_ATTENTION_BACKEND", "the engine's choice"),
        "matrix_peak_tflops": peak,
        "versions": {"torch": torch.__version__, **{n: version(n) for n in ("vllm-omni", "diffusers", "transformers")}},
        "workload": {name: getattr(args, name) for name in ("family", "size", "text", "repeats", "eager", "engine")},
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    say(f"{'mode':<14} {'cap':>4} {'images/s':>9} {'of peak':>8} {'GiB':>6} {'first s':>8}")
    for row in rows:
        say(
            f"{row['mode']:<14} {row['max_num_seqs']:4} {row['images_per_s']:9.3f} {row['share_of_peak']:8.1%} "
            f"{row['peak_memory_gib']:6.1f} {row['first_burst_s']:8.1f}"
        )
    say(f"matrix peak {peak:.0f} TFLOP/s; written to {args.out}")


def say(line: str) -> None:
    """A line without the name that an engine in this process puts before it."""
    print(line, file=own_stdout())


if __name__ == "__main__":
    main()
