"""The ways in which a request of a soak is wrong, and how it must end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_omni.workers.rollout.request import RolloutRequest

PLANTED = "planted:"
"""A prompt that starts with this and the name of a fault brings it along; see ``adapters``."""
SCARCE_ROWS = 2
"""Rows of a forward that do not run out of memory while a request with the fault "scarce" is among them."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a request."""

    message: str | None
    """What its error says, a regular expression; None: it must succeed nevertheless."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """In place of the request's own; empty where the adapter plants the fault."""


FAULTS = {
    "no prompt": Fault(knobs={"prompt": None}, message="has no prompt"),
    "long prompt": Fault(knobs={"prompt": "word " * 200, "max_sequence_length": 16}, message="tokens.* above"),
    "odd height": Fault(knobs={"height": 63}, message="height=63.*multiples of"),
    "negative steps": Fault(knobs={"num_inference_steps": -1}, message="num_inference_steps=-1 must be at least 1"),
    "window": Fault(knobs={"sde_window_size": 5, "sde_window_range": (0, 3)}, message="sde_window_size=5 does not fit"),
    "seed": Fault(knobs={"seed": "seven"}, message="seed must be an integer"),
    "scale": Fault(knobs={"guidance_scale": float("nan")}, message="guidance_scale must be a finite number"),
    "tokenize": Fault(message="planted in tokenize"),
    "exit": Fault(message="raised SystemExit"),
    "embeds": Fault(message="."),
    "forward": Fault(message="planted in forward"),
    "step": Fault(message="planted in step"),
    "finish": Fault(message="planted in finish"),
    "nan": Fault(message="NaN or infinite"),
    "no memory": Fault(message="ran out of memory over one row alone"),
    "scarce": Fault(message=None),
}
"""Name → fault. Those without knobs are planted: see ``adapters``."""


def spoiled(request: RolloutRequest, name: str) -> RolloutRequest:
    """`request` with this fault."""
    fault = FAULTS[name]
    return dataclasses.replace(request, **(fault.knobs or {"prompt": f"{PLANTED}{name} {request.prompt}"}))


def planted_fault(text: object) -> str | None:
    """The planted fault that a prompt brings along; None if there is none."""
    if not isinstance(text, str) or not text.startswith(PLANTED):
        return None
    rest = text.removeprefix(PLANTED)
    return next((name for name, fault in FAULTS.items() if not fault.knobs and rest.startswith(f"{name} ")), None)
