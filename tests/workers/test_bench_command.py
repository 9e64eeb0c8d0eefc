"""The command that a note shows measures what it is shown for."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.plans import BOTH, config, profile_of
from verl_omni.bench.arguments import parse
from verl_omni.bench.model import BenchModel
from verl_omni.bench.session import checked_key, make_bench
from verl_omni.workers.rollout.bench_command import bench_command, beyond_bench
from verl_omni.workers.rollout.plan import resolve_plan
from verl_omni.workers.rollout.profile import ProfileKey
from verl_omni.workers.rollout.profile_key import ATTENTION_VARIABLE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint without weights."""
    folder = tmp_path / "my model"
    for part, content in {"transformer": {"_class_name": "SD3Transformer2DModel"}, "vae": {}}.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(content))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    return folder


def measured_key(command: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileKey:
    """The key of the profile that `command` writes."""
    python, flag, bench, folder, *options = shlex.split(command)
    assert (python, flag, bench, folder) == ("python", "-m", "verl_omni.bench", f"…/{model.name}")
    args = parse([str(model), *options], "")
    if args.attention is not None:
        monkeypatch.setenv(ATTENTION_VARIABLE, args.attention)
    return checked_key(make_bench(args, BenchModel.open(model, name="m")), *args.lora_rank)


PIPELINE = {"height": 128, "width": 128, "num_inference_steps": 4}


@pytest.mark.parametrize(
    ("keys", "of"),
    [
        ({}, {"cfg": False}),
        ({"pipeline": {"width": 256}, "dtype": "float16"}, {"cfg": True}),
        ({"pipeline": {"max_sequence_length": 32}}, {"cfg": True, "lora_rank": 8}),
        ({"pipeline": {"max_sequence_length": 300}, "merge_lora": True}, {"cfg": False, "lora_rank": 8}),
        ({"engine_cfg_parallel_size": 2, "engine_rows_per_forward": 4, "engine_max_num_seqs": 8}, {"cfg": False}),
        ({"engine_diffusion_attention_backend": "torch_sdpa"}, {"cfg": False}),
    ],
)
def test_the_command_measures_the_key(keys: dict[str, Any], of: dict[str, Any], model, monkeypatch):
    made = config(**{"dtype": "float32", **keys, "pipeline": PIPELINE | keys.get("pipeline", {})})
    key = ProfileKey.of(made, model=model, device="cpu", **of)
    assert beyond_bench(key) == ()
    assert measured_key(bench_command(key), model, monkeypatch).differences(key) == ()


def test_on_a_gpu_the_usual_dtype_is_left_out_and_an_uncompiled_model_is_asked_for():
    key = ProfileKey.of(config(), model="m", device="NVIDIA H200", cfg=True)
    assert "--dtype" not in bench_command(key) and "--eager" not in bench_command(key)
    assert "--dtype float32 --eager" in bench_command(replace(key, dtype="float32", compiled=False))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"pipeline": {"height": None, "width": None}}, "height=null, width=null"),
        ({"pipeline": {"num_inference_steps": None}}, "num_inference_steps=null"),
        ({"pipeline": {"num_inference_steps": 1}}, "num_inference_steps=1"),
        ({"pipeline": {"output_type": "latent"}}, "output_type=latent"),
        (
            {"engine_diffusion_attention_config": {"per_role": {"cross": "FLASH_ATTN"}}},
            'attention=default {"per_role": {"cross": "FLASH_ATTN"}}',
        ),
    ],
)
def test_what_the_bench_cannot_measure_is_told_beside_a_command_that_it_takes(keys, told, model, monkeypatch):
    made = config(dtype="float32", batching_mode="auto", **keys)
    key = ProfileKey.of(made, model=model, device="cpu", cfg=False)
    (note,) = resolve_plan(made, BOTH, profile_of(config(), {"step_wise": {8: 1.0}}), key=key).notes
    _, _, near = note.partition(f"; the bench cannot measure {told}; as near as it comes: ")
    differences = measured_key(near, model, monkeypatch).differences(key)
    assert [part.partition(":")[0] for part in differences] == [part.partition("=")[0] for part in told.split(", ")]


def test_the_guidance_of_the_command_is_that_of_the_run():
    made = config(batching_mode="auto", pipeline={"guidance_scale": 4.5})
    profile = profile_of(made, {"step_wise": {8: 1.0}})
    (note,) = resolve_plan(made, BOTH, profile, key=replace(profile.key, lora_rank=32)).notes
    assert " --cfg 4.5 --lora-rank 32 --dtype bfloat16 --profile FILE.json" in note
