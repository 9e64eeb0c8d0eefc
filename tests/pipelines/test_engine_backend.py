"""The schedulers' key and admission rule, driven by a clock of the test."""

from types import SimpleNamespace

import pytest
import torch
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched.interface import DiffusionRequestStatus
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_omni.pipelines.diffusion_rollout_output import rollout_output
from verl_omni.pipelines.engine_backend import (
    BURST_DEADLINE_S,
    BURST_QUIET_S,
    BurstTracker,
    RolloutDiffusionEngine,
    RolloutRequestScheduler,
    RolloutStepScheduler,
    is_rollout_adapter,
)

SCHEDULERS = [RolloutStepScheduler, RolloutRequestScheduler]


def request(request_id: str, burst: tuple[str, int] | None = None, **knobs) -> OmniDiffusionRequest:
    knobs = {"height": 64, "width": 64, "num_inference_steps": 4, "seed": 0} | knobs
    sampling = OmniDiffusionSamplingParams(**knobs)
    if burst is not None:
        sampling.extra_args["rollout_burst"] = burst
    return OmniDiffusionRequest(prompt={"prompt_token_ids": [1]}, sampling_params=sampling, request_id=request_id)


def scheduler(cls, max_num_seqs: int = 8, max_wait_ms: float = 0.0):
    made = cls()
    made.initialize(SimpleNamespace(max_num_seqs=max_num_seqs, request_batch_max_wait_ms=max_wait_ms))
    return made


def waits(made, *, now: float = 0.0, stable_since: float = 0.0) -> bool:
    """What the engine's loop decides on a wait that began at time 0."""
    decision = made.get_admission_wait_decision(now=0.0)
    return decision.should_wait and not made.should_end_admission_wait(decision, now=now, stable_since=stable_since)


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_requests_that_differ_in_their_own_knobs_share_a_batch(cls):
    made = scheduler(cls)
    knobs = [
        {},
        {"num_inference_steps": 7},
        {"true_cfg_scale": 3.0},
        {"guidance_scale": 2.0},
        {"cfg_normalize": True},
        {"num_outputs_per_prompt": 3},
        {"output_type": "latent", "max_sequence_length": 7},
        {"extra_args": {"noise_level": 0.1}},
    ]
    for i, own in enumerate(knobs):
        made.add_request(request(str(i), **own))
    assert made.schedule().num_scheduled_reqs == len(knobs)


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_a_queue_of_mixed_sizes_is_served_size_by_size(cls):
    made = scheduler(cls, max_num_seqs=4)
    for i in range(6):
        made.add_request(request(str(i), height=64 if i % 2 == 0 else 128))
    assert made.schedule().scheduled_request_ids == ["0", "2", "4"]
    made.add_request(request("6"))
    assert set(made.schedule().scheduled_request_ids) == {"0", "2", "4", "6"}
    made.finish_requests(["0", "2", "4", "6"], DiffusionRequestStatus.FINISHED_COMPLETED)
    assert made.schedule().scheduled_request_ids == ["1", "3", "5"]


@pytest.mark.parametrize("cls", SCHEDULERS)
@pytest.mark.parametrize("own", [{"height": 128}, {"width": 128}, {"lora": 2}, {"lora": 1, "lora_scale": 0.5}])
def test_requests_of_other_size_or_policy_do_not(cls, own):
    made = scheduler(cls)
    for i, knobs in enumerate([{"lora": 1} if "lora" in own else {}, own]):
        lora = {"lora_request": SimpleNamespace(lora_int_id=knobs["lora"])} if "lora" in knobs else {}
        made.add_request(request(str(i), **{name: value for name, value in knobs.items() if name != "lora"}, **lora))
    assert made.schedule().scheduled_request_ids == ["0"]


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_an_idle_engine_waits_until_the_burst_has_arrived(cls):
    made = scheduler(cls)
    assert not waits(made)
    for i in range(3):
        made.add_request(request(str(i), ("burst", 3)))
        assert waits(made) == (i < 2)
    assert made.schedule().num_scheduled_reqs == 3


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_a_full_batch_does_not_wait_for_the_rest_of_its_burst(cls):
    made = scheduler(cls, max_num_seqs=2)
    made.add_request(request("0", ("burst", 9)))
    assert waits(made)
    made.add_request(request("1", ("burst", 9)))
    assert not waits(made)


@pytest.mark.parametrize("cls", SCHEDULERS)
@pytest.mark.parametrize(
    ("now", "stable_since"), [(BURST_QUIET_S, 0.0), (BURST_DEADLINE_S, BURST_DEADLINE_S - BURST_QUIET_S / 2)]
)
def test_a_burst_that_stays_incomplete_is_given_up_for_good(cls, now: float, stable_since: float):
    made = scheduler(cls)
    made.add_request(request("0", ("burst", 3)))
    assert waits(made)
    assert not waits(made, now=now, stable_since=stable_since)
    made.schedule()
    made.finish_requests("0", made.get_request_state("0").status.FINISHED_COMPLETED)
    made.add_request(request("1", ("burst", 3)))
    assert not waits(made)


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_nothing_waits_beside_running_requests_or_without_a_burst(cls):
    made = scheduler(cls)
    made.add_request(request("0"))
    assert not waits(made)
    made.schedule()
    made.add_request(request("1", ("burst", 3)))
    assert not waits(made)


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_members_rejected_or_aborted_count_as_arrived(cls):
    made = scheduler(cls)
    made.add_request(request("0", ("burst", 3)))
    with pytest.raises(ValueError, match="already active"):
        made.add_request(request("0", ("burst", 3)))
    assert waits(made)
    made.add_request(request("1", ("burst", 3)))
    made.finish_requests("1", made.get_request_state("1").status.FINISHED_ABORTED)
    assert not waits(made)


def test_request_level_keeps_the_engines_own_wait_for_requests_without_a_burst():
    made = scheduler(RolloutRequestScheduler, max_wait_ms=100.0)
    made.add_request(request("0"))
    assert waits(made)
    assert not waits(made, now=0.1, stable_since=0.1)
    made.add_request(request("1", ("burst", 1)))
    assert not waits(made)


def test_the_step_scheduler_leaves_the_number_of_steps_to_the_adapter():
    made = scheduler(RolloutStepScheduler)
    for i, steps in enumerate([None, 0, -1, "ten"]):
        made.add_request(request(str(i), num_inference_steps=steps))
    assert made.schedule().num_scheduled_reqs == 4


def test_the_tracker_forgets_old_bursts():
    tracker = BurstTracker()
    for i in range(1000):
        tracker.arrived((str(i), 2))
    assert tracker.incomplete([("999", 2)]) and not tracker.incomplete([("0", 2)])
    assert len(tracker._missing) < 1000


@pytest.mark.parametrize(
    ("ours", "wait_ms", "told"), [(True, 1500.0, {"queue_wait_s": 1.5}), (True, None, {}), (False, 1500.0, {})]
)
def test_a_rollout_tells_its_wait_if_it_is_known_and_other_pipelines_are_left_alone(ours, wait_ms, told, monkeypatch):
    monkeypatch.setattr(DiffusionEngine, "postprocess_output", lambda self, request, output: [output])
    engine = object.__new__(RolloutDiffusionEngine)
    engine._rollout = ours
    asked = request("a")
    asked.scheduler_queue_wait_ms = wait_ms
    output = rollout_output(media=torch.zeros(1, 3, 8, 8), rl={"seed": 7})
    assert engine.postprocess_output(asked, output) == [output]
    assert output.output["metadata"]["rl"] == {"seed": 7, **told}


def test_only_our_adapters_are_treated_as_such():
    ours = "verl_omni.pipelines.qwen_image.rollout.QwenImageRollout"
    stock = "vllm_omni.diffusion.models.qwen_image.QwenImagePipeline"
    assert is_rollout_adapter(SimpleNamespace(custom_pipeline_args={"pipeline_class": ours}))
    assert not is_rollout_adapter(SimpleNamespace(custom_pipeline_args={"pipeline_class": stock}))
    assert not is_rollout_adapter(SimpleNamespace(custom_pipeline_args=None))
