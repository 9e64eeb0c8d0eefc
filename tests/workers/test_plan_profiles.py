"""What a measured profile makes of the plan: mode and cap follow it, and what does not match is not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.plans import ALL, BOTH, REQUEST, SENSIBLE, config, key_of, overridden, profile_of
from verl_omni.workers.rollout.asked import ROLLOUT
from verl_omni.workers.rollout.measured import MEMORY_SHARE, STILL_RISING, TIE
from verl_omni.workers.rollout.plan import PlanError, RolloutMode, RolloutPlan, resolve_plan
from verl_omni.workers.rollout.profile import ProfileFailure, ProfilePoint, RolloutProfile

STEPS, WHOLE, SERIAL = (mode.value for mode in RolloutMode)

AUTO = [
    ({STEPS: {8: 1.0}, WHOLE: {8: 2.0}}, 8, WHOLE, 8),
    ({STEPS: {8: 2.0}, WHOLE: {8: 1.0}}, 8, STEPS, 8),
    ({STEPS: {8: 1.0}, WHOLE: {8: 1 / (1 - TIE) - 1e-6}}, 8, STEPS, 8),
    ({STEPS: {8: 1.0}, WHOLE: {8: 1 / (1 - TIE) + 1e-6}}, 8, WHOLE, 8),
    ({STEPS: {8: 1.0}, WHOLE: {8: 1.0}, SERIAL: {1: 3.0}}, 8, SERIAL, 1),
    ({STEPS: {8: 1.0}, WHOLE: {16: 9.0}}, 8, STEPS, 8),
    ({WHOLE: {8: 9.0}}, 8, STEPS, 8),
    ({STEPS: {4: 1.0, 8: 1.96, 16: 2.0}, WHOLE: {4: 1.0}}, None, STEPS, 8),
    ({STEPS: {4: 1.0}, WHOLE: {4: 2.95, 8: 2.8, 16: 2.99, 32: 2.98}}, None, WHOLE, 4),
]


@pytest.mark.parametrize(("rates", "cap", "mode", "planned"), AUTO)
def test_auto_goes_by_the_profile(rates, cap, mode, planned):
    rollout = config(batching_mode="auto", max_num_seqs=cap)
    got = resolve_plan(rollout, BOTH, profile_of(rollout, rates))
    assert (got.mode.value, got.max_num_seqs) == (mode, planned), got.reason


def test_the_same_configuration_runs_in_another_mode_when_the_profile_says_otherwise():
    rollout = config(batching_mode="auto")
    first = {STEPS: {4: 1.0, 8: 2.0}, WHOLE: {4: 1.0, 8: 1.5}}
    second = {STEPS: {4: 1.0, 8: 1.5}, WHOLE: {4: 2.0, 8: 2.0}}
    plans = [resolve_plan(rollout, BOTH, profile_of(rollout, rates)) for rates in (first, second)]
    assert [(got.mode.value, got.max_num_seqs) for got in plans] == [(STEPS, 8), (WHOLE, 4)]
    assert "step_wise 2 images/s" in plans[0].reason and "step_wise is fastest" in plans[0].reason
    assert "request_level 2 images/s" in plans[1].reason and "request_level is fastest" in plans[1].reason


RATES = {2: 1.0, 4: 1.96, 8: 2.0, 16: 2.0}
PEAKS = {2: 10.0, 4: 20.0, 8: 40.0, 16: 80.0}
# keys of the configuration, log-prob micro-batch, GiB of the device → cap, part of the reason
CAPS: list[tuple[dict[str, Any], int | None, float | None, int, str]] = [
    ({}, None, None, 4, "4 is the smallest measured within 3% of the plateau"),
    ({}, 8, None, 8, "8 is the trainer's log-prob micro-batch, measured within 3% of the plateau"),
    ({}, 16, None, 16, "16 is the trainer's log-prob micro-batch"),
    ({}, 2, None, 4, "4 is the smallest measured"),  # too slow
    ({}, 5, None, 4, "4 is the smallest measured"),  # not measured
    ({"dtype": "float32"}, 8, None, 4, "4 is the smallest measured"),
    ({"engine_rows_per_forward": 2}, 8, None, 4, "4 is the smallest measured"),
    ({"engine_rows_per_forward": 8}, 8, None, 8, "8 is the trainer's log-prob micro-batch"),
    ({}, 16, 50.0, 4, "of the caps that fit the memory"),
    ({}, 8, 50.0, 8, "of the caps that fit the memory"),
    ({}, None, 15.0, 2, "2 is the smallest measured within 3% of the plateau of the caps that fit the memory"),
    ({}, 8, 5.0, 2, "2 is the smallest measured, and none fits the device's memory"),
    ({"max_num_seqs": 16}, 8, None, 16, "step_execution=true"),
]


@pytest.mark.parametrize(("keys", "micro", "memory", "cap", "reason"), CAPS)
def test_an_unset_cap_suits_the_speed_the_memory_and_the_trainer(keys, micro, memory, cap, reason):
    rollout = config(step_execution=True, **keys)
    profile = profile_of(rollout, {STEPS: RATES}, {STEPS: PEAKS})
    got = resolve_plan(rollout, BOTH, profile, micro, memory_gib=memory)
    assert got.max_num_seqs == cap
    assert reason in got.reason


@pytest.mark.parametrize(("memory", "fits"), [(10 / MEMORY_SHARE + 1e-6, True), (10 / MEMORY_SHARE - 1e-6, False)])
def test_a_share_of_the_memory_is_kept_free_and_a_note_says_where_it_is_not(memory, fits):
    for keys in ({}, {"max_num_seqs": 2}):
        rollout = config(batching_mode=STEPS, **keys)
        profile = profile_of(rollout, {STEPS: RATES}, {STEPS: PEAKS})
        got = resolve_plan(rollout, BOTH, profile, memory_gib=memory)
        assert got.max_num_seqs == 2
        notes = [note for note in got.notes if "a peak of 10 GiB was measured" in note]
        assert bool(notes) == (not fits)
        assert all(note.startswith("no measured cap fits") == (not keys) for note in notes)
        assert all(f"write a smaller {ROLLOUT}.max_num_seqs" in note for note in notes)


@pytest.mark.parametrize("unknown", [0.0, None])
def test_an_unknown_peak_fits_every_device(unknown):
    rollout = config(step_execution=True)
    points = [ProfilePoint(mode=STEPS, max_num_seqs=8, images_per_s=1.0, peak_memory_gib=unknown)]
    got = resolve_plan(rollout, BOTH, RolloutProfile(key=key_of(rollout), points=tuple(points)), memory_gib=1.0)
    assert (got.max_num_seqs, got.notes) == (8, ())


def test_auto_leaves_out_a_mode_that_does_not_fit_where_another_one_does():
    rollout = config(batching_mode="auto", max_num_seqs=8)
    rates = {STEPS: {8: 1.0}, WHOLE: {8: 2.0}, SERIAL: {1: 0.1}}
    profile = profile_of(rollout, rates, {STEPS: {8: 10.0}, WHOLE: {8: 60.0}})
    assert resolve_plan(rollout, BOTH, profile, memory_gib=80.0).mode is RolloutMode.REQUEST_LEVEL
    got = resolve_plan(rollout, BOTH, profile, memory_gib=60.0)
    assert got.mode is RolloutMode.STEP_WISE
    assert "request_level does not fit the device's memory" in got.reason
    assert got.notes == ()


def test_memory_alone_makes_no_run_serial():
    rollout = config(batching_mode="auto")
    rates = {STEPS: {8: 1.0}, WHOLE: {8: 2.0}, SERIAL: {1: 0.1}}
    profile = profile_of(rollout, rates, {STEPS: {8: 10.0}, WHOLE: {8: 60.0}})
    got = resolve_plan(rollout, BOTH, profile, memory_gib=5.0)
    assert (got.mode, got.max_num_seqs) == (RolloutMode.REQUEST_LEVEL, 8)
    assert "does not fit" not in got.reason
    assert len(got.notes) == 1


# images/s, caps that failed, the cap that is set → mode, part of the reason
FAILED: list[tuple[dict[str, dict[int, float]], dict[str, list[int]], int | None, str, str]] = [
    (
        {WHOLE: {8: 1.0}},
        {STEPS: [8]},
        None,
        WHOLE,
        "request_level is fastest; step_wise failed when it was to be measured",
    ),
    ({WHOLE: {8: 1.0}}, {STEPS: [8]}, 8, WHOLE, "step_wise failed"),
    ({WHOLE: {8: 1.0, 4: 1.0}}, {STEPS: [8]}, 4, STEPS, "auto: not measured at max_num_seqs=4, step_wise is preferred"),
    ({WHOLE: {8: 1.0}, STEPS: {4: 9.0}}, {STEPS: [8]}, None, STEPS, "step_wise is fastest"),
    ({WHOLE: {8: 1.0}, STEPS: {8: 9.0}}, {STEPS: [8]}, None, STEPS, "step_wise is fastest"),
    ({WHOLE: {8: 1.0}, STEPS: {4: 9.0}}, {STEPS: [8]}, 8, WHOLE, "request_level is fastest; step_wise failed"),
    ({WHOLE: {8: 1.0}, SERIAL: {1: 9.0}}, {STEPS: [8]}, None, SERIAL, "serial is fastest; step_wise failed"),
    ({SERIAL: {1: 9.0}}, {STEPS: [8]}, None, WHOLE, "auto: not measured, request_level is preferred; step_wise failed"),
    (
        {SERIAL: {1: 9.0}},
        {STEPS: [8], WHOLE: [8]},
        None,
        STEPS,
        "auto: not measured, step_wise is preferred; step_wise",
    ),
]


@pytest.mark.parametrize(("rates", "failed", "cap", "mode", "reason"), FAILED)
def test_auto_leaves_out_a_batching_mode_that_failed_when_it_was_to_be_measured(rates, failed, cap, mode, reason):
    rollout = config(batching_mode="auto", max_num_seqs=cap)
    failures = (ProfileFailure(mode=m, max_num_seqs=c, error="no room") for m, caps in failed.items() for c in caps)
    profile = replace(profile_of(rollout, rates), failed=tuple(failures))
    got = resolve_plan(rollout, BOTH, profile)
    assert (got.mode.value, reason in got.reason) == (mode, True), got.reason


def test_auto_compares_the_modes_at_the_caps_at_which_they_would_run():
    rollout = config(batching_mode="auto")
    rates = {STEPS: {4: 1.96, 8: 2.0}, WHOLE: {4: 1.93, 8: 1.93, 16: 1.93 / (1 - TIE)}}
    assert resolve_plan(rollout, BOTH, profile_of(rollout, rates)).max_num_seqs == 4
    got = resolve_plan(rollout, BOTH, profile_of(rollout, rates), 16)  # a cap of the second mode's plateau alone
    assert "step_wise 1.96 images/s, request_level 1.99 images/s" in got.reason
    rates[WHOLE][16] = 9.0
    got = resolve_plan(rollout, BOTH, profile_of(rollout, rates, {WHOLE: {16: 50.0}}), memory_gib=50.0)
    assert "step_wise 1.96 images/s, request_level 1.93 images/s" in got.reason


CAP = st.sampled_from([2, 4, 8, 16])
FIGURE = st.floats(1.0, 1.2).map(lambda value: round(value, 3))
BY_CAP = st.dictionaries(CAP, st.tuples(FIGURE, st.sampled_from([None, 0.0, 10.0, 40.0])), min_size=1)


@given(
    st.fixed_dictionaries({STEPS: BY_CAP, WHOLE: BY_CAP}),
    st.sampled_from([None, 5.0, 20.0, 100.0]),
    st.sampled_from([None, 1, 4, 8]),
    st.sampled_from(["bfloat16", "float32"]),
)
def test_auto_takes_the_measured_winner_at_a_cap_that_suits(figures, memory, micro, dtype):
    rollout = config(batching_mode="auto", dtype=dtype)
    rates = {mode: {cap: rate for cap, (rate, _) in caps.items()} for mode, caps in figures.items()}
    peaks = {mode: {cap: peak for cap, (_, peak) in caps.items() if peak is not None} for mode, caps in figures.items()}
    got = resolve_plan(rollout, BOTH, profile_of(rollout, rates, peaks), micro, memory_gib=memory)

    def expected_cap(mode: str) -> tuple[int, bool]:
        fitting = [cap for cap in rates[mode] if not memory or peaks[mode].get(cap, 0) <= MEMORY_SHARE * memory]
        plateau = [cap for cap in fitting if rates[mode][cap] >= (1 - TIE) * max(rates[mode][c] for c in fitting)]
        suiting = [cap for cap in plateau if cap == micro and dtype != "float32"]
        return min(suiting or plateau or rates[mode]), bool(fitting)

    caps = {mode: expected_cap(mode) for mode in rates}
    some = any(fits for _, fits in caps.values())
    running = {mode: rates[mode][cap] for mode, (cap, fits) in caps.items() if fits or not some}
    step_wise = running.get(STEPS, 0.0) >= (1 - TIE) * max(running.values())
    assert got.mode.value == (STEPS if step_wise else WHOLE)
    assert got.max_num_seqs == caps[got.mode.value][0]
    assert any("GiB was measured" in note for note in got.notes) == (not some)


# cap → images/s, caps that failed, log-prob micro-batch, GiB of the device → whether speed still rises
RISING: list[tuple[dict[int, float], list[int], int | None, float | None, bool]] = [
    ({4: 1.0, 8: 1 / (1 - TIE) + 1e-6}, [], None, None, True),
    ({4: 1.0, 8: 1 / (1 - TIE) - 1e-6}, [], None, None, False),
    ({4: 1.0, 8: 2.0}, [], 8, None, True),
    ({4: 1.0, 8: 2.0}, [16], None, None, False),
    ({4: 1.0, 8: 2.0}, [2], None, None, True),
    ({4: 1.0, 8: 2.0}, [], None, 5 / MEMORY_SHARE, False),  # 8 does not fit
    ({4: 3.0, 8: 1.0, 16: 2.0}, [], None, None, False),
    ({8: 2.0}, [], None, None, False),
]


@pytest.mark.parametrize(("rates", "failed", "micro", "memory", "rises"), RISING)
def test_where_speed_still_rises_at_the_largest_measured_cap_the_reason_says_so(rates, failed, micro, memory, rises):
    rollout = config(step_execution=True)
    failures = (ProfileFailure(mode=STEPS, max_num_seqs=cap, error="no room") for cap in failed)
    profile = profile_of(rollout, {STEPS: rates}, {STEPS: {cap: float(cap) for cap in rates}})
    got = resolve_plan(rollout, BOTH, replace(profile, failed=tuple(failures)), micro, memory_gib=memory)
    assert (f"is the largest measured; {STILL_RISING}" in got.reason) == rises
    assert ("plateau" in got.reason) == (not rises)
    if rises:
        assert got.max_num_seqs == max(rates)


def test_without_a_key_size_steps_and_dtype_are_compared_all_the_same():
    profile = profile_of(config(), {STEPS: {8: 1.0}})
    for keys in ({"pipeline": {"height": 256}}, {"pipeline": {"num_inference_steps": 4}}, {"dtype": "float32"}):
        assert "stale" in resolve_plan(config(step_execution=True, **keys), BOTH, profile).reason
    assert resolve_plan(config(step_execution=True), BOTH, profile).max_num_seqs == 8


def test_what_the_adapter_lacks_needs_no_measurement():
    rollout = config(batching_mode="auto")
    got = resolve_plan(rollout, REQUEST, profile_of(rollout, {WHOLE: {8: 1.0}}))
    assert (got.mode, got.max_num_seqs) == (RolloutMode.REQUEST_LEVEL, 8)
    assert "measured request_level 1 images/s" in got.reason


MODES = st.sampled_from(list(RolloutMode))
POINTS = st.lists(st.tuples(MODES, CAP, FIGURE, st.sampled_from([None, 10.0, 40.0])), min_size=1, max_size=8)


@given(
    st.fixed_dictionaries(SENSIBLE),
    st.sampled_from(ALL),
    POINTS,
    st.sampled_from([None, 5.0, 20.0]),
    st.sampled_from([None, 4, 8]),
    st.booleans(),
)
def test_with_any_profile_there_is_a_plan_or_an_error_that_leads_to_one(keys, adapter, points, memory, micro, stale):
    got: RolloutPlan | None = None
    for _ in range(5):  # both caps, both switches, mode against switch, mode against adapter, plan
        try:
            rollout = config(**keys)
            made = (
                ProfilePoint(
                    mode=m, max_num_seqs=1 if m is RolloutMode.SERIAL else k, images_per_s=r, peak_memory_gib=p
                )
                for m, k, r, p in points
            )
            profile = RolloutProfile(key=key_of(rollout), points=tuple(made))
            key = key_of(rollout, device="other") if stale else None
            got = resolve_plan(rollout, adapter, profile, micro, key=key, memory_gib=memory)
            break
        except PlanError as error:
            keys = overridden(keys, error)
    assert got is not None
    assert got.mode in adapter.modes
    assert got.max_num_seqs == 1 or got.mode is not RolloutMode.SERIAL
    assert "\n" not in got.log_line()
