"""The bench on a real engine: what it counts, what it writes, and that a run goes by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_omni.bench import full_size
from verl_omni.bench.cli import main
from verl_omni.testing import tiny_models
from verl_omni.trainer.rollout_setup import resolve_rollout
from verl_omni.workers.config import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionRolloutConfig
from verl_omni.workers.rollout.plan import RolloutPlan
from verl_omni.workers.rollout.profile import RolloutProfile
from verl_omni.workers.rollout.request import RolloutRequest

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS, REQUESTS, RANK = 2, 4, 4
ARGS = f"--tiny qwen_image --modes step_wise request_level --caps 2 4 --arrivals burst staggered --steps {STEPS} \
--requests {REQUESTS} --n 2 --text 8-20 --lora-rank {RANK} --repeats 1".split()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what the bench wrote."""
    folder = tmp_path_factory.mktemp("bench")
    files = ["--out", folder / "record.json", "--plot", folder / "new/plot.svg", "--profile", folder / "profile.json"]
    assert main([*ARGS, *map(str, files)]) == 0
    return folder


@pytest.fixture(scope="module")
def record(written: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((written / "record.json").read_text())
    return content


def test_the_record_has_every_point_and_how_it_came_about(record: dict[str, Any]):
    points = {(row["mode"], row["max_num_seqs"], row["arrivals"]) for row in record["rows"]}
    assert points == {
        (mode, cap, arrivals)
        for mode in ("step_wise", "request_level")
        for cap in (2, 4)
        for arrivals in ("burst", "staggered")
    }
    assert {"device", "versions", "date", "matrix_peak_tflops"} <= record.keys()
    assert record["command"].startswith("python -m verl_omni.bench --tiny qwen_image --modes step_wise")
    assert record["workload"]["cfg"] == 4.0 and record["workload"]["text"] == [8, 20]


def test_each_row_tells_its_batches_encodes_stages_and_repeats(record: dict[str, Any]):
    for row in record["rows"]:
        sizes = {int(size): forwards for size, forwards in row["batch_sizes"].items()}
        assert sum(size * forwards for size, forwards in sizes.items()) == REQUESTS * STEPS
        if row["arrivals"] == "burst":
            cap = row["max_num_seqs"]
            assert sizes == {cap: REQUESTS // cap * STEPS}
        # a prompt and the negative one for each request; new are the prompts of the two groups
        assert row["encodes"] == {"requested": 2 * REQUESTS, "computed": 2}
        assert len(row["seconds"]) == 1 and len(row["seconds"][0]) == 1
        assert sum(row["stage_s"].values()) == pytest.approx(row["seconds"][0][0])
        assert row["stage_s"]["denoise"] > 0 and row["mfu"] > 0
        assert row["peak_memory_gib"] is None or torch.cuda.is_available()  # engines of one process share its peak
        assert row["syncs_per_step"] is None and row["lora_rank"] == RANK


def test_the_plot_shows_both_modes_and_its_folder_is_made(written: Path):
    svg = (written / "new/plot.svg").read_text()
    assert ">step_wise, lora_rank 4</text>" in svg and ">request_level, lora_rank 4, arrivals staggered</text>" in svg


def plan(profile: Path, model: Path) -> RolloutPlan:
    """The plan of a run like the measured one, on a checkpoint of the same configuration that lies elsewhere."""
    pipeline = DiffusionPipelineConfig(height=64, width=64, num_inference_steps=STEPS)
    rollout = DiffusionRolloutConfig(dtype="float32", batching_mode="auto", profile=str(profile), pipeline=pipeline)
    guided = RolloutRequest(request_id="0", prompt="a fox", negative_prompt="blurry")
    setup = resolve_rollout(DiffusionModelConfig(path=str(model)), rollout, [guided], trained_lora_rank=RANK)
    return setup.plan


@pytest.mark.parametrize("winner", ["step_wise", "request_level"])
def test_a_run_goes_by_the_profile_and_changes_its_mind_with_it(written, record, tiny_qwen, tmp_path, winner: str):
    measured = RolloutProfile.load(written / "profile.json")
    rates = {(point.mode, point.max_num_seqs): point.images_per_s for point in measured.points}
    bursts = [row for row in record["rows"] if row["arrivals"] == "burst"]
    assert rates == {(row["mode"], row["max_num_seqs"]): row["images_per_s"] for row in bursts}
    assert plan(written / "profile.json", tiny_qwen).reason.startswith("auto: measured")
    data = json.loads((written / "profile.json").read_text())
    for point in data["points"]:
        point["images_per_s"] *= 100 if point["mode"] == winner else 1
    (tmp_path / "profile.json").write_text(json.dumps(data))
    assert plan(tmp_path / "profile.json", tiny_qwen).mode == winner


def test_a_full_size_model_needs_no_transformer_weights_and_takes_a_lora(tmp_path: Path, monkeypatch):
    def small(family: str, out: Path) -> Path:
        tiny_models.build(family, out)
        for weights in (out / "transformer").glob("*.safetensors"):
            weights.unlink()
        return out

    monkeypatch.setattr(full_size, "build_full_size", small)
    monkeypatch.setattr(full_size, "parameter_counts", lambda family: {"transformer": 1, "vae": 1})
    argv = "--random sd3 --size 64 --modes step_wise --caps 2 --steps 2 --requests 2 --repeats 1 --lora-rank 0 4"
    argv += " --log-prob-gap 1 2"
    assert main([*argv.split(), "--out", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["lora_rank"] for row in rows] == [0, 4] and rows[1]["times_no_lora"] > 0
    gap = rows[0]["log_prob_gap"]  # in float32 the batch shape of a forward hardly matters
    assert list(gap) == ["recorded", "1", "2"] and "log_prob_gap" not in rows[1]
    assert all(largest < 1e-5 for by_step in gap.values() for _, largest in by_step.values())
    assert all(list(by_step) == ["0"] for by_step in gap.values())
