"""The command that measures the profile of a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from verl_omni.workers.rollout.profile_key import DEFAULT_ATTENTION, ProfileKey

USUAL_GUIDANCE = 4.0
"""A scale for runs that leave it to the adapter; how large it is does not matter to the speed."""
_TEXT = 64
"""Tokens of the bench's prompts, unless it is told otherwise."""


def bench_command(key: ProfileKey, *, guidance: float | None = None) -> str:
    """The command for a profile with `key`, where this process runs. Of the model's folder it knows the name alone.

    `guidance` is the run's scale; None: unknown. What the command cannot ask for is in :func:`beyond_bench`.
    """
    return " ".join(["python -m verl_omni.bench", f"…/{shlex.quote(key.model)}", *_options(key, guidance)])


def beyond_bench(key: ProfileKey) -> tuple[str, ...]:
    """The parts of `key` that the bench has in one way only, or not at all: "name=value"."""
    unset = [name for name in ("height", "width", "num_inference_steps") if getattr(key, name) is None]
    told = [f"{name}=null" for name in unset]
    if key.num_inference_steps == 1:
        told.append("num_inference_steps=1")
    if key.output_type != "pt":
        told.append(f"output_type={key.output_type or 'null'}")
    if " " in key.attention:
        told.append(f"attention={key.attention}")
    return tuple(told)


def _options(key: ProfileKey, guidance: float | None) -> Iterator[str]:
    if key.height is not None and key.width is not None:
        yield f"--size {key.height}" + (f" {key.width}" if key.width != key.height else "")
    if (key.num_inference_steps or 0) > 1:
        yield f"--steps {key.num_inference_steps}"
    yield f"--cfg {guidance or USUAL_GUIDANCE:g}" if key.cfg else "--cfg 1"
    if key.max_sequence_length is not None:
        yield f"--max-sequence-length {key.max_sequence_length}"
        if key.max_sequence_length < _TEXT:
            yield f"--text {key.max_sequence_length}"
    if key.lora_rank > 0:
        yield f"--lora-rank {key.lora_rank}" + (" --merge-lora" if key.lora_merged else "")
    if key.dtype != ("float32" if key.device == "cpu" else "bfloat16"):
        yield f"--dtype {key.dtype}"
    if key.device != "cpu" and not key.compiled:
        yield "--eager"
    attention = key.attention.split()[0]
    if attention != DEFAULT_ATTENTION:
        yield f"--attention {shlex.quote(attention)}"
    if key.engine_options:
        yield f"--engine {shlex.quote(json.dumps(key.engine_options, sort_keys=True))}"
    yield "--profile FILE.json"
