"""Each example script trains two steps on the CPU as it stands, on a tiny model."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.pages import DOCS, code_spans, table
from tests.examples.scripts import QWEN, QWEN_LORA, SD35_LORA, TINY, run_script
from verl_omni.trainer.diffusion.metrics_file import read_metrics
from verl_omni.trainer.main_diffusion import main

pytestmark = [pytest.mark.engine, pytest.mark.long]

QUICKSTART = DOCS / "start/quickstart.md"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SMALL = [
    f"{ROLLOUT}.pipeline.height=64",
    f"{ROLLOUT}.pipeline.width=64",
    f"{ROLLOUT}.pipeline.num_inference_steps=6",
    f"{ROLLOUT}.val_kwargs.num_inference_steps=6",
    f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.dtype=float32",
    f"{ACTOR}.fsdp_config.model_dtype=float32",
    f"{ACTOR}.fsdp_config.param_dtype=float32",
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "trainer.total_training_steps=2",
    "trainer.n_gpus_per_node=1",
]


def check_that_diffusers_takes_the_lora(lora: Path, model: Path) -> None:
    """As the quickstart shows it."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(model)
    pipeline.load_lora_weights(lora)
    assert pipeline.get_list_adapters() == {"transformer": ["default_0"]}


def check_that_it_is_a_part_of_a_model(transformer: Path, model: Path, whole: Path) -> None:
    """As the quickstart shows it."""
    from diffusers import DiffusionPipeline, QwenImageTransformer2DModel

    trained = QwenImageTransformer2DModel.from_pretrained(transformer)
    DiffusionPipeline.from_pretrained(model, transformer=trained).save_pretrained(whole)
    weights, expected = DiffusionPipeline.from_pretrained(whole).transformer.state_dict(), trained.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def check_what_was_written(out: Path, model: Path, *, lora: bool) -> None:
    found = {row["step"]: row for row in read_metrics(out)}
    assert all(math.isfinite(found[step]["reward/mean"]) for step in (1, 2))
    assert max(found) == 2
    trained = out / "global_step_2"
    if lora:
        check_that_diffusers_takes_the_lora(trained / "lora", model)
    else:
        check_that_it_is_a_part_of_a_model(trained / "transformer", model, out / "model")
    other = "transformer" if lora else "lora"
    for name, *_ in table(QUICKSTART, "file").rows:
        expected = code_spans(name)[0].replace("_N", "_2")
        assert (out / expected).exists() != expected.endswith(f"/{other}"), name


@pytest.mark.parametrize(
    ("script", "family", "mode", "lora"),
    [
        (QWEN, "tiny_qwen", "mode=step_wise max_num_seqs=256", False),
        (QWEN_LORA, "tiny_qwen", "mode=step_wise max_num_seqs=256", True),
        (SD35_LORA, "tiny_sd3", "mode=request_level max_num_seqs=256", True),
    ],
    ids=["qwen_image", "qwen_image_lora", "sd35_lora"],
)
def test_what_a_script_runs_trains(
    tmp_path, request, monkeypatch, command_line, ray_session, caplog, script, family, mode, lora
):
    out, model = tmp_path / "out", request.getfixturevalue(family)
    overrides = [*SMALL, f"trainer.default_local_dir={out}"]
    arguments = command_line(script, *overrides, MODEL_PATH=str(model), OTHERS=sys.executable)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert mode in caplog.text
    check_what_was_written(out, model, lora=lora)


def test_a_script_trains(tmp_path, tiny_qwen):
    out = tmp_path / "out"
    overrides = [*SMALL, f"trainer.default_local_dir={out}"]
    result = run_script(TINY, *overrides, cwd=tmp_path, MODEL_PATH=str(tiny_qwen))
    assert result.returncode == 0, result.stderr[-4000:]
    assert "mode=step_wise max_num_seqs=16" in result.stderr
    check_what_was_written(out, tiny_qwen, lora=True)
    assert result.stderr.rstrip().endswith(f"report: {out / 'report.html'}")
