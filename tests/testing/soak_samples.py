"""What the tests of the soak share: a request, its sample, and how it may end."""

from __future__ import annotations

import dataclasses

import torch

from verl_omni.testing.soak.checks import Flight
from verl_omni.testing.soak.faults import spoiled
from verl_omni.testing.soak.workload import Job
from verl_omni.workers.rollout.request import RolloutRequest, RolloutSample

REQUEST = RolloutRequest(
    request_id="r",
    prompt="a boat",
    height=32,
    width=32,
    num_inference_steps=3,
    noise_level=0.7,
    sde_type="sde",
    seed=1,
)


def sample(**changes) -> RolloutSample:
    made = RolloutSample(
        request_id="r",
        images=torch.zeros(1, 3, 32, 32, dtype=torch.uint8),
        latents=None,
        trajectory_latents=torch.zeros(1, 3, 4, 8),
        trajectory_log_probs=torch.zeros(1, 2),
        trajectory_timesteps=torch.tensor([[900.0, 500.0]]),
        prompt_embeddings={"prompt_embeds": torch.zeros(5, 8)},
        sde_windows=[(0, 2)],
        seed=1,
        policy_version=3,
        peak_memory_mb=0.0,
        queue_wait_s=0.0,
    )
    return dataclasses.replace(made, **changes)


def flight(*outcomes, fault=None, **changes) -> Flight:
    request = REQUEST if fault is None else spoiled(REQUEST, fault)
    made = Flight(job=Job(request=request, fault=fault), low=3, high=3, outcomes=list(outcomes))
    return dataclasses.replace(made, **changes)
