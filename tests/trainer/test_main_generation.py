"""The entry point: configuration errors without an engine, and one real run in each mode."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.docs.pages import documented_messages, matches
from tests.trainer.test_prometheus import figure
from verl_omni.trainer.generation.job import GenerationJob
from verl_omni.trainer.main_generation import compose, main
from verl_omni.trainer.prometheus import OUTCOMES
from verl_omni.trainer.rollout_setup import device_name
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.rollout.profile import ProfileKey, ProfilePoint, RolloutProfile
from verl_omni.workers.rollout.seeds import request_seed

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm_omni"

REQUEST_ONLY_ADAPTER = """
from verl_omni.pipelines.model_base import VllmOmniPipelineBase

@VllmOmniPipelineBase.register("QwenImagePipeline", "request_only")
class RequestOnly(VllmOmniPipelineBase.get_class("QwenImagePipeline")):
    supports_step_execution = False
"""
OWN_SCALE_ADAPTER = """
from verl_omni.pipelines.model_base import VllmOmniPipelineBase

@VllmOmniPipelineBase.register("QwenImagePipeline", "own_scale")
class OwnScale(VllmOmniPipelineBase.get_class("QwenImagePipeline")):
    cfg_key = "guidance_scale_2"
"""


@pytest.fixture
def minimal(tmp_path: Path) -> list[str]:
    """Arguments that pass all checks but those on the model's files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    (tmp_path / "prompts.txt").write_text("a cat\n")
    return [
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"data.val_files={tmp_path / 'prompts.txt'}",
        f"generation.output_dir={tmp_path / 'out'}",
    ]


@pytest.mark.slow
def test_both_override_forms_reach_every_documented_key():
    config = compose([])
    assert config is not None
    keys = ["max_num_seqs", "step_execution", "batching_mode", "n", "pipeline.height", "algo.sde_window_size"]
    keys += [
        f"engine_kwargs.vllm_omni.{key}" for key in ("max_num_seqs", "request_batch_max_wait_ms", "enable_sleep_mode")
    ]
    for key in keys:
        for form in ("", "++"):
            node = compose([f"{form}{ROLLOUT}.{key}=7"])["actor_rollout_ref"]["rollout"]
            for part in key.split("."):
                node = node[part]
            assert node == 7


def test_hydra_shows_the_configuration_and_leaves_nothing_behind(minimal, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    assert main([*minimal, "--cfg", "job"]) == 0
    assert "num_inference_steps: 10" in capfd.readouterr().out
    assert main([*minimal, "no.such.key=1"]) == 2
    assert set(tmp_path.rglob("*")) == before
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("form", ["", "+", "++"])
def test_misspelt_keys_are_named_with_the_nearest(minimal, form, capfd):
    assert main([*minimal, f"{form}{ENGINE}.max_num_seq=8"]) == 2
    assert f"did you mean {ENGINE}.max_num_seqs?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.model.path=null"], "actor_rollout_ref.model.path is required"),
        (["actor_rollout_ref.model.path=/no/such/model"], "/no/such/model"),
        (["actor_rollout_ref=null"], "actor_rollout_ref.model.path is required"),
        (["data.val_files=null"], "data.val_files is required"),
        (["data.val_files=[]"], "file name or a list"),
        (["data.val_files=[prompts.csv]"], "prompts.csv must end in"),
        (["data.val_files=/no/such.txt"], "/no/such.txt"),
        (["data.val_files=${nothing}"], "nothing"),
        (["data.max_samples=0"], "data.max_samples=0 must be"),
        (["data.max_sample=1"], "did you mean data.max_samples?"),
        (["daat.max_samples=1"], "did you mean data?"),
        (["actor_rollout_ref.rollout.n=0"], "rollout.n=0 must be"),
        (["rollout.n=2"], "did you mean actor_rollout_ref.rollout?"),
        (["pipeline.height=64"], "did you mean actor_rollout_ref.rollout.pipeline?"),
        (["generation.output_dir=/dev/null"], "/dev/null is in the way"),
        (["generation.grid=7"], "generation.grid=7 must be true or false"),
        ([f"{ROLLOUT}.max_num_seqs=2.5"], "integer of at least 1"),
        ([f"{ROLLOUT}.max_num_seqs=8", f"++{ENGINE}.max_num_seqs=4"], "contradict"),
        ([f"{ROLLOUT}.batching_mode=serial", f"{ROLLOUT}.step_execution=true"], "contradict"),
        ([f"{ENGINE}.enforce_eagre=true"], "enforce_eager?"),
        ([f"{ROLLOUT}.profile=/no/profile.json"], "/no/profile.json"),
        (["not an override"], "Hydra"),
        (["data.max_samples==1"], "Hydra"),
        (["--no-such-flag"], "Hydra"),
        (["--multirun", "data.max_samples=1,2"], "one run at a time"),
    ],
)
def test_bad_configurations_end_with_status_2_and_one_message(minimal, overrides, message, capfd):
    assert main([*minimal, *overrides]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.engine
def test_ctrl_c_writes_what_is_finished(minimal, tiny_qwen, tmp_path, monkeypatch, caplog):
    """`minimal` but for the model; the interrupt arrives as asyncio delivers it, after the second result."""
    finished = []

    def update(self, n=1):
        if self.desc == "rollout":  # the engine has bars of its own
            finished.append(n)
        if len(finished) == 2:
            asyncio.current_task().cancel()

    monkeypatch.setattr("tqdm.tqdm.update", update)
    arguments = [
        *minimal[1:],
        f"actor_rollout_ref.model.path={tiny_qwen}",
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.n=6",
    ]
    arguments += [f"{ROLLOUT}.pipeline.{name}=64" for name in ("height", "width")]
    arguments += [f"{ROLLOUT}.metrics_port=0"]
    registries = []
    serve = prometheus_client.start_http_server
    monkeypatch.setattr(
        prometheus_client,
        "start_http_server",
        lambda *given, registry, **options: (registries.append(registry), serve(*given, registry=registry, **options))[
            1
        ],
    )
    assert main(arguments) == 1
    ended = {outcome: figure(registries[0], "requests_total", outcome=outcome) for outcome in OUTCOMES}
    assert ended == {"success": 2, "error": 0, "aborted": 4, "retried": 0}
    assert figure(registries[0], "waves_total") >= 1
    report = json.loads((tmp_path / "out" / "rollout.json").read_text())
    assert report["num_images"] == 2
    assert [failure["error"] for failure in report["failed"]] == ["interrupted"] * 4
    assert "interrupted: 2 of 6 requests are finished" in caplog.text
    assert [message for message in caplog.messages if message.startswith("failed: ")] == [
        f"failed: 4 of 6 requests of {tmp_path / 'prompts.txt'}:1: interrupted"
    ]
    assert (tmp_path / "out" / "trajectories.safetensors").is_file()


def test_a_bad_row_is_a_bad_configuration(minimal, tmp_path, capfd):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "a", "num_inference_step": 3}\n')
    assert main([*minimal, f"data.val_files={file}"]) == 2
    assert (
        f"{file}:2: num_inference_step is not a known key; did you mean num_inference_steps?" in capfd.readouterr().err
    )


def test_a_bad_configuration_is_found_without_torch(minimal):
    code = (
        "import sys; from verl_omni.trainer.main_generation import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'vllm', 'vllm_omni', 'ray'} & sys.modules.keys(); sys.exit(status)"
    )
    arguments = [sys.executable, "-c", code, *minimal, f"{ROLLOUT}.batching_mode=serial", f"{ROLLOUT}.max_num_seqs=2"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, "contradict" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.model.algorithm=dpo"], "no rollout adapter"),
        (["actor_rollout_ref.model.architecture=Unknown"], "no rollout adapter"),
        ([f"{ROLLOUT}.external_lib=no_such_module"], "no_such_module"),
        ([f"{ROLLOUT}.external_lib=/no/such/file.py"], "/no/such/file.py"),
        ([f"{ENGINE}.request_batch_max_wait_ms=-1"], "at least 0"),
        ([f"{ENGINE}.diffusion_compile_granularity=some"], "diffusion_compile_granularity"),
    ],
)
def test_what_only_the_engine_knows_is_checked_before_a_model_is_loaded(minimal, overrides, message, capfd):
    assert main([*minimal, *overrides]) == 2
    assert message in capfd.readouterr().err


def test_external_adapter_without_step_methods(minimal, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "request_only_adapter.py").write_text(REQUEST_ONLY_ADAPTER)
    ours = [
        f"{ROLLOUT}.external_lib={tmp_path / 'request_only_adapter.py'}",
        "actor_rollout_ref.model.algorithm=request_only",
    ]
    assert main([*minimal, *ours, f"{ROLLOUT}.step_execution=true"]) == 2
    assert "RequestOnly lacks supports_step_execution = True; write" in capfd.readouterr().err
    (tmp_path / "json.py").write_text("")
    assert main([*minimal, f"{ROLLOUT}.external_lib={tmp_path / 'json.py'}"]) == 2
    assert "rename the file" in capfd.readouterr().err


def test_keys_without_effect_are_told(minimal, caplog):
    given = ["actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.replicas=2", f"{ROLLOUT}.merge_lora=true"]
    GenerationJob.prepare(compose([*minimal, *given]))
    assert "actor_rollout_ref.model.lora_rank has no effect: it is for training" in caplog.text
    assert "actor_rollout_ref.rollout.replicas has no effect" in caplog.text
    assert "actor_rollout_ref.rollout.merge_lora has no effect: actor_rollout_ref.model.lora_path" in caplog.text
    assert "colocate" not in caplog.text


QWEN, SD3 = "QwenImagePipeline", "StableDiffusion3Pipeline"


@pytest.mark.parametrize(
    ("architecture", "row", "pipeline", "guided"),
    [
        (QWEN, {}, {"true_cfg_scale": 4}, False),
        (QWEN, {"negative_prompt": ""}, {}, True),  # by the adapter's default scale
        (QWEN, {"negative_prompt_token_ids": [1]}, {"true_cfg_scale": 4}, True),
        (QWEN, {"negative_prompt": ""}, {"true_cfg_scale": 1}, False),
        (QWEN, {"negative_prompt": ""}, {"true_cfg_scale": 1, "guidance_scale": 7}, False),
        (QWEN, {"negative_prompt": "", "true_cfg_scale": 2}, {"true_cfg_scale": 1}, True),
        (QWEN, {"negative_prompt": "", "true_cfg_scale": "high"}, {}, False),  # that row will fail
        (SD3, {"negative_prompt": ""}, {}, True),
        (SD3, {"negative_prompt": ""}, {"guidance_scale": 1, "true_cfg_scale": 7}, False),
    ],
)
def test_a_profile_holds_where_the_adapter_runs_guidance_as_measured(
    minimal, tmp_path, architecture, row, pipeline, guided
):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "a", **row}))
    overrides = [f"data.val_files={tmp_path / 'rows.jsonl'}", f"actor_rollout_ref.model.architecture={architecture}"]
    overrides += [f"{ROLLOUT}.pipeline.{key}={value}" for key, value in pipeline.items()]
    overrides += [f"{ROLLOUT}.batching_mode=auto", f"{ROLLOUT}.profile={tmp_path / 'profile.json'}"]
    key = ProfileKey.of(DiffusionRolloutConfig(), model=tmp_path / "model", device=device_name(), cfg=True)
    points = [ProfilePoint(mode=mode, max_num_seqs=8, images_per_s=1.0) for mode in ("step_wise", "request_level")]
    RolloutProfile(key=key, points=tuple(points)).save(tmp_path / "profile.json")
    plan = GenerationJob.prepare(compose([*minimal, *overrides])).plan
    assert ("auto: measured" in plan.reason) == guided
    assert any("not used (cfg: measured with True, now False)" in note for note in plan.notes) != guided


def test_an_adapter_with_a_scale_of_its_own_can_be_planned(minimal, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "own_scale_adapter.py").write_text(OWN_SCALE_ADAPTER)
    ours = [f"{ROLLOUT}.external_lib={tmp_path / 'own_scale_adapter.py'}"]
    ours += ["actor_rollout_ref.model.algorithm=own_scale", f"{ROLLOUT}.pipeline.true_cfg_scale=4"]
    assert GenerationJob.prepare(compose([*minimal, *ours])).adapter == "own_scale_adapter.OwnScale"
    assert "true_cfg_scale has no effect: OwnScale takes its guidance scale from guidance_scale_2" in caplog.text


def small(model: Path, prompts: Path, out: Path) -> list[str]:
    """Arguments of a small run."""
    arguments = [f"actor_rollout_ref.model.path={model}", f"data.val_files={prompts}", f"generation.output_dir={out}"]
    sizes = (("height", 64), ("width", 64), ("num_inference_steps", 4))
    return [*arguments, *(f"{ROLLOUT}.pipeline.{key}={value}" for key, value in sizes), f"{ROLLOUT}.dtype=float32"]


def written(out: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Report and tensors of a run."""
    return json.loads((out / "rollout.json").read_text()), load_file(out / "trajectories.safetensors")


def images(out: Path) -> set[str]:
    return {path.stem for path in (out / "images").iterdir()}


@pytest.mark.engine
def test_one_run_in_each_mode(tiny_qwen, tmp_path, monkeypatch, caplog):
    """Serial from text; step-wise from JSON lines, one of them bad; request-level, own adapter, in a worker process.

    Same prompts, same trajectories.
    """
    prompts = ["a red circle", "two black birds on a paper lamp at night"]
    text, rows = tmp_path / "prompts.txt", tmp_path / "rows.jsonl"
    text.write_text("\n".join(prompts))
    more = [
        {"prompt": "odd", "height": 63},
        {"prompt": "many", "num_outputs_per_prompt": 2, "seed": 5, "sde_window_size": 1},
    ]
    rows.write_text("\n".join(json.dumps(row) for row in [*({"prompt": prompt} for prompt in prompts), *more]))
    ids = {"0000-00", "0000-01", "0001-00", "0001-01"}

    command = [sys.executable, "-m", "verl_omni.trainer.main_generation"]
    command += [*small(tiny_qwen, text, tmp_path / "serial"), f"{ROLLOUT}.n=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("rollout plan: mode=serial")) == (0, 1), done.stderr
    report, serial = written(tmp_path / "serial")
    assert (report["mode"], report["max_num_seqs"], report["failed"]) == ("serial", 1, [])
    assert report["batch_sizes"] == {"1": 16}
    assert report["encodes"] == {"requested": 4, "computed": 2}
    assert report["peak_memory_mb"] > 0
    (size, waits), *others = report["queue_wait_s"].items()
    assert (size, waits["requests"], others) == ("64x64", 4, [])
    assert waits["max"] == max(row["queue_wait_s"] for row in report["samples"]) > 0
    assert images(tmp_path / "serial") == ids
    assert [row["seed"] for row in report["samples"]] == [request_seed(42, row) for row in range(4)]
    assert serial["0000-00/latents"].shape[0] == 1 + len(serial["0000-00/log_probs"]) == 4

    step = small(tiny_qwen, rows, tmp_path / "step")
    assert main([*step, f"{ROLLOUT}.n=2", f"{ROLLOUT}.step_execution=true"]) == 1
    told = [message for message in caplog.messages if message.startswith("failed: ")]
    assert len(told) == 1
    assert told[0].startswith(f"failed: 2 of 2 requests of {rows}:3: height=63, width=64 must be")
    report, step_wise = written(tmp_path / "step")
    assert (report["mode"], report["max_num_seqs"]) == ("step_wise", 16)
    assert report["peak_memory_mb"] > 0
    assert [failure["id"] for failure in report["failed"]] == ["0002-00", "0002-01"]
    assert all("63" in failure["error"] for failure in report["failed"])
    outputs = {f"0003-{sample:02d}.{index}" for sample in range(2) for index in range(2)}
    assert images(tmp_path / "step") == ids | outputs
    assert all(len(step_wise[f"{name}/log_probs"]) == 1 for name in outputs)
    sizes = {int(size): forwards for size, forwards in report["batch_sizes"].items()}
    assert sum(size * forwards for size, forwards in sizes.items()) == 8 * 4
    assert min(sizes) >= 4
    assert [row["seed"] for row in report["samples"]][4:] == [5, 6]

    (tmp_path / "request_only_run.py").write_text(REQUEST_ONLY_ADAPTER.replace("request_only", "request_only_run"))
    ours = [
        f"{ROLLOUT}.external_lib={tmp_path / 'request_only_run.py'}",
        "actor_rollout_ref.model.algorithm=request_only_run",
    ]
    ours += [f"{ROLLOUT}.batching_mode=auto", f"++{ENGINE}.max_num_seqs=4", f"{ENGINE}.distributed_executor_backend=mp"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    assert main([*small(tiny_qwen, text, tmp_path / "request"), f"{ROLLOUT}.n=2", *ours]) == 0
    report, request_level = written(tmp_path / "request")
    assert (report["mode"], report["max_num_seqs"]) == ("request_level", 4)
    assert [mode in caplog.text for mode in ("mode=step_wise", "mode=request_level")] == [True, True]
    assert report["batch_sizes"] == {"4": 4}
    assert report["peak_memory_mb"] > 0

    for key, tensor in serial.items():
        torch.testing.assert_close(step_wise[key], tensor, atol=1e-5, rtol=0)
        torch.testing.assert_close(request_level[key], tensor, atol=1e-5, rtol=0)


@pytest.mark.engine
def test_parquet_and_latents_with_sd3(tiny_sd3, tmp_path):
    import pyarrow
    import pyarrow.parquet

    chat = [{"role": "user", "content": "a round clock"}]
    row = {
        "data_source": "test",
        "prompt": chat,
        "negative_prompt": "blurry",
        "guidance_scale": 3.0,
        "output_type": "latent",
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "p.parquet")
    overrides = [f"{ENGINE}.max_num_seqs=2", f"{ROLLOUT}.n=2", f"{ROLLOUT}.algo.noise_level=0"]
    assert main([*small(tiny_sd3, tmp_path / "p.parquet", tmp_path / "out"), *overrides]) == 0
    report, tensors = written(tmp_path / "out")
    assert (report["mode"], report["failed"]) == ("request_level", [])
    kinds = {key.removeprefix("0000-01/") for key in tensors if key.startswith("0000-01/")}
    assert {"output_latents", "prompt_embeds", "pooled_prompt_embeds", "negative_prompt_embeds"} <= kinds
    assert not {"latents", "log_probs", "timesteps"} & kinds
    assert not (tmp_path / "out" / "images").exists()


@pytest.mark.engine
def test_a_lora_that_does_not_fit_the_model_is_a_bad_configuration(tiny_qwen, minimal, tmp_path, capfd):
    lora = tmp_path / "lora"
    lora.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q"]}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    halves = {"A": torch.ones(2, 4), "B": torch.ones(4, 2)}
    tensors = {f"base_model.model.blocks.99.attn.to_q.lora_{half}.weight": value for half, value in halves.items()}
    save_file(tensors, lora / "adapter_model.safetensors")
    overrides = [f"actor_rollout_ref.model.path={tiny_qwen}", f"actor_rollout_ref.model.lora_path={lora}"]
    assert main([*minimal, *overrides, f"{ROLLOUT}.dtype=float32"]) == 2
    err = capfd.readouterr().err
    assert f"config error: actor_rollout_ref.model.lora_path={str(lora)!r}: " in err
    assert "the model has no layers for these LoRA modules: blocks.99.attn.to_q" in err
    assert any(matches(pattern, err) for pattern in documented_messages("The run does not start"))
    assert not (tmp_path / "out").exists()


def test_compose_rejects_what_hydra_cannot_read():
    with pytest.raises(ConfigError):
        compose(["data.max_samples=[1"])
