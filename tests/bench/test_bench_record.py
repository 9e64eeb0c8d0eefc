"""From measured runs to rows, tables, plot and verdict."""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.plans import key_of
from verl_omni.bench.cli import finish
from verl_omni.bench.compare import TOLERANCES, as_table, changes, ratios
from verl_omni.bench.measure import Point, Run
from verl_omni.bench.outputs import Outputs
from verl_omni.bench.plot import save_plot
from verl_omni.bench.record import STAGES, add_ratios, failed_row, make_profile, make_row, versions
from verl_omni.bench.report import gaps, table, tables
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.rollout.measured import STILL_RISING, TIE
from verl_omni.workers.rollout.profile import ProfileFailure


def point(mode: str = "step_wise", cap: int = 4, **others: Any) -> Point:
    return Point(**{"mode": mode, "cap": cap, "replicas": 1, "lora_rank": 0, "arrivals": "burst", **others})


def run(where: Point, *seconds: float, **stats: Any) -> Run:
    made = Run(point=where, requests=8 * where.replicas, start_s=3.0, first_s=5.0, seconds=list(seconds))
    made.stats, made.peak_memory_mb = RolloutStats(**stats), 2048.0
    return made


def row(where: Point, *rounds: list[float]) -> dict[str, Any]:
    return make_row([run(where, *seconds) for seconds in rounds], image_flop=1e9, peak=1e12)


def record(*rows: dict[str, Any], **load: Any) -> dict[str, Any]:
    add_ratios(rows)
    workload = {"model": "tiny qwen_image", "height": 64, "width": 64, "steps": 10, **load}
    return {"device": "some CPU", "matrix_peak_tflops": 1.0, "workload": workload, "rows": list(rows)}


def three_modes(step_wise: float = 1.0) -> dict[str, Any]:
    """Serial 1 image/s, request-level 8, step-wise 8 / `step_wise`; the rounds of each lie 10 % apart."""
    times = {("serial", 1): 8.0, ("request_level", 4): 1.0, ("step_wise", 4): step_wise}
    return record(*(row(point(mode, cap), [t], [t], [t / 0.9]) for (mode, cap), t in times.items()))


def test_a_row_pools_the_repeats_of_all_rounds():
    where = point()
    made = make_row([run(where, 1.0, 2.0, 9.0), run(where, 4.0, 4.0)], image_flop=1e9, peak=1e10)
    assert (made["images_per_s"], made["slowest"], made["fastest"]) == (8 / 4, 8 / 9, 8 / 1)
    assert made["mfu"] == pytest.approx(2 * 1e9 / 1e10)
    assert made["seconds"] == [[1.0, 2.0, 9.0], [4.0, 4.0]] and made["peak_memory_gib"] == 2.0


def test_the_stages_and_the_engine_sum_up_to_the_seconds_of_a_repeat():
    stats = dict(stage_s={"encode": 0.5, "denoise": 4.0, "decode": 1.5}, batch_sizes={4: 20}, compiled_graphs=2)
    made = make_row([run(point(), 3.0, 5.0, **stats)], image_flop=None, peak=1.0)
    spent = made["stage_s"]
    assert tuple(spent) == STAGES and spent["denoise"] == 2.0 and spent["transfer"] == 0.0
    assert sum(spent.values()) == pytest.approx(4.0) and spent["engine"] == pytest.approx(1.0)
    assert made["mfu"] is None and made["recompiles"] == 2 and made["batch_sizes"] == {4: 20}


def test_of_several_replicas_the_stages_and_the_mfu_are_those_of_one():
    where = point(replicas=2)
    made = make_row([run(where, 4.0, stage_s={"denoise": 6.0})], image_flop=1e9, peak=1e9)
    assert made["images_per_s"] == 16 / 4 and made["mfu"] == pytest.approx(2.0)
    assert made["stage_s"]["denoise"] == 3.0


def test_rows_are_compared_with_what_differs_in_one_thing():
    rows = [
        row(point("serial", 1), [8.0]),
        row(point(), [1.0]),
        row(point(lora_rank=8), [1.25]),
        row(point(lora_rank=8, arrivals="staggered"), [2.5]),
        row(point(replicas=2), [1.0]),
    ]
    add_ratios(rows)
    serial, plain, lora, staggered, two = rows
    assert serial["times_serial"] == 1.0 and plain["times_serial"] == 8.0
    assert lora["times_no_lora"] == 0.8 and "times_serial" not in lora
    assert staggered["times_burst"] == 0.5 and "times_no_lora" not in staggered
    assert two["times_one_replica"] == 2.0 and "times_one_replica" not in plain


def test_the_table_shows_recompiles_and_what_could_not_be_measured():
    measured = make_row([run(point(), 2.0, batch_sizes={4: 20, 2: 1}, compiled_graphs=7)], image_flop=1e9, peak=1e12)
    failed = failed_row(point("request_level", 256), ["MemoryError: no room"])
    text = tables(record(measured, failed))
    head, line = text.splitlines()[:2]
    cells = dict(zip(re.split(r"  +", head), re.split(r"  +", line), strict=True))
    assert cells["recompiles"] == "7" and cells["images/s"] == "4" and cells["MFU"] == "0.4%"
    assert cells["syncs/step"] == "-" and cells["rows in a forward: forwards"] == "2: 1, 4: 20"
    assert text.splitlines()[-1] == "not measured: request_level cap 256: MemoryError: no room"


def test_a_column_without_news_is_left_out_and_shown_where_rows_differ():
    assert "LoRA" not in tables(record(row(point(), [1.0])))
    both = tables(record(row(point(), [1.0]), row(point(lora_rank=8), [2.0])))
    assert "LoRA rank" in both and "× no LoRA" in both


def test_the_columns_of_a_table_are_aligned():
    lines = table([["a", "b"], ["long name", "1.25"], ["x", "10"]]).splitlines()
    assert lines == ["a             b", "long name  1.25", "x            10"]


def test_the_plot_has_a_curve_a_mode_with_a_mark_a_cap(tmp_path):
    rows = [row(point("step_wise", cap), [1.0]) for cap in (4, 8, 16)] + [row(point("serial", 1), [8.0])]
    save_plot(record(*rows, failed_row(point(cap=32), ["no"])), tmp_path / "p.svg")
    svg = (tmp_path / "p.svg").read_text()
    assert svg.count("<polyline") == 2 and svg.count("<circle") == 4
    assert all(f">{cap}</text>" in svg for cap in (1, 4, 8, 16)) and ">32</text>" not in svg
    assert ">step_wise</text>" in svg and ">serial</text>" in svg and "64×64, 10 steps" in svg


def test_where_speed_still_rises_at_the_largest_cap_a_line_below_the_tables_says_so():
    rising, level = (
        [row(point(mode, cap), [8 / rate]) for cap, rate in ((4, 1.0), (8, second))]
        for mode, second in (("step_wise", 1 / (1 - TIE) + 1e-6), ("request_level", 1 / (1 - TIE) - 1e-6))
    )
    text = tables(record(*rising, *level))
    assert text.endswith(f"step_wise cap 8 is the largest cap measured; {STILL_RISING}")
    assert text.count(STILL_RISING) == 1
    failed = failed_row(point(cap=16), ["no room"])
    assert STILL_RISING not in tables(record(*rising, failed))
    others = [row(point(cap=4, lora_rank=8), [8.0]), row(point(cap=8), [1.0])]  # differ in more than the cap
    assert STILL_RISING not in tables(record(*others))


def test_a_profile_keeps_bursts_on_one_engine():
    rows = [row(point(), [1.0]), row(point(arrivals="staggered"), [2.0]), row(point(replicas=2), [1.0])]
    rows += [failed_row(point(cap=64, **other), ["no"]) for other in ({}, {"replicas": 2}, {"arrivals": "staggered"})]
    key = key_of(DiffusionRolloutConfig())
    profile = make_profile(key, rows)
    assert profile is not None and profile.key == key
    (kept,) = profile.points
    assert (kept.mode, kept.max_num_seqs, kept.images_per_s, kept.peak_memory_gib) == ("step_wise", 4, 8.0, 2.0)
    assert profile.failed == (ProfileFailure(mode="step_wise", max_num_seqs=64, error="no"),)


def test_where_nothing_was_measured_there_is_no_profile():
    assert make_profile(key_of(DiffusionRolloutConfig()), [failed_row(point(), ["no"])]) is None


def test_the_ratios_are_those_of_the_batching_modes_over_serial_and_of_each_other():
    found = {name: ratio.value for name, ratio in ratios(three_modes(step_wise=2.0)).items()}
    assert found == {
        "request_level cap 4 / serial": pytest.approx(8.0),
        "step_wise cap 4 / serial": pytest.approx(4.0),
        "step_wise cap 4 / request_level": pytest.approx(0.5),
    }


def test_a_ratio_within_the_spread_of_the_rounds_passes_and_one_below_it_has_fallen():
    before = three_modes()
    tolerance = 0.2  # 10 % of each of the two rows
    noise = changes(before, three_modes(step_wise=1 / (1 - tolerance) - 0.01))
    assert [change.tolerance for change in noise] == pytest.approx([tolerance] * 3)
    assert not any(change.fallen for change in noise)
    fallen = changes(before, three_modes(step_wise=1 / (1 - tolerance) + 0.01))
    assert [change.name for change in fallen if change.fallen] == [
        "step_wise cap 4 / serial",
        "step_wise cap 4 / request_level",
    ]
    assert as_table(fallen).count("FALLEN") == 2


@pytest.mark.parametrize(("step_wise", "status"), [(1.0, 0), (2.0, 1)])
def test_the_exit_status_tells_that_a_ratio_has_fallen(step_wise: float, status: int):
    args = Namespace(out=None, plot=None, profile=None, baseline=Path("before.json"))
    bench: Any = SimpleNamespace(model=SimpleNamespace(name="tiny qwen_image"))
    assert finish(args, bench, three_modes(step_wise), three_modes(), Outputs()) == status


def test_the_exit_status_tells_that_something_was_not_measured():
    args = Namespace(out=None, plot=None, profile=None, baseline=None)
    bench: Any = SimpleNamespace(model=SimpleNamespace(name="tiny qwen_image"))
    assert finish(args, bench, record(failed_row(point(), ["no"])), None, Outputs()) == 1
    assert finish(args, bench, record(row(point(), [1.0])), None, Outputs()) == 0
    half = make_row([run(point(), 1.0)], image_flop=1e9, peak=1e12, failed_rounds={2: "no"})
    assert finish(args, bench, record(half), None, Outputs()) == 1


def test_where_too_little_was_measured_to_compare_the_exit_status_is_that_of_a_failure(capfd):
    args = Namespace(out=None, plot=None, profile=None, baseline=Path("before.json"))
    bench: Any = SimpleNamespace(model=SimpleNamespace(name="tiny qwen_image"))
    assert finish(args, bench, record(failed_row(point(), ["no"])), three_modes(), Outputs()) == 1
    assert "not compared: the baseline shares no ratio" in capfd.readouterr().out


def test_only_what_this_run_wrote_is_told_as_written(tmp_path: Path, capfd):
    plot, profile = tmp_path / "plot.svg", tmp_path / "profile.json"
    for old in (plot, profile):
        old.write_text("of an earlier run")
    args = Namespace(out=None, plot=plot, profile=None, baseline=None)
    bench: Any = SimpleNamespace(model=SimpleNamespace(name="tiny qwen_image"))
    assert finish(args, bench, record(failed_row(point(), ["no"])), None, Outputs()) == 1
    assert "written" not in capfd.readouterr().out and plot.read_text() == "of an earlier run"
    assert finish(args, bench, record(row(point(), [1.0])), None, Outputs()) == 0
    assert f"written: {plot}\n" in capfd.readouterr().out


def test_a_file_that_cannot_be_written_costs_the_exit_status_and_not_the_table(tmp_path: Path, capfd):
    args = Namespace(out=None, plot=tmp_path, profile=None, baseline=None)
    bench: Any = SimpleNamespace(model=SimpleNamespace(name="tiny qwen_image"))
    assert finish(args, bench, record(row(point(), [1.0])), None, Outputs()) == 1
    out = capfd.readouterr().out
    assert "step_wise" in out and "written" not in out


def test_a_file_that_is_written_after_all_has_not_failed(tmp_path: Path):
    outputs, path = Outputs(), tmp_path / "folder/file"
    outputs.write(path, lambda path: path.write_text(""))
    assert (outputs.written, outputs.failed) == ([], [path])
    path.parent.mkdir()
    for _ in range(2):
        outputs.write(path, lambda path: path.write_text(""))
    assert (outputs.written, outputs.failed) == ([path], [])


def test_a_round_that_failed_is_told_of_a_row_that_was_measured():
    made = make_row([run(point(), 1.0)], image_flop=1e9, peak=1e12, failed_rounds={2: "MemoryError: no room"})
    text = tables(record(made, rounds=3))
    assert text.splitlines()[-1] == "not complete: step_wise cap 4, round 2 of 3: MemoryError: no room"


def test_a_row_that_failed_in_every_round_tells_each_reason_once():
    assert failed_row(point(), ["no", "no", "never"])["error"] == "no; never"


def test_the_table_of_log_prob_gaps_has_a_line_for_each_number_of_rows():
    rows = [row(point(), [1.0]), row(point(lora_rank=8), [1.0]), row(point(cap=8), [1.0])]
    rows[0]["log_prob_gap"] = {"recorded": {"0": [1e-6, 2e-6]}, "8": {"0": [0.0, 3e-5], "10": [1e-4, 1e-3]}}
    rows[1]["log_prob_gap"] = {"recorded": {"1": [1.0, 1.0]}}
    assert gaps(rows) == [
        ["mode", "cap", "LoRA rank", "rows in a forward", "step 0", "step 1", "step 10"],
        ["step_wise", "4", "0", "recorded", "1.0e-06, 2.0e-06", "", ""],
        ["step_wise", "4", "0", "8", "0.0e+00, 3.0e-05", "", "1.0e-04, 1.0e-03"],
        ["step_wise", "4", "8", "recorded", "", "1.0e+00, 1.0e+00", ""],
    ]


def test_a_record_tells_the_versions_of_python_and_of_what_decides_the_speed():
    assert {"python", "verl-omni", "torch", "vllm-omni", "diffusers"} <= versions().keys()


def test_a_ratio_that_rose_has_not_fallen():
    assert not any(change.fallen for change in changes(three_modes(), three_modes(step_wise=0.1)))


def test_the_tolerance_has_a_floor_and_a_ceiling():
    rounds = {TOLERANCES[0]: [[1.0], [1.0]], TOLERANCES[1]: [[1.0], [9.0]]}
    for expected, seconds in rounds.items():
        made = record(row(point("serial", 1), *seconds), row(point(), *seconds))
        assert [change.tolerance for change in changes(made, made)] == [expected]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "tiny sd3"),
        ("steps", 4),
        ("height", 128),
        ("merge_lora", True),
        ("engine", {"enforce_eager": True}),
        ("seed", 1),
    ],
)
def test_records_about_different_things_are_not_compared(key: str, value: Any):
    other = copy.deepcopy(three_modes())
    other["workload"][key] = value
    with pytest.raises(ConfigError, match=f"with {key} .*measure it anew"):
        changes(three_modes(), other)


def test_records_of_other_attention_are_not_compared_and_of_another_device_they_are():
    with pytest.raises(ConfigError, match="with attention None, this run with TORCH_SDPA; measure it anew"):
        changes(three_modes(), {**three_modes(), "attention": "TORCH_SDPA"})
    assert changes(three_modes(), {**three_modes(), "device": "another"})


def test_records_of_more_or_fewer_requests_are_compared_only_where_these_are_serial():
    serial, whole, _ = (other := three_modes())["rows"]
    serial["requests"] = 1
    assert len(changes(three_modes(), other)) == 3
    whole["requests"] = 16
    with pytest.raises(
        ConfigError, match="with 8 images in a repeat of request_level cap 4, this run with 16; write --r"
    ):
        changes(three_modes(), other)


def test_records_that_share_no_ratio_are_an_error():
    with pytest.raises(ConfigError, match="shares no ratio with this run; it has request_level cap 4 / serial"):
        changes(three_modes(), record(row(point(), [1.0])))
