"""Profiles in files and folders, and how the key of a run is read off its configuration and checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.plans import BOTH, config, key_of, plan, profile_of
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout import profile_key
from verl_omni.workers.rollout.launch import engine_arguments
from verl_omni.workers.rollout.profile import (
    LARGEST_CAP,
    ProfileFailure,
    ProfileKey,
    ProfilePoint,
    RolloutProfile,
    load_profiles,
    nearest_profile,
)
from verl_omni.workers.rollout.profile_key import ATTENTION_VARIABLE, transformer_digest

SMALL = {"_class_name": "QwenImageTransformer2DModel", "num_layers": 2, "attention_head_dim": 16}


def checkpoint(folder: Path, transformer: Any) -> Path:
    (folder / "transformer").mkdir(parents=True)
    text = transformer if isinstance(transformer, str) else json.dumps(transformer)
    (folder / "transformer" / "config.json").write_text(text)
    return folder


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path):
    rollout = config(pipeline={"height": None}, engine_cfg_parallel_size=2)
    profile = profile_of(rollout, {"step_wise": {8: 1.5}, "serial": {1: 1.0}}, {"step_wise": {8: 3.5}})
    profile.save(tmp_path / "profile.json")
    loaded = RolloutProfile.load(tmp_path / "profile.json")
    assert loaded == profile
    assert loaded.source == "profile.json"
    assert loaded.key.differences(key_of(rollout)) == ()


def test_what_failed_beside_the_points_comes_back_too(tmp_path: Path):
    failed = tuple(ProfileFailure(mode="step_wise", max_num_seqs=cap, error="no room") for cap in (8, 16))
    profile = replace(profile_of(config(), {"step_wise": {8: 1.5}, "serial": {1: 1.0}}), failed=failed)
    profile.save(tmp_path / "profile.json")
    loaded = RolloutProfile.load(tmp_path / "profile.json")
    assert loaded == profile
    assert loaded.failed_caps("step_wise") == {16}  # 8 was measured as well
    assert loaded.failed_caps("request_level") == set()
    good = (tmp_path / "profile.json").read_text()
    data = json.loads(good)
    bad_files = [good.replace('"no room"', "3"), good.replace('"error"', '"reason"')]
    bad_files += [json.dumps({**data, **more}) for more in ({"failed": {}}, {"more": []}, {"failed": [{"mode": "x"}]})]
    for bad in bad_files:
        (tmp_path / "profile.json").write_text(bad)
        with pytest.raises(ConfigError, match=r"profile\.json"):
            RolloutProfile.load(tmp_path / "profile.json")


def test_a_file_that_is_no_profile_is_an_error_that_names_it(tmp_path: Path):
    path = tmp_path / "profile.json"
    profile_of(config(), {"step_wise": {8: 1.5}}).save(path)
    good = path.read_text()
    assert RolloutProfile.load(path)
    bad_files = ["", "[]", '{"key": {}}', good.replace("step_wise", "stepwise"), good.replace("1.5", "-1")]
    bad_files += [good.replace("step_wise", "serial"), good.replace('"attention"', '"backend"')]
    bad_files += [good.replace('"peak_memory_gib": null', '"peak_memory_gib": -1'), '{"key": {}, "points": []}']
    bad_files += ["[" * 100_000, good.replace('"max_num_seqs": 8', f'"max_num_seqs": {LARGEST_CAP + 1}')]
    for bad in bad_files:
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"profile\.json"):
            RolloutProfile.load(path)
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_profiles(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (None, "there is no such file; give one that there is, or {measure}"),
        (b"", "it is no JSON (Expecting value: line 1 column 1 (char 0)): broken or cut short; {measure}"),
        (b"\xff\xfe", "it is no text (invalid start byte); {measure}"),
        (
            b'{"workload": {}, "rows": []}',
            "this is a record of the bench (--out); give the file that it wrote as --profile",
        ),
        (b"[]", 'it must be an object with "key", "points" and maybe "failed"'),
    ],
)
def test_what_is_given_in_place_of_a_profile_is_told_with_what_to_give(tmp_path: Path, written, told):
    path = tmp_path / "p.json"
    if written is not None:
        path.write_bytes(written)
    with pytest.raises(ConfigError) as error:
        load_profiles(path)
    measure = f"measure one with python -m verl_omni.bench … --profile {path}"
    assert str(error.value) == f"rollout profile {path}: {told.format(measure=measure)}"


def test_of_a_folder_the_profile_that_matches_is_used_else_the_nearest_one_named(tmp_path: Path):
    rollout = config()
    profile = profile_of(rollout, {"step_wise": {8: 1.5}})
    other = replace(profile, key=replace(profile.key, cfg=False, height=64))
    for name, saved in {"a": other, "b": profile, "c": replace(other, key=replace(other.key, width=64))}.items():
        saved.save(tmp_path / f"{name}.json")
    (tmp_path / "notes.txt").write_text("no profile")
    profiles = load_profiles(tmp_path)
    assert [found.source for found in profiles] == ["a.json", "b.json", "c.json"]
    assert nearest_profile(profiles, profile.key).source == "b.json"
    nearest = nearest_profile(profiles, replace(other.key, dtype="float16"))
    assert nearest.source == "a.json"
    assert nearest.key.differences(replace(other.key, dtype="float16")) == (
        "dtype: measured with bfloat16, now float16",
    )
    assert load_profiles(tmp_path / "b.json") == [profile]


def test_of_a_folder_what_is_no_profile_is_left_out_and_told(tmp_path: Path, caplog):
    profile = profile_of(config(), {"step_wise": {8: 1.5}})
    profile.save(tmp_path / "b.json")
    (tmp_path / "a.json").write_text('{"workload": {}, "rows": [], "device": "CPU"}')
    (tmp_path / ".hidden.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    assert load_profiles(tmp_path) == [profile]
    (told,) = caplog.messages
    assert told.startswith("left out: rollout profile ") and "a.json: this is a record of the bench (--out)" in told
    (tmp_path / "b.json").unlink()
    with pytest.raises(ConfigError, match="the folder holds no profile; measure one"):
        load_profiles(tmp_path)


def test_of_two_profiles_that_match_the_first_is_used_and_told(caplog):
    profile = profile_of(config(), {"step_wise": {8: 1.5}})
    two = [replace(profile, source=name) for name in ("a.json", "b.json")]
    stale = replace(profile, key=replace(profile.key, height=64), source="c.json")
    assert nearest_profile([stale, *two], profile.key).source == "a.json"
    assert caplog.messages == ["of the rollout profiles that hold for this run a.json is used, and not b.json"]
    caplog.clear()
    assert nearest_profile([stale, two[1]], profile.key).source == "b.json" and not caplog.messages


def test_numbers_that_are_written_as_text_are_read_as_numbers(tmp_path: Path):
    rollout = config()
    profile = profile_of(rollout, {"step_wise": {8: 1.5}}, {"step_wise": {8: 3.5}})
    profile = replace(profile, failed=(ProfileFailure(mode="step_wise", max_num_seqs=16, error="no room"),))
    profile.save(tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text())
    numbers = {"height", "width", "num_inference_steps", "lora_rank", "cfg", "compiled", "lora_merged"}
    numbers |= {"max_num_seqs", "images_per_s", "peak_memory_gib"}
    for part in (data["key"], *data["points"], *data["failed"]):
        part |= {name: str(value) for name, value in part.items() if name in numbers}
    (tmp_path / "profile.json").write_text(json.dumps(data))
    loaded = RolloutProfile.load(tmp_path / "profile.json")
    assert loaded == profile and loaded.key.differences(key_of(rollout)) == ()
    assert repr(loaded.points) == repr(profile.points) and repr(loaded.failed) == repr(profile.failed)


def test_a_folder_without_profiles_is_an_error_that_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"verl_omni\.bench … --profile .*profile\.json"):
        load_profiles(tmp_path)


def test_of_a_cap_measured_twice_the_higher_speed_and_memory_count():
    twice = [
        ProfilePoint(mode="step_wise", max_num_seqs=8, images_per_s=rate, peak_memory_gib=peak)
        for rate, peak in ((2.0, 10.0), (3.0, None), (1.0, 20.0))
    ]
    points = RolloutProfile(key=key_of(config()), points=tuple(twice)).measured("step_wise")
    assert (points[8].images_per_s, points[8].peak_memory_gib) == (3.0, 20.0)


def test_a_checkpoint_may_be_moved_renamed_and_saved_by_another_version(tmp_path: Path):
    """Full-size random weights, too: what their configuration leaves out is the default of the class."""
    one = checkpoint(tmp_path / "one", SMALL)
    same = {"patch_size": 2, **dict(reversed(SMALL.items())), "_diffusers_version": "0.1", "_name_or_path": "x"}
    same |= {"axes_dims_rope": [16, 56, 56], "zero_cond_t": False, "pooled_projection_dim": 768}
    two = checkpoint(tmp_path / "moved" / "two", same)
    keys = [ProfileKey.of(config(), model=model, device="cpu", cfg=True) for model in (one, two)]
    assert [key.model for key in keys] == ["one", "two"]
    assert keys[0].transformer is not None
    assert keys[0].differences(keys[1]) == ()


@pytest.mark.parametrize(
    "other", [{"num_layers": 3}, {"axes_dims_rope": [4, 6, 6]}, {"_class_name": "SD3Transformer2DModel"}]
)
def test_another_transformer_under_the_same_name_does_not_match(tmp_path: Path, other):
    one, two = (checkpoint(tmp_path / part / "model", c) for part, c in (("a", SMALL), ("b", {**SMALL, **other})))
    keys = [ProfileKey.of(config(), model=model, device="cpu", cfg=True) for model in (one, two)]
    (difference,) = keys[0].differences(keys[1])
    assert difference.startswith("transformer: ")


def test_a_transformer_class_of_ones_own_is_known_by_all_that_its_configuration_says(tmp_path: Path):
    own = {**SMALL, "_class_name": "OwnTransformer"}
    digests = {
        transformer_digest(checkpoint(tmp_path / str(i), {**own, **more}))
        for i, more in enumerate(({}, {"_diffusers_version": "0.1"}, {"depth": 2}, {"depth": None}))
    }
    assert len(digests) == 3
    assert None not in digests


def test_where_the_transformer_is_unknown_the_name_of_the_model_decides(tmp_path: Path):
    broken = [checkpoint(tmp_path / name, text) for name, text in (("a", "{"), ("b", "[]"), ("c", "{}"))]
    for model in ("nowhere/model", tmp_path / "model", *broken):
        key = ProfileKey.of(config(), model=model, device="cpu", cfg=True)
        assert key.transformer is None
        assert key.differences(replace(key, model="other"))
        assert key.differences(replace(key, transformer="0123456789ab"))
        assert key.differences(replace(key)) == ()


def test_the_transformer_of_a_model_on_the_hub_is_read_there(tmp_path: Path, monkeypatch):
    asked = []
    file = checkpoint(tmp_path, SMALL) / "transformer/config.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args: asked.append(args) or str(file))
    assert transformer_digest("some/model") == transformer_digest(tmp_path)
    assert asked == [("some/model", "transformer/config.json")]


def test_the_size_steps_texts_output_and_dtype_of_the_key_are_those_of_the_run():
    pipeline = {"height": 64, "width": None, "num_inference_steps": 3}
    key = key_of(config(dtype="fp32", pipeline={**pipeline, "max_sequence_length": 128, "output_type": "latent"}))
    assert (key.height, key.width, key.num_inference_steps, key.dtype) == (64, None, 3, "float32")
    assert (key.max_sequence_length, key.output_type) == (128, "latent")
    key = key_of(config())
    assert (key.max_sequence_length, key.output_type) == (None, "pt")


@pytest.mark.parametrize(
    ("options", "variable", "name"),
    [
        ({}, None, "default"),
        ({}, "auto", "default"),
        ({}, "torch_sdpa", "TORCH_SDPA"),
        ({"diffusion_attention_backend": "FLASH_ATTN"}, "TORCH_SDPA", "FLASH_ATTN"),
        ({"diffusion_attention_backend": "auto"}, "TORCH_SDPA", "TORCH_SDPA"),
        ({"diffusion_attention_config": {"default": "FLASH_ATTN"}}, "TORCH_SDPA", "FLASH_ATTN"),
        ({"diffusion_attention_config": {"default": {"backend": "flash_attn"}}}, None, "FLASH_ATTN"),
        (
            {"diffusion_attention_config": {"per_role": {"cross": "FLASH_ATTN"}}},
            "TORCH_SDPA",
            'TORCH_SDPA {"per_role": {"cross": "FLASH_ATTN"}}',
        ),
    ],
)
def test_the_attention_backend_is_the_one_that_the_engine_is_told(monkeypatch, options, variable, name):
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    monkeypatch.delenv(ATTENTION_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(ATTENTION_VARIABLE, variable)
    key = key_of(config(**{f"engine_{key}": value for key, value in options.items()}))
    assert key.attention == name
    assert key.engine_options == {}
    spec = OmniDiffusionConfig.from_kwargs(**options).diffusion_attention_config.default
    assert name.split()[0] == ("default" if spec is None else spec.backend.upper())


def test_models_are_compiled_on_an_accelerator_unless_the_engine_is_to_run_eagerly():
    def compiled(device: str, **keys: Any) -> bool:
        return ProfileKey.of(config(**keys), model="m", device=device, cfg=True).compiled

    assert compiled("NVIDIA H200")
    assert not compiled("NVIDIA H200", engine_enforce_eager=True)
    assert not compiled("cpu")
    assert not compiled("cpu", engine_enforce_eager=False)


@pytest.mark.parametrize(("device", "cuda"), [("cpu", False), ("NVIDIA H200", True)])
def test_what_compiles_by_default_does_so_in_the_engine(monkeypatch, device, cuda):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    arguments = engine_arguments(
        plan(BOTH), adapter="a.B", dtype="float32", executor="uni", engine_kwargs={}, masks_text=True
    )
    assert ProfileKey.of(config(), model="m", device=device, cfg=True).compiled == (not arguments["enforce_eager"])


def test_a_lora_is_known_by_its_rank_and_whether_it_is_merged():
    def lora(rank: int, merge: bool) -> tuple[int, bool]:
        key = ProfileKey.of(config(merge_lora=merge), model="m", device="cpu", cfg=True, lora_rank=rank)
        return key.lora_rank, key.lora_merged

    assert [lora(64, True), lora(64, False), lora(0, True)] == [(64, True), (64, False), (0, False)]


def test_engine_options_count_but_for_those_that_only_the_start_or_the_plan_depends_on():
    key = key_of(config(engine_cfg_parallel_size=2, engine_rows_per_forward=4, engine_vae_use_tiling=None))
    assert key.engine_options == {"cfg_parallel_size": 2, "rows_per_forward": 4}
    key = key_of(config(engine_init_timeout=9, engine_max_num_seqs=4, engine_enforce_eager=True, max_num_seqs=4))
    assert key.engine_options == {}


def test_the_versions_are_those_of_torch_the_engine_and_verl_omni(monkeypatch):
    import torch

    import verl_omni

    versions = key_of(config()).versions
    assert versions.keys() == {"torch", "vllm-omni", "verl-omni"}
    assert versions["torch"] == torch.__version__
    assert versions["verl-omni"] == verl_omni.__version__
    monkeypatch.setattr(profile_key, "PACKAGES", ("torch", "a package that nobody has"))
    assert key_of(config()).versions.keys() == {"torch", "verl-omni"}
