"""Configurations, adapters and profiles that the tests of the mode resolver share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from verl_omni.workers.config import DiffusionRolloutConfig, build
from verl_omni.workers.rollout.asked import ENGINE, ROLLOUT, PlanError
from verl_omni.workers.rollout.plan import AdapterCapabilities, RolloutPlan, resolve_plan
from verl_omni.workers.rollout.profile import ProfileKey, ProfilePoint, RolloutProfile


def adapter(*, step: bool, request: bool) -> AdapterCapabilities:
    missing = () if step else ("denoise_step", "post_decode")
    return AdapterCapabilities(name="Adapter", request_batch=request, missing_step_methods=missing)


BOTH, STEP, REQUEST, NEITHER = (
    adapter(step=s, request=r) for s, r in ((True, True), (True, False), (False, True), (False, False))
)
ALL = (BOTH, STEP, REQUEST, NEITHER)
SENSIBLE = {
    "batching_mode": st.sampled_from([None, "auto", "step_wise", "request_level", "serial"]),
    "step_execution": st.booleans(),
    "max_num_seqs": st.sampled_from([None, 1, 2, 8, "8"]),
    "engine_max_num_seqs": st.sampled_from([None, 1, 2, 8]),
    "engine_step_execution": st.sampled_from([None, True, False]),
    "engine_request_batch_max_wait_ms": st.sampled_from([None, 0, 5.0]),
    "engine_rows_per_forward": st.sampled_from([None, 1, 8]),
}
"""Values that each can be, of all keys that the plan reads; together they may contradict each other."""
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.integers(0, 9).map(str)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5
)
"""Whatever somebody may write after a key."""


def mapping_of(**keys: Any) -> dict[str, Any]:
    """What is under ``rollout``; `engine_<key>` goes under engine_kwargs.vllm_omni."""
    engine = {key.removeprefix("engine_"): keys.pop(key) for key in list(keys) if key.startswith("engine_")}
    return {**keys, "engine_kwargs": {"vllm_omni": engine}}


def config(**keys: Any) -> DiffusionRolloutConfig:
    """`keys` as in :func:`mapping_of`."""
    return build(DiffusionRolloutConfig, mapping_of(**keys), ROLLOUT)


def plan(capabilities: AdapterCapabilities, **keys: Any) -> RolloutPlan:
    return resolve_plan(config(**keys), capabilities)


def overridden(keys: dict[str, Any], error: PlanError) -> dict[str, Any]:
    """`keys` after what the error says to write."""
    for override in error.overrides:
        key, value = override.split("=")
        place = "engine_" if key.startswith(ENGINE) else ""
        key = place + key.rpartition(".")[2]
        keys = {**keys, key: None if value == "null" else value}
    return keys


def key_of(rollout: DiffusionRolloutConfig, **changes: Any) -> ProfileKey:
    """Of a run of the model "m", of which nothing is known, on the CPU."""
    return replace(ProfileKey.of(rollout, model="m", device="cpu", cfg=True), **changes)


def profile_of(
    rollout: DiffusionRolloutConfig,
    rates: dict[str, dict[int, float]],
    memory: dict[str, dict[int, float]] | None = None,
) -> RolloutProfile:
    """`rates`: mode → cap → images/s; `memory` likewise, GiB."""
    points = (
        ProfilePoint(
            mode=mode, max_num_seqs=cap, images_per_s=rate, peak_memory_gib=(memory or {}).get(mode, {}).get(cap)
        )
        for mode, by_cap in rates.items()
        for cap, rate in by_cap.items()
    )
    return RolloutProfile(key=key_of(rollout), points=tuple(points))
