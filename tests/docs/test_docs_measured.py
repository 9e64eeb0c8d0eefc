"""What the docs say was measured is what the records in benchmarks/ hold.

After a new measurement the failing test prints the table to paste into the page.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, blocks, commands, prose
from verl_omni.bench.arguments import parse
from verl_omni.bench.compare import TOLERANCES
from verl_omni.bench.plot import save_plot
from verl_omni.bench.report import gaps, speed, stages
from verl_omni.bench.workload import SERIAL_REQUESTS

MODELS = {"qwen_image": "Qwen-Image", "sd3": "SD3.5"}
PERF = DOCS / "perf/rollout.md"
FOLDERS = ("benchmarks", "docs", "examples", "requirements", "tests", "verl_omni")
PUBLISHED = {"qwen_image": ("32×16", 512, "226.4 s → 107.9 s (−52 %)"), "sd3": ("8×8", 64, "25.4 s → 22.3 s (−12 %)")}
"""Prompts × images of a step, images, and seconds serial → batched as published for these recipes."""


def record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / name).read_text())
    return content


CPU_TRAINING, GPU_TRAINING = record("cpu_training.json"), record("gpu_training.json")


def bench_records() -> dict[str, dict[str, Any]]:
    """File name → record of ``python -m verl_omni.bench``."""
    names = sorted(path.name for path in (ROOT / "benchmarks").glob("*.json"))
    return {name: found for name in names if "rows" in (found := record(name))}


RECORDS = bench_records()


def markdown(*rows: Sequence[str]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def section(name: str) -> str:
    """The part of the page, from one heading to the next, that names this record."""
    parts = re.split(r"^#+ .*$", PERF.read_text(), flags=re.MULTILINE)
    found = [part for part in parts if f"`benchmarks/{name}`" in part]
    assert len(found) < 2, f"{PERF.name} has several sections on {name}"
    return found[0] if found else ""


@pytest.mark.parametrize("name", RECORDS)
def test_the_page_shows_each_record_with_the_command_that_made_it(name: str):
    measured = RECORDS[name]
    rows = [row for row in measured["rows"] if "error" not in row]
    tables = [markdown(*cells) for cells in (speed(rows), stages(rows), gaps(rows)) if len(cells) > 1]
    where = f"`benchmarks/{name}`: {measured['device']}, attention backend {measured['attention']}."
    command = shown_command(measured)
    missing = [part for part in (*tables, where, command) if part not in section(name)]
    if missing:
        together = "\n\n".join([f"```bash\n{command}\n```", where, *tables])
        pytest.fail(f"paste into a section of {PERF.name}:\n\n{together}", pytrace=False)


def kernel_table() -> str:
    head = ("operator", "shape", "dtype", "error", "error in torch", "ms", "GB/s")
    form = "{operator}|{shape}|{dtype}|{error:.1e}|{error_of_torch:.1e}|{ms:.3f}|{gb_per_s:.0f}"
    rows = [form.format(**row).split("|") for row in record("gpu_kernels.json")["kernels"]]
    return markdown(head, *rows)


def test_the_table_of_the_fused_operators_is_that_of_its_record():
    measured = record("gpu_kernels.json")
    assert f"```bash\n{measured['command']}\n```" in PERF.read_text()
    assert kernel_table() in PERF.read_text(), kernel_table()


@pytest.mark.parametrize("row", record("gpu_kernels.json")["kernels"], ids=lambda r: f"{r['operator']} {r['shape']}")
def test_the_fused_operators_were_exact_on_the_gpu(row):
    assert row["error"] < (1.2 * row["error_of_torch"] if row["dtype"] == "bfloat16" else 32 * 2**-23)


def shown_command(measured: dict[str, Any]) -> str:
    """The command of a record, on lines that fit the page; an option stays with its values."""
    options = re.sub(r" (?!--)", "\0", measured["command"])
    lines = textwrap.wrap(options, width=110, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines).replace("\0", " ")


@pytest.mark.parametrize("name", [name for name in RECORDS if f"({name[:-5]}.svg)" in PERF.read_text()])
def test_a_plot_is_that_of_its_record(name: str, tmp_path: Path):
    save_plot(RECORDS[name], tmp_path / "plot.svg")
    plot = PERF.with_name(f"{name[:-5]}.svg")
    assert (tmp_path / "plot.svg").read_text() == plot.read_text(), f"write it anew: save_plot({name}, {plot})"


def test_every_command_of_the_bench_in_the_docs_can_be_given():
    shown = [command for found in blocks(language="bash") for command in commands(found.text)]
    bench = [command for command in shown if command[1:3] == ["-m", "verl_omni.bench"]]
    assert bench
    for command in bench:
        parse(command[3:], "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_names_no_file_of_the_project_that_is_not_there(page: Path):
    """Whatever its language: only bash is looked at elsewhere."""
    for fenced in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for name in re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w/.-]*\.\w+", fenced):
            assert (ROOT / name).is_file(), name


def test_the_page_tells_by_how_much_a_ratio_may_fall():
    least, most = (f"{100 * tolerance:.0f} %" for tolerance in TOLERANCES)
    assert f"but at least {least} and at most {most}," in prose(PERF)


def test_the_page_tells_how_many_requests_serial_mode_gets():
    assert f"in serial mode, where that takes long and tells no more, at most {SERIAL_REQUESTS}," in prose(PERF)


def test_the_page_tells_of_which_requests_a_baseline_need_not_be():
    assert "requests, but those of serial rows, must be those of the record" in prose(PERF)


def test_the_page_tells_what_a_cell_of_a_cpu_without_a_figure_means():
    cpu = [row for name, found in RECORDS.items() if name.startswith("cpu_") for row in found["rows"]]
    assert cpu and not any(row["peak_memory_gib"] for row in cpu)
    assert "on a CPU known with `--replicas` alone" in prose(PERF)


def test_make_bench_repeats_the_record_that_it_compares_with():
    makefile = (ROOT / "Makefile").read_text()
    (settings,) = re.findall(r"^BENCH := (.*)$", makefile, re.MULTILINE)
    assert f"verl_omni.bench {settings} --out" in RECORDS["cpu_modes.json"]["command"]
    assert "$(BENCH) --baseline benchmarks/cpu_modes.json" in makefile


def recipe_table() -> str:
    """Seconds of the images of one training step, serial and batched; empty without a GPU record with serial rows."""
    lines = []
    for measured in RECORDS.values():
        family = measured["workload"]["model"].removeprefix("random ")
        rows = [row for row in measured["rows"] if "times_serial" in row and row["arrivals"] == "burst"]
        if family in PUBLISHED and rows:
            recipe, images, published = PUBLISHED[family]
            for row in rows:
                change = "" if row["mode"] == "serial" else f"{100 / row['times_serial'] - 100:.0f} %".replace("-", "−")
                seconds = f"{images / row['images_per_s']:.1f} s"
                lines.append(
                    (MODELS[family], recipe, row["mode"], str(row["max_num_seqs"]), seconds, change, published)
                )
    head = ("model", "prompts × images", "mode", "cap", "seconds", "against serial", "published")
    return markdown(head, *lines) if lines else ""


def test_the_page_shows_the_seconds_of_a_step_of_each_recipe():
    if recipe_table() not in PERF.read_text():
        pytest.fail(f"paste into {PERF.name}:\n{recipe_table()}", pytrace=False)


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
