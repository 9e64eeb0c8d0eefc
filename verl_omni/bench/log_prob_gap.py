"""How much the batch shape of a forward changes log-probs, by step: what rounding does to the ratio of a trainer.

Bursts are recorded; then the transformer runs again at the recorded latents, with 1 and with more rows in a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

RECORDED = "recorded"


async def log_prob_gap(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], rows: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Mean and largest |Δ log p| against a row alone, by what is compared with it and by step.

    Compared are the log-probs that the engine recorded, and those of forwards with each number of `rows`. `requests`
    ask for one image each, all with windows of the same width.
    """
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    found: dict[str, RolloutSample] = {}
    async for sample in engine.generate_all(requests):
        if isinstance(sample, RolloutError):
            raise sample
        found[sample.request_id] = sample
    samples = [found[request.request_id] for request in requests]
    latents = torch.cat([kept(sample.trajectory_latents) for sample in samples])
    steps = torch.tensor([list(range(*sample.sde_windows[0])) for sample in samples])

    async def again(count: int) -> Tensor:
        asked = [
            (prompt, OmniDiffusionSamplingParams(**knobs))
            for prompt, knobs in (request.to_engine() for request in requests)
        ]
        log_probs: Tensor = await engine.call_worker("rescore", asked, latents, count)
        return log_probs

    alone = await again(1)
    compared = {RECORDED: torch.cat([kept(sample.trajectory_log_probs) for sample in samples])}
    for count in rows:
        compared[str(count)] = await again(count)
    return {name: _by_step((log_probs - alone).abs(), steps) for name, log_probs in compared.items()}


def kept(tensor: Tensor | None) -> Tensor:
    """`tensor`, which a request with stochastic steps has."""
    if tensor is None:
        raise ValueError("nothing was recorded: the requests have no stochastic step")
    return tensor


def _by_step(gap: Tensor, steps: Tensor) -> dict[str, list[float]]:
    """Step → mean and largest of `gap` [N, W] where `steps` [N, W] is that step."""
    return {
        str(int(step)): [gap[steps == step].mean().item(), gap[steps == step].max().item()] for step in steps.unique()
    }
