"""From prompt rows to requests: n samples each, with ids and seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from verl_omni.trainer.prompts import PromptRow
from verl_omni.workers.config import DiffusionRolloutConfig
from verl_omni.workers.rollout.request import RolloutRequest
from verl_omni.workers.rollout.seeds import request_seed

_NEGATIVE = ("negative_prompt", "negative_prompt_token_ids")


def request_id(row: int, sample: int) -> str:
    """``0003-01``."""
    return f"{row:04d}-{sample:02d}"


def make_requests(
    rows: Sequence[PromptRow],
    rollout: DiffusionRolloutConfig,
    *,
    negative_prompt: str | None = None,
    step: int = 1,
    make_id: Callable[[int, int], str] = request_id,
) -> list[RolloutRequest]:
    """`rollout.n` requests a row, rows in order and samples of a row together.

    What a row sets takes the place of the default in `rollout.pipeline` and `rollout.algo`, null included. `make_id`
    gives the id from row and sample, both from 0. The seed is :func:`request_seed` of ``row * n + sample`` in `step`; a
    seed that the row sets is that of its sample 0, in every step, and sample k has k more. `negative_prompt` is that of
    rows that give none.
    """
    defaults = {**asdict(rollout.pipeline), **asdict(rollout.algo)}
    requests = []
    for index, row in enumerate(rows):
        values = {**defaults, **row.values}
        if not any(key in row.values for key in _NEGATIVE):
            values["negative_prompt"] = negative_prompt
        for sample in range(rollout.n):
            values["seed"] = request_seed(rollout.seed, index * rollout.n + sample, step=step)
            if "seed" in row.values:
                values["seed"] = _own_seed(row.values["seed"], sample)
            requests.append(RolloutRequest(request_id=make_id(index, sample), **values))
    return requests


def _own_seed(seed: Any, sample: int) -> Any:
    """The seed of a row's `sample`-th sample; what is no integer is left to the adapter to reject."""
    return seed + sample if isinstance(seed, int) and not isinstance(seed, bool) else seed
