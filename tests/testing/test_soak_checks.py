"""Each check of the soak can fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.testing.soak_samples import REQUEST, flight, sample
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.testing.soak import checks
from verl_omni.testing.soak.checks import CANCELLED
from verl_omni.testing.soak.workload import Job
from verl_omni.workers.rollout.request import RolloutError

GOOD = [
    flight(sample()),
    flight(RolloutError("r", "height=63, width=32 must be multiples of 16"), fault="odd height"),
    flight(sample(), fault="scarce"),
    flight(RolloutError("r", "aborted"), stopped=True),
    flight(CANCELLED, stopped=True),
    flight(sample(), stopped=True),
    flight(RolloutError("r", "the engine died, start another"), killed=True),
    flight(RolloutError("r", "the engine is asleep; call wake_up() first"), slept=True),
]
BAD = {
    "ended 0 times": flight(),
    "ended 2 times": flight(sample(), sample()),
    "succeeded with the fault": flight(sample(), fault="odd height"),
    "got the sample of x": flight(sample(request_id="x")),
    "is no RolloutError": flight(KeyError("x")),
    "names request 'x'": flight(RolloutError("x", "height=63 must be multiples of 16"), fault="odd height"),
    "does not tell the fault": flight(RolloutError("r", "something"), fault="odd height"),
    "aborted, which nobody asked for": flight(RolloutError("r", "aborted")),
    "cancelled, which nobody asked for": flight(CANCELLED),
    "failed: request 'r': the engine died": flight(RolloutError("r", "the engine died")),
    "failed: request 'r': the engine is asleep": flight(RolloutError("r", "the engine is asleep")),
    "failed: request 'r': out of": flight(RolloutError("r", "out of luck"), fault="scarce"),
}


@pytest.mark.parametrize("good", GOOD)
def test_a_request_that_ends_as_it_has_to_passes(good):
    assert not list(checks.check_end(good))


@pytest.mark.parametrize("message", BAD)
def test_a_request_that_ends_otherwise_is_told(message):
    (line,) = checks.check_end(BAD[message])
    assert message in line


def test_only_what_ended_with_the_engine_is_retried():
    assert [checks.error_kind(good) for good in GOOD if good.to_retry] == ["died", "asleep"]
    assert not flight(RolloutError("r", "the engine died"), killed=True, stopped=True).to_retry


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_version": 2}, "made by policy 2"),
        ({"policy_version": 4}, "made by policy 4"),
        ({"images": torch.zeros(1, 3, 32, 32)}, "images"),
        ({"images": torch.zeros(2, 3, 32, 32, dtype=torch.uint8)}, "images"),
        ({"images": None}, "images are missing"),
        ({"trajectory_log_probs": torch.zeros(1, 1)}, "2 steps are recorded"),
        ({"trajectory_log_probs": None}, "2 steps are recorded"),
        ({"trajectory_latents": torch.full((1, 3, 4, 8), float("nan"))}, "trajectory_latents is not finite"),
    ],
)
def test_a_sample_that_breaks_its_contract_is_told(changes, message):
    assert not list(checks.check_sample(flight(sample())))
    (line,) = checks.check_sample(flight(sample(**changes)))
    assert message in line


def test_latents_that_were_asked_for_are_checked_in_place_of_images():
    request = dataclasses.replace(REQUEST, output_type="latent")
    asked = dataclasses.replace(flight(sample()), job=Job(request=request))
    assert any("latents are missing" in line for line in checks.check_sample(asked))
    asked.outcomes = [sample(images=None, latents=torch.zeros(1, 4, 8))]
    assert not list(checks.check_sample(asked))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trajectory_latents": torch.full((1, 3, 4, 8), 2e-5)}, "trajectory_latents differs by 2e-05"),
        ({"trajectory_log_probs": torch.full((1, 2), float("nan"))}, "trajectory_log_probs differs by nan"),
        ({"images": torch.full((1, 3, 32, 32), 2, dtype=torch.uint8)}, "images differs by 2"),
        ({"prompt_embeddings": {"prompt_embeds": torch.zeros(6, 8)}}, "prompt_embeds is [6, 8] here and [5, 8] alone"),
        ({"trajectory_timesteps": None}, "trajectory_timesteps is missing"),
        ({"sde_windows": [(1, 3)]}, "sde_windows"),
        ({"seed": 2}, "seed is 2"),
    ],
)
def test_a_sample_that_is_not_that_of_the_solo_run_is_told(changes, message):
    assert not list(checks.check_solo("r", sample(trajectory_latents=torch.full((1, 3, 4, 8), 9e-6)), sample()))
    (line,) = checks.check_solo("r", sample(**changes), sample())
    assert message in line


def test_values_above_1_are_rounded_in_proportion():
    alone, *others = (sample(trajectory_log_probs=torch.full((1, 2), value)) for value in (8.0, 8.00007, 8.0001))
    assert [len(list(checks.check_solo("r", other, alone))) for other in others] == [0, 1]


def test_policies_that_are_the_same_or_not_what_they_were_are_told():
    here = {name: sample(images=None, latents=torch.full((1, 4), value)) for name, value in (("a", 1.0), ("b", 2.0))}
    assert not list(checks.check_policies(here, {"a": here["a"]}))
    (same,) = checks.check_policies({**here, "c": here["a"]}, {})
    assert "policies c and a give the same latents" in same
    assert any("made again" in line for line in checks.check_policies(here, {"a": here["b"]}))


def test_counters_that_miss_what_succeeded_are_told():
    stats = RolloutStats(batch_sizes={2: 3}, waves=1, encodes_requested=2, encodes_computed=1)
    assert not list(checks.check_stats(stats, [REQUEST] * 2))
    (rows,) = checks.check_stats(stats, [dataclasses.replace(REQUEST, num_outputs_per_prompt=3)])
    assert "counted 6 rows, but the successes alone took 9" in rows
    broken = {"waves": 0, "encodes_requested": 0, "encodes_computed": 3}
    for name, value in broken.items():
        assert list(checks.check_stats(dataclasses.replace(stats, **{name: value}), [REQUEST]))


def test_memory_that_grows_by_more_than_a_twentieth_is_told():
    flat = [900.0] * 3 + [1000.0] * 6 + [1050.0] * 3
    assert checks.quarters(flat) == [900, 1000, 1000, 1050] and not list(checks.check_memory("it", flat))
    (line,) = checks.check_memory("it", [*flat[:-1], 1051.0])
    assert "memory of it grows" in line
    assert checks.quarters(flat[:11]) == []
