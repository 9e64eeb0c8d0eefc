"""Requests together, and each alone where that fails: a fault of one is not the others'."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from verl_omni.pipelines.hooks import contained
from verl_omni.pipelines.memory import give_back
from verl_omni.pipelines.rows import rollout_of

if TYPE_CHECKING:
    from vllm_omni.diffusion.worker.utils import StepRequestState

logger = logging.getLogger(__name__)

T = TypeVar("T")


def together(
    states: Sequence[StepRequestState],
    run: Callable[[Sequence[StepRequestState]], T],
    what: str,
    *,
    device: torch.device,
    repeats: bool = True,
) -> list[T | None]:
    """``[run(states)]``, or where that fails what `run` gives for each of them alone, None for those that fail again.

    The error is kept on the rollout that it belongs to; on all of them if nothing may be repeated. `what` is done, for
    the log.
    """
    try:
        with contained():
            return [run(states)]
    except Exception as error:
        if len(states) == 1 or not repeats:
            for state in states:
                logger.error("%s of request %s failed", what, state.request_id, exc_info=error)
                rollout_of(state).error = error
            return [None] * len(states)
        logger.warning("%s of %d requests failed, trying each alone: %s", what, len(states), error)
    give_back(device)  # the error is gone by now, and with it the tensors that its traceback held
    return [part for state in states for part in together([state], run, what, device=device)]
