"""How much the batch shape of a forward changes log-probs, by step: what rounding does to the ratio of a trainer.

Bursts are recorded; then the transformer runs again at the recorded latents, with 1 and with more rows in a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import torch
from torch import Tensor

from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

RECORDED = "recorded"


async def log_prob_gap(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], rows: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Mean and largest |Δ log p| against a row alone, by what is compared with it and by step.

    Compared are the log-probs that the engine recorded, and those of forwards with each number of `rows`, which divides
    the number of `requests`. These ask for one image each, with windows of the same width. The engine's statistics are
    reset.

    Raises RuntimeError if the engine split the forwards, so that they had another number of rows.
    """
    found: dict[str, RolloutSample] = {}
    async with aclosing(engine.generate_all(requests)) as results:
        async for sample in results:
            if isinstance(sample, RolloutError):
                raise sample
            found[sample.request_id] = sample
    samples = [found[request.request_id] for request in requests]
    latents = torch.cat([required(sample.trajectory_latents) for sample in samples])
    steps = torch.tensor([list(range(*sample.sde_windows[0])) for sample in samples])

    alone = await _again(engine, requests, latents, 1)
    compared = {RECORDED: torch.cat([required(sample.trajectory_log_probs) for sample in samples])}
    for count in rows:
        compared[str(count)] = await _again(engine, requests, latents, count)
    return {name: _by_step((log_probs - alone).abs(), steps) for name, log_probs in compared.items()}


async def _again(engine: RolloutEngine, requests: Sequence[RolloutRequest], latents: Tensor, rows: int) -> Tensor:
    """Log-probs [N, W] of `requests` at their recorded `latents` [N, W+1, ...], from forwards with `rows` rows."""
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    asked = [
        (prompt, OmniDiffusionSamplingParams(**knobs))
        for prompt, knobs in (request.to_engine() for request in requests)
    ]
    await engine.stats(reset=True)
    log_probs: Tensor = await engine.call_worker("rescore", asked, latents, rows)
    ran = dict((await engine.stats(reset=True)).batch_sizes)
    if ran != {rows: log_probs.numel() // rows}:
        raise RuntimeError(
            f"log-probs of forwards with {rows} rows were asked for, but the engine ran {ran} (rows: forwards), for "
            "want of memory or by the lengths of the texts; write smaller numbers after --log-prob-gap"
        )
    return log_probs


def required(tensor: Tensor | None) -> Tensor:
    """`tensor`, which a request with stochastic steps has."""
    if tensor is None:
        raise ValueError("nothing was recorded: the requests have no stochastic step")
    return tensor


def _by_step(gap: Tensor, steps: Tensor) -> dict[str, list[float]]:
    """Step → mean and largest of `gap` [N, W] where `steps` [N, W] is that step."""
    return {
        str(int(step)): [gap[steps == step].mean().item(), gap[steps == step].max().item()] for step in steps.unique()
    }
