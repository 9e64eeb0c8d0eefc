"""What a plan tells of a profile that does not hold for the run, or that the configuration overrules."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from tests.workers.plans import BOTH, config, profile_of
from verl_omni.workers.rollout.asked import ROLLOUT
from verl_omni.workers.rollout.plan import DEFAULT_MAX_NUM_SEQS, RolloutMode, resolve_plan
from verl_omni.workers.rollout.profile import ProfileKey

STEPS, WHOLE, SERIAL = (mode.value for mode in RolloutMode)

OTHER: dict[str, Any] = {
    "model": "other",
    "transformer": "0123456789ab",
    "height": 256,
    "width": None,
    "num_inference_steps": 50,
    "max_sequence_length": 128,
    "output_type": "latent",
    "cfg": False,
    "lora_rank": 64,
    "lora_merged": True,
    "dtype": "float16",
    "attention": "FLASH_ATTN",
    "compiled": True,
    "device": "NVIDIA H200",
    "engine_options": {"cfg_parallel_size": 2},
    "versions": {"torch": "1.0"},
}


@pytest.mark.parametrize("name", [field.name for field in fields(ProfileKey)])
def test_a_profile_that_differs_in_any_part_of_its_key_is_not_used_and_a_note_names_it(name):
    rollout = config(batching_mode="auto")
    profile = profile_of(rollout, {STEPS: {8: 1.0}, WHOLE: {8: 2.0}})
    assert resolve_plan(rollout, BOTH, profile, key=profile.key).mode is RolloutMode.REQUEST_LEVEL
    got = resolve_plan(rollout, BOTH, profile, key=replace(profile.key, **{name: OTHER[name]}))
    assert (got.mode, got.max_num_seqs) == (RolloutMode.STEP_WISE, DEFAULT_MAX_NUM_SEQS)
    assert got.reason.endswith("; the profile is stale and not used")
    (note,) = got.notes
    assert note.startswith(f"the profile is stale and not used ({name}")


def test_the_note_shows_what_was_measured_and_what_is_now():
    rollout = config(step_execution=True)
    profile = profile_of(rollout, {STEPS: {8: 1.0}})
    versions = {**profile.key.versions, "torch": "1.0"}
    now = replace(profile.key, height=256, engine_options={"cfg_parallel_size": 2}, versions=versions)
    (note,) = resolve_plan(rollout, BOTH, profile, key=now).notes
    assert "height: measured with 512, now 256" in note
    assert "engine_options.cfg_parallel_size: measured with nothing, now 2" in note
    assert f"versions.torch: measured with {profile.key.versions['torch']}, now 1.0" in note


def test_a_stale_profile_that_would_decide_nothing_is_told_to_be_both():
    profile = profile_of(config(), {STEPS: {8: 1.0}})
    rollout = config(step_execution=True, max_num_seqs=4)
    got = resolve_plan(rollout, BOTH, profile, key=replace(profile.key, height=256))
    assert "stale" not in got.reason
    stale, overruled = got.notes
    assert "is stale and not used" in stale
    assert overruled.startswith(
        "the profile is overruled by batching_mode=null, step_execution=true, max_num_seqs=4; to "
    )


SHOWN = {STEPS: {8: 1.0, 32: 1.0}, WHOLE: {8: 1.5, 32: 2.0}}
# keys of the configuration → what overrules the profile, what to write; None: nothing does
OVERRULED: list[tuple[dict[str, Any], str | None, dict[str, str]]] = [
    ({"batching_mode": "auto"}, None, {}),
    ({"batching_mode": "auto", "max_num_seqs": 32}, None, {}),
    ({"batching_mode": WHOLE}, None, {}),
    ({"batching_mode": "auto", "max_num_seqs": 8}, "max_num_seqs=8", {"max_num_seqs": "null"}),
    ({"batching_mode": "auto", "step_execution": True}, "step_execution=true", {"step_execution": "false"}),
    (
        {"batching_mode": "auto", "engine_step_execution": True, "engine_max_num_seqs": 16},
        "step_execution=true, max_num_seqs=16",
        {"engine_kwargs.vllm_omni.step_execution": "null", "engine_kwargs.vllm_omni.max_num_seqs": "null"},
    ),
    ({"batching_mode": STEPS}, "batching_mode=step_wise", {"batching_mode": "auto"}),
    ({"batching_mode": SERIAL}, "batching_mode=serial", {"batching_mode": "auto"}),
    ({}, "batching_mode=null", {"batching_mode": "auto"}),
    (  # as it would decide, but it is not asked
        {"batching_mode": WHOLE, "max_num_seqs": 32},
        "batching_mode=request_level, max_num_seqs=32",
        {"batching_mode": "auto", "max_num_seqs": "null"},
    ),
]


@pytest.mark.parametrize(("keys", "told", "overrides"), OVERRULED)
def test_where_the_configuration_overrules_a_profile_a_note_says_what_does_and_what_to_write(keys, told, overrides):
    rollout = config(**keys)
    profile = replace(profile_of(rollout, SHOWN), source="sd3.json")
    notes = [note for note in resolve_plan(rollout, BOTH, profile).notes if "overruled" in note]
    if told is None:
        assert notes == []
        return
    written = " ".join(f"{ROLLOUT}.{key}={value}" for key, value in overrides.items())
    shown = "it shows request_level with max_num_seqs=32, 2 images/s"
    assert notes == [f"the profile sd3.json is overruled by {told}; {shown}; to go by it, write {written}"]


def test_what_a_profile_does_not_show_overrules_nothing():
    rollout = config(batching_mode="auto", max_num_seqs=8)
    assert resolve_plan(rollout, BOTH, profile_of(rollout, {SERIAL: {1: 1.0}})).notes == ()
