"""What failed of many requests, in a line a reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from verl_omni.reward_loop.item import RewardError
from verl_omni.utils.text import one_line
from verl_omni.workers.rollout.request import RolloutError

MAX_TOLD = 8
"""Reasons, and prompts of each, that are named."""
_NUMBER = re.compile(r"0x[0-9a-f]+|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)


def by_reason(failures: Mapping[str, Exception], prompts: Mapping[str, str], unit: str) -> Iterator[str]:
    """Lines such as ``3 of 8 images of a.txt:1, a.txt:4: no memory``; the reason that most failed of comes first.

    `failures`: id of a request → why it failed; `prompts`: id of every request → name of its prompt, in the order in
    which they are told; `unit`: what to call requests, in the plural. Reasons that differ in their numbers alone are
    one, told with the numbers of the first. Beyond `MAX_TOLD`, prompts and reasons are counted.
    """
    failed: dict[tuple[str, str], list[str]] = {}
    for request_id in prompts:
        if request_id in failures:
            source, message = _reason(failures[request_id])
            failed.setdefault((source, _NUMBER.sub("0", message)), []).append(request_id)
    requests = Counter(prompts.values())
    most_first = sorted(failed.values(), key=len, reverse=True)
    for ids in most_first[:MAX_TOLD]:
        names = list(dict.fromkeys(prompts[request_id] for request_id in ids))
        total = sum(requests[name] for name in names)
        more = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
        reason = "".join(_reason(failures[ids[0]]))
        yield f"{len(ids)} of {total} {unit} of {', '.join(names[:MAX_TOLD])}{more}: {reason}"
    if rest := most_first[MAX_TOLD:]:
        yield f"{sum(map(len, rest))} more {unit}, for {len(rest)} other reasons"


def _reason(error: Exception) -> tuple[str, str]:
    """Who complains, and of what, on one line and without the request's id: what has one cause reads alike."""
    if isinstance(error, RolloutError):
        source, message = "", error.message
    elif isinstance(error, RewardError):
        source, message = f"reward scorer {error.scorer}: ", error.reason
    else:
        source, message = f"{type(error).__name__}: ", str(error)
    return source, one_line(message)
