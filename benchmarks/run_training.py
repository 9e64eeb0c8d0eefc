"""Does training learn, and alike in each mode? 30 steps of both tiny models in all modes, and with learning rate 0.

    python benchmarks/run_training.py [--out benchmarks/cpu_training.json] [--steps 30]

The reward is the redness of the image, which a random model can improve. Each run is a process of its own. Written: the
reward curves; how far those of the modes are apart in the first five steps; ratio and |Δ log p| of the first step; the
gain of the last five rewards over the first five, in standard errors. About 12 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verl_omni.testing.tiny_models import build
from verl_omni.testing.tiny_training import LEARNING, MODES, history, overrides

ENDS = 5
"""Steps at either end of a curve that are compared."""


def train(folder: Path, model: Path, *changes: str) -> dict[int, dict[str, float]]:
    """One run; its metrics by step."""
    command = [sys.executable, "-m", "verl_omni.trainer.main_diffusion", *overrides(folder, model, *changes)]
    subprocess.run(command, check=True)
    return {step: metrics for step, metrics in history(folder).items() if step > 0}


def summary(steps: dict[int, dict[str, float]]) -> dict[str, Any]:
    """What is kept of a run."""
    curve = [metrics["reward/mean"] for metrics in steps.values()]
    first, last = curve[:ENDS], curve[-ENDS:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / ENDS)
    return {
        "reward": [round(value, 6) for value in curve],
        "gain": statistics.mean(last) - statistics.mean(first),
        "gain_in_standard_errors": (statistics.mean(last) - statistics.mean(first)) / error,
        "first_ratio_max_dev": steps[1]["actor/first_ratio_max_dev"],
        "first_logp_gap_max": steps[1]["rollout/logp_gap_max"],
        "batch_size_mean": steps[1]["rollout/batch_size_mean"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train both tiny models in all modes.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "cpu_training.json")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    limit = f"trainer.total_training_steps={args.steps}"
    record: dict[str, Any] = {
        "command": "python benchmarks/run_training.py",
        "device": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "vllm-omni", "verl", "ray", "diffusers", "peft")},
        "models": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for family in ("qwen_image", "sd3"):
            model = build(family, Path(scratch) / family)
            runs = {
                mode: summary(train(Path(scratch) / f"{family}-{mode}", model, *settings, *LEARNING, limit))
                for mode, settings in MODES.items()
            }
            still = (*MODES["step_wise"], *LEARNING, "actor.optim.lr=0", limit)
            apart = max(
                abs(runs[mode]["reward"][step] - runs["serial"]["reward"][step])
                for mode in runs
                for step in range(min(ENDS, args.steps))
            )
            runs["step_wise, lr 0"] = summary(train(Path(scratch) / f"{family}-still", model, *still))
            record["models"][family] = {"modes_apart_in_first_steps": apart, "runs": runs}
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(args.out)


if __name__ == "__main__":
    main()
