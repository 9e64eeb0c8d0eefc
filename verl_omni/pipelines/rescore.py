"""Log-probs of steps that were taken, from forwards of another batch shape: what a trainer would compute.

The log-prob that is recorded with a step hardly depends on the forward, as the step was drawn around its own mean. Only
a second forward at the same latents shows what rounding does to the policy's probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_omni.algorithms.flow_sde import sde_step
from verl_omni.pipelines.rows import rollout_of

if TYPE_CHECKING:
    from vllm_omni.diffusion.worker.utils import StepRequestState

    from verl_omni.pipelines.model_base import VllmOmniPipelineBase


def step_log_probs(
    pipeline: VllmOmniPipelineBase, states: Sequence[StepRequestState], before: Tensor, after: Tensor
) -> Tensor:
    """Log-probs [B] float32 of the steps from `before` to `after`, each [B, ...], of all rows of prepared `states`.

    Each state stands at its ``step_index``; its latents are overwritten.
    """
    counts = [len(rollout_of(state).rows) for state in states]
    for state, latents in zip(states, before.to(pipeline.device).split(counts), strict=True):
        rollout_of(state).latents = latents
    batch = pipeline.gather(states)
    velocity = pipeline.guided_velocity(batch)
    return sde_step(batch.latents, velocity, batch.coefficients, next_latents=after.to(pipeline.device)).log_prob


def rescore(
    pipeline: VllmOmniPipelineBase, states: Sequence[StepRequestState], latents: Tensor, *, rows: int
) -> Tensor:
    """Log-probs [N, W] float32 of recorded trajectories, with `rows` requests in a forward, on the host.

    Args:
        states: N requests of one image each, not prepared yet.
        latents: [N, W+1, ...] float32, what was recorded for them.
    """
    recorded = []
    for state in states:
        pipeline.prepare_encode(state)
        recorded.append([step for step, drawn in enumerate(rollout_of(state).rows[0].stochastic) if drawn])
    columns = []
    for k in range(latents.shape[1] - 1):
        for state, steps in zip(states, recorded, strict=True):
            state.step_index = steps[k]
        parts = [
            step_log_probs(pipeline, states[i : i + rows], latents[i : i + rows, k], latents[i : i + rows, k + 1])
            for i in range(0, len(states), rows)
        ]
        columns.append(torch.cat(parts))
    return torch.stack(columns, dim=1).cpu()
