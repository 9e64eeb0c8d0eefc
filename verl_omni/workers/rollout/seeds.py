"""Seeds of the rows of a rollout: a row's seed depends on where it stands in its step, on no worker or batch."""

from __future__ import annotations

_STRIDE = 1_000_003  # prime and above the rows of any step, so that steps that follow each other share no seed
_RANGE = 2**63 - 1  # what a torch generator takes


def request_seed(base: int | None, row: int, *, step: int = 1) -> int | None:
    """Seed of the `row`-th request of training step `step`, which counts from 1. None if `base` is None.

    ``((base + step - 1) * 1000003 + row) mod (2**63 - 1)``; `row` counts over the whole step. The adapter derives the
    seeds of a request's further images from its seed.
    """
    return None if base is None else ((base + step - 1) * _STRIDE + row) % _RANGE
