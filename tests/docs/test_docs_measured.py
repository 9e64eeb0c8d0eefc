"""What the docs say was measured is what the records in benchmarks/ hold.

After a new measurement the failing test prints the table to paste into the page.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from tests.docs.pages import BATCHING, DOCS, ROOT, block, commands

MODELS = {"qwen_image": "Qwen-Image", "sd3": "SD3.5"}


def record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / name).read_text())
    return content


CPU = record("cpu_modes.json")
CPU_TRAINING, GPU_TRAINING = record("cpu_training.json"), record("gpu_training.json")
GPU = [record(f"gpu_{family}.json") for family in MODELS]


def section() -> str:
    """The section, without its heading."""
    (found,) = re.findall(r"^## What was measured\n(.*?)^## ", BATCHING.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def markdown(*rows: Sequence[str]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def spread(images: int, seconds: Sequence[float]) -> str:
    """Images a second of the slowest and of the fastest repeat."""
    return f"{images / max(seconds):.3g}–{images / min(seconds):.3g}"


def cpu_table() -> str:
    head = ("mode", "cap", "images/s", "slowest–fastest repeat", "times serial")
    rows = [
        (
            row["mode"],
            str(row["max_num_seqs"]),
            f"{row['images_per_s']:.3g}",
            spread(CPU["workload"]["requests"], row["all"]),
            f"{row['times_serial']:.1f}",
        )
        for row in CPU["rows"]
    ]
    return markdown(head, *rows)


def gpu_table() -> str:
    head = ("model", "mode", "cap", "images/s", "slowest–fastest repeat", "share of the peak", "memory")
    rows = [
        (
            MODELS[measured["workload"]["family"]],
            row["mode"],
            str(row["max_num_seqs"]),
            f"{row['images_per_s']:.3g}",
            spread(row["max_num_seqs"], row["seconds"]),
            f"{row['share_of_peak']:.0%}",
            f"{row['peak_memory_gib']:.0f} GiB",
        )
        for measured in GPU
        for row in measured["rows"]
    ]
    return markdown(head, *rows)


@pytest.mark.parametrize("expected", [cpu_table(), gpu_table()], ids=["cpu", "gpu"])
def test_the_tables_show_the_records(expected: str):
    if expected not in section():
        pytest.fail(f"paste into {BATCHING.name}, What was measured:\n{expected}", pytrace=False)


def test_the_workloads_and_machines_are_those_of_the_records():
    text = " ".join(section().split())
    load = CPU["workload"]
    assert f"({CPU['device']})" in text
    assert f"{load['requests']} requests at {load['size']}×{load['size']}" in text
    assert f"{load['steps']} steps, {load['rounds']} rounds of {load['repeats']} repeats" in text
    for measured in GPU:
        size = measured["workload"]["size"]
        assert f"one {measured['device']} " in text
        assert f"attention backend {measured['attention']}" in text
        assert f"{MODELS[measured['workload']['family']]} at {size}×{size}" in text
        assert not measured["workload"]["eager"] and "compiled" in text


def test_the_commands_are_those_that_made_the_records():
    shown = [" ".join(command) for command in commands(block(BATCHING, "bash", "benchmarks/run_gpu.py"))]
    assert shown == ["make bench", *(measured["command"] for measured in GPU)]
    assert "benchmarks/run_cpu.py" in CPU["command"]


def cpu_training_table() -> str:
    head = ("model", "run", "gain", "first ratio − 1", "first Δ log p", "modes apart, first 5 steps")
    rows = [
        (
            f"tiny {MODELS[family]}",
            name,
            f"{run['gain_in_standard_errors']:.1f}",
            f"{run['first_ratio_max_dev']:.1g}",
            f"{run['first_logp_gap_max']:.1g}",
            "" if "lr 0" in name else f"{measured['modes_apart_in_first_steps']:.1g}",
        )
        for family, measured in CPU_TRAINING["models"].items()
        for name, run in measured["runs"].items()
    ]
    return markdown(head, *rows)


def gpu_training_table() -> str:
    later = GPU_TRAINING["steps"][1:]
    stages = ("generation", "log_prob", "update", "sync", "step")
    seconds = (f"{statistics.mean(step[f'{stage}_s'] for step in later):.2f} s" for stage in stages)
    gap = max(step["logp_gap_max"] for step in later)
    return markdown(
        (*stages[:-1], "whole step", "first ratio − 1", "largest Δ log p", "memory"),
        (
            *seconds,
            f"{max(step['first_ratio_max_dev'] for step in later):g}",
            f"{gap:.1g}",
            f"{GPU_TRAINING['peak_memory_mib'] / 1024:.1f} GiB",
        ),
    )


@pytest.mark.parametrize("expected", [cpu_training_table(), gpu_training_table()], ids=["cpu", "gpu"])
def test_the_page_on_training_shows_the_records(expected: str):
    page = DOCS / "start/flowgrpo.md"
    if expected not in page.read_text():
        pytest.fail(f"paste into {page.name}, What was measured:\n{expected}", pytrace=False)


def test_the_measured_training_learns_alike_in_each_mode():
    for measured in CPU_TRAINING["models"].values():
        assert measured["modes_apart_in_first_steps"] < 1e-3
        for name, run in measured["runs"].items():
            assert len(run["reward"]) == 30
            assert run["first_ratio_max_dev"] < 1e-5 and run["first_logp_gap_max"] < 1e-5
            assert (run["gain_in_standard_errors"] > 3) == ("lr 0" not in name)
