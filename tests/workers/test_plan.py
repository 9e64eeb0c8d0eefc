"""The mode resolver: its whole table, its errors and what leads out of them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.plans import ALL, BOTH, JSON, NEITHER, REQUEST, SENSIBLE, STEP, config, mapping_of, overridden, plan
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig, build
from verl_omni.workers.config.base import field_names
from verl_omni.workers.config.rollout import PLAN_KEYS
from verl_omni.workers.rollout.asked import ROLLOUT
from verl_omni.workers.rollout.plan import (
    DEFAULT_MAX_NUM_SEQS,
    AdapterCapabilities,
    PlanError,
    RolloutMode,
    resolve_plan,
)

# batching_mode, step_execution, max_num_seqs, adapters → mode, cap
TABLE = [
    (None, True, 8, (BOTH, STEP), "step_wise", 8),
    (None, True, 1, (BOTH, STEP), "step_wise", 1),
    (None, True, None, (BOTH, STEP), "step_wise", DEFAULT_MAX_NUM_SEQS),
    (None, True, 8, (REQUEST, NEITHER), PlanError, None),
    (None, True, 1, (REQUEST, NEITHER), PlanError, None),
    (None, True, None, (REQUEST, NEITHER), PlanError, None),
    (None, False, 8, (BOTH, REQUEST), "request_level", 8),
    (None, False, 8, (STEP,), PlanError, None),
    (None, False, 8, (NEITHER,), "serial", 1),
    (None, False, 1, ALL, "serial", 1),
    (None, False, None, ALL, "serial", 1),
    ("step_wise", False, 8, (BOTH, STEP), "step_wise", 8),
    ("step_wise", True, None, (BOTH, STEP), "step_wise", DEFAULT_MAX_NUM_SEQS),
    ("step_wise", False, None, (REQUEST, NEITHER), PlanError, None),
    ("request_level", False, 8, (BOTH, REQUEST), "request_level", 8),
    ("request_level", False, None, (BOTH, REQUEST), "request_level", DEFAULT_MAX_NUM_SEQS),
    ("request_level", False, None, (STEP, NEITHER), PlanError, None),
    ("request_level", True, None, ALL, PlanError, None),
    ("serial", False, None, ALL, "serial", 1),
    ("serial", False, 1, ALL, "serial", 1),
    ("serial", False, 8, ALL, PlanError, None),
    ("serial", True, None, ALL, PlanError, None),
    ("auto", False, 8, (BOTH, STEP), "step_wise", 8),
    ("auto", False, None, (BOTH, STEP), "step_wise", DEFAULT_MAX_NUM_SEQS),
    ("auto", False, 8, (REQUEST,), "request_level", 8),
    ("auto", False, None, (NEITHER,), "serial", 1),
    ("auto", False, 8, (NEITHER,), "serial", 1),
    ("auto", True, 8, (BOTH, STEP), "step_wise", 8),
    ("auto", True, 8, (REQUEST, NEITHER), PlanError, None),
]


@pytest.mark.parametrize("place", ["rollout", "engine"])
@pytest.mark.parametrize(("batching_mode", "step", "cap", "adapters", "mode", "planned"), TABLE)
def test_table(batching_mode, step, cap, adapters, mode, planned, place):
    prefix = "" if place == "rollout" else "engine_"
    keys = {"batching_mode": batching_mode, f"{prefix}max_num_seqs": cap}
    keys |= {f"{prefix}step_execution": True} if step else {}
    for capabilities in adapters:
        if mode is PlanError:
            with pytest.raises(PlanError):
                plan(capabilities, **keys)
            continue
        got = plan(capabilities, **keys)
        assert (got.mode, got.max_num_seqs) == (RolloutMode(mode), planned)
        assert got.engine_kwargs() == {
            "step_execution": mode == "step_wise",
            "max_num_seqs": planned,
            "request_batch_max_wait_ms": 0.0,
        }
        line = got.log_line()
        assert "\n" not in line
        assert all(part in line for part in (mode, str(planned), got.reason))


def test_missing_step_methods_are_named_with_an_override_that_works():
    with pytest.raises(PlanError, match="denoise_step, post_decode") as error:
        plan(REQUEST, step_execution=True, max_num_seqs=4)
    assert f"{ROLLOUT}.batching_mode=request_level" in str(error.value)


def test_serial_fallback_is_noted():
    assert any("max_num_seqs=8 is not used" in note for note in plan(NEITHER, max_num_seqs=8).notes)
    assert plan(NEITHER).notes == ()


def test_explicit_false_in_the_engine_options_contradicts_step_wise():
    with pytest.raises(PlanError, match="step_execution=false"):
        plan(BOTH, batching_mode="step_wise", engine_step_execution=False)
    with pytest.raises(PlanError, match="contradict"):
        plan(BOTH, step_execution=True, engine_step_execution=False)
    assert plan(BOTH, batching_mode="auto", engine_step_execution=False).mode is RolloutMode.REQUEST_LEVEL
    assert plan(STEP, batching_mode="auto", engine_step_execution=False).mode is RolloutMode.SERIAL


@pytest.mark.parametrize("value", [0, -1, "0", "x", 2.5, "2.5", True, False, float("nan"), float("inf"), [8], {"k": 1}])
@pytest.mark.parametrize("key", ["max_num_seqs", "engine_max_num_seqs"])
def test_bad_caps_name_the_key_and_the_accepted_form(key, value):
    with pytest.raises(ConfigError, match=r"max_num_seqs=.* must be an integer of at least 1, or null for unset"):
        config(**{key: value})


def test_good_caps():
    assert plan(BOTH, max_num_seqs="8").max_num_seqs == 8
    assert plan(BOTH, engine_max_num_seqs=" 8 ").max_num_seqs == 8
    assert plan(BOTH, max_num_seqs=8, engine_max_num_seqs="8").max_num_seqs == 8
    assert plan(BOTH, max_num_seqs=None, engine_max_num_seqs=8).max_num_seqs == 8
    with pytest.raises(PlanError, match=r"max_num_seqs=8 .*max_num_seqs=4 contradict"):
        plan(BOTH, max_num_seqs=8, engine_max_num_seqs=4)


def test_misspelt_engine_key_names_the_right_one():
    with pytest.raises(ConfigError, match=r"engine_kwargs\.vllm_omni\.max_num_seq .*vllm_omni\.max_num_seqs\?"):
        config(engine_max_num_seq=8)


def test_wait_and_rows_are_passed_on():
    got = plan(BOTH, max_num_seqs=4, engine_request_batch_max_wait_ms="20", engine_rows_per_forward=3)
    assert (got.request_batch_max_wait_ms, got.rows_per_forward, got.notes) == (20.0, 3, ())
    got = plan(BOTH, step_execution=True, engine_request_batch_max_wait_ms=20)
    assert any("request_batch_max_wait_ms=20 has no effect" in note for note in got.notes)


def test_log_prob_micro_batch_is_compared_in_low_precision_only():
    rollout = config(max_num_seqs=16)
    assert any("clip ratio" in note for note in resolve_plan(rollout, BOTH, log_prob_micro_batch=4).notes)
    assert resolve_plan(rollout, BOTH, log_prob_micro_batch=16).notes == ()
    assert resolve_plan(config(max_num_seqs=16, dtype="float32"), BOTH, log_prob_micro_batch=4).notes == ()
    assert plan(BOTH, max_num_seqs=16, log_prob_micro_batch_size_per_gpu=4).notes
    assert plan(BOTH, max_num_seqs=16, engine_rows_per_forward=4, log_prob_micro_batch_size_per_gpu=4).notes == ()


def test_capabilities_are_read_off_the_class():
    step = {name: lambda *args: None for name in ("prepare_encode", "denoise_step", "step_scheduler", "post_decode")}
    full = type("Full", (), {**step, "supports_step_execution": True, "supports_request_batch": True})
    assert AdapterCapabilities.of(full) == AdapterCapabilities(name="Full", request_batch=True, missing_step_methods=())
    off = AdapterCapabilities.of(
        type("Off", (full,), {"supports_step_execution": False, "supports_request_batch": False})
    )
    assert off.modes == (RolloutMode.SERIAL,)
    part = AdapterCapabilities.of(type("Part", (full,), {"denoise_step": None}))
    assert part.missing_step_methods == ("denoise_step",)
    assert part.modes == (RolloutMode.REQUEST_LEVEL, RolloutMode.SERIAL)


ANYTHING = st.sampled_from([None, True, False, 0, 1, 8, -1, 2.5, "8", "true", "x", float("nan"), [], {}])


@given(st.fixed_dictionaries(dict.fromkeys(SENSIBLE, ANYTHING)), st.sampled_from(ALL))
def test_nothing_but_a_plan_or_an_error_with_a_remedy(keys, capabilities):
    problem: ConfigError | None = None
    try:
        plan(capabilities, **keys)
    except ConfigError as error:
        problem = error
    if isinstance(problem, PlanError):
        assert problem.overrides
        assert all(override in str(problem) for override in problem.overrides)
    elif problem is not None:
        assert ROLLOUT in str(problem)
        assert " must be " in str(problem)


@given(st.fixed_dictionaries(SENSIBLE), st.sampled_from(ALL))
def test_following_the_errors_leads_to_a_plan(keys, capabilities):
    for _ in range(5):  # both caps, both switches, mode against switch, mode against adapter, plan
        try:
            got = plan(capabilities, **keys)
        except PlanError as error:
            keys = overridden(keys, error)
            continue
        assert got.mode in capabilities.modes
        assert got.max_num_seqs == 1 or got.mode is not RolloutMode.SERIAL
        return
    raise AssertionError(f"no plan after four errors: {keys}")


def keys_of(cls: type, prefix: str = "") -> list[str]:
    """Dotted keys of a config class and of those in it, each with its parents."""
    hints, keys = typing.get_type_hints(cls), []
    for name in field_names(cls):
        inner = keys_of(hints[name], f"{prefix}{name}.") if dataclasses.is_dataclass(hints[name]) else []
        keys += [prefix + name, *inner]
    return keys


ENGINE_KEYS = ("engine_kwargs.vllm_omni", *(f"engine_kwargs.vllm_omni.{name}" for name in PLAN_KEYS))
REMEDY = re.compile(" must be | holds | need | is too long|did you mean|; known: |; write |; leave ")


@given(
    st.sampled_from([*keys_of(DiffusionRolloutConfig), *ENGINE_KEYS]),
    JSON,
    st.fixed_dictionaries(SENSIBLE),
    st.sampled_from(ALL),
)
def test_any_value_of_any_key_is_planned_or_refused_by_its_name(key, value, others, capabilities):
    place = mapping = mapping_of(**others)
    *parents, name = key.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[name] = value
    problem: ConfigError | None = None
    try:
        resolve_plan(build(DiffusionRolloutConfig, mapping, ROLLOUT), capabilities)
    except ConfigError as error:
        problem = error
    if isinstance(problem, PlanError):
        assert problem.overrides
    elif problem is not None:
        assert f"{ROLLOUT}.{key}" in str(problem)
        assert REMEDY.search(str(problem))


def test_planning_imports_neither_torch_nor_the_engine():
    code = (
        "import sys, verl_omni.workers.config, verl_omni.workers.rollout.plan, verl_omni.workers.rollout.engine_keys\n"
        "assert not {'torch', 'vllm', 'vllm_omni', 'ray', 'verl', 'hydra', 'omegaconf'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
