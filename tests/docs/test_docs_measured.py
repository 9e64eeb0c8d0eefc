"""What the docs say was measured is what the records in benchmarks/ hold.

After a new measurement the failing test prints the table to paste into the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.docs.pages import BATCHING, ROOT, block, commands

MODELS = {"qwen_image": "Qwen-Image", "sd3": "SD3.5"}


def record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / name).read_text())
    return content


CPU = record("cpu_modes.json")
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
