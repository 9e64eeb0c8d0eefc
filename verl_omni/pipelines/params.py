"""What one request asks of an adapter: read from the engine's sampling parameters, checked, frozen.

Every knob belongs to the request. A value that cannot be served raises :class:`RequestError`, which ends this request
and no other.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_omni.algorithms.flow_sde import SDE_TYPES

if TYPE_CHECKING:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

OUTPUT_TYPES = ("pt", "latent")
MAX_STEPS, MAX_OUTPUTS, MAX_EDGE = 1000, 128, 8192
"""Most steps, images a request, and pixels an edge: far above use, so that a slip of the pen exhausts nothing."""
ENCODERS = ("", "_2", "_3")
"""Suffixes of the prompt keys of a model's first, second and third text encoder."""


class RequestError(ValueError):
    """A request asks for what cannot be served; the message says what to write instead."""


def plain(name: str, value: Any) -> Any:
    """`value` of the knob `name` in Python's own types: a number of torch or numpy becomes one of Python.

    Raises :class:`RequestError` for what the engine could not copy and compare before the adapter checks it.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [plain(name, item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1:
        return value.item()
    raise RequestError(f"{name} must be a number, text, or a list of them, got a {type(value).__name__}")


@dataclass(frozen=True, kw_only=True)
class RolloutParams:
    """The sampling knobs of one request."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    num_inference_steps: int
    num_outputs: int
    """Rows (images) of this request."""
    seed: int
    """Seed of row 0; the other rows' seeds follow from it."""
    cfg_scale: float
    """Classifier-free guidance is on when this is above 1 and a negative prompt is given."""
    max_sequence_length: int
    """Limit on text tokens."""
    output_type: str
    """"pt": uint8 pixels; "latent": the final latents, undecoded."""
    noise_level: float
    sde_type: str
    sde_window_size: int | None
    sde_window_range: tuple[int, int] | None
    logprobs: bool
    """Record latents, log-probs and timesteps of the stochastic steps."""

    @classmethod
    def read(
        cls,
        sampling: OmniDiffusionSamplingParams,
        *,
        cfg_key: str,
        default_size: int,
        default_steps: int,
        default_cfg_scale: float,
        text_limit: int,
        default_text_length: int,
    ) -> RolloutParams:
        """Read and check `sampling`; the keywords are the adapter's. Raises :class:`RequestError`."""
        extra = sampling.extra_args or {}
        cfg_scale = getattr(sampling, cfg_key)
        if cfg_key == "guidance_scale" and not sampling.guidance_scale_provided:
            cfg_scale = None
        limit = _integer("max_sequence_length", sampling.max_sequence_length, default_text_length, low=1)
        if limit > text_limit:
            raise RequestError(f"max_sequence_length={limit} is above this model's limit of {text_limit}")
        noise_level = check_number("noise_level", extra.get("noise_level"), 0.7, low=0.0)
        sde_type = _one_of("sde_type", extra.get("sde_type"), "sde", SDE_TYPES)
        if sde_type == "cps" and noise_level > 1:
            raise RequestError(f"noise_level={noise_level} is above 1, which sde_type='cps' does not define")
        for name in ("sigmas", "timesteps", "latents"):
            if getattr(sampling, name) is not None:
                raise RequestError(f"{name} is not supported in rollouts: they follow from the request's other knobs")
        window_size, window_range = _optional_size(extra.get("sde_window_size")), _range(extra.get("sde_window_range"))
        if window_range is not None and window_size is None:
            raise RequestError("sde_window_range is given without sde_window_size; give both or neither")
        return cls(
            height=_integer("height", sampling.height, default_size, low=1, high=MAX_EDGE),
            width=_integer("width", sampling.width, default_size, low=1, high=MAX_EDGE),
            num_inference_steps=_integer(
                "num_inference_steps", sampling.num_inference_steps, default_steps, low=1, high=MAX_STEPS
            ),
            num_outputs=_integer("num_outputs_per_prompt", sampling.num_outputs_per_prompt, 1, low=1, high=MAX_OUTPUTS),
            seed=_integer("seed", sampling.seed, None, low=0, high=2**63 - 1),
            cfg_scale=check_number(cfg_key, cfg_scale, default_cfg_scale),
            max_sequence_length=limit,
            output_type=_one_of("output_type", sampling.output_type, "pt", OUTPUT_TYPES),
            noise_level=noise_level,
            sde_type=sde_type,
            sde_window_size=window_size,
            sde_window_range=window_range,
            logprobs=_flag("logprobs", extra.get("logprobs", True)),
        )


def check_token_ids(name: str, ids: Sequence[int], encoder: Any) -> None:
    """Raises :class:`RequestError` for `ids` that a text `encoder` of transformers does not know.

    On a GPU its lookup of one would leave the device unusable for all requests.
    """
    embeddings = encoder.get_input_embeddings() if hasattr(encoder, "get_input_embeddings") else None
    known: int | None = getattr(embeddings, "num_embeddings", None)
    if known is not None and (unknown := [token for token in ids if not 0 <= token < known]):
        raise RequestError(
            f"{name} holds {unknown[0]}, but the text encoder knows 0 to {known - 1}; use the model's own tokenizer"
        )


def prompt_ids(prompt: Mapping[str, Any], *, negative: bool, encoder: str = "") -> tuple[int, ...] | None:
    """Token ids of one encoder as the request gives them, mask applied; None when it gives none.

    Accepts a list, a 1-D tensor or a [1, L] tensor; a mask of the same length picks the valid tokens. `encoder` is one
    of :data:`ENCODERS`. Raises :class:`RequestError`.
    """
    side = "negative_prompt" if negative else "prompt"
    key, ids = _first(prompt, f"{side}_token_ids{encoder}", f"{side}_ids{encoder}")
    _, mask = _first(prompt, f"{side}_mask{encoder}", f"{side}_attention_mask{encoder}")
    if ids is None:
        if mask is not None:
            raise RequestError(f"{side}_mask{encoder} is given without {key}; leave it out, text has no mask")
        return None
    flat = _flat(key, ids)
    if mask is not None:
        keep = _flat(f"{side}_mask{encoder}", mask)
        if len(keep) != len(flat):
            raise RequestError(f"{side}_mask{encoder} has {len(keep)} entries for the {len(flat)} tokens of {key}")
        flat = [token for token, valid in zip(flat, keep, strict=True) if valid]
    if not flat:
        raise RequestError(f"{key} holds no valid token; give at least one, or leave the key out")
    return tuple(flat)


def prompt_text(prompt: Mapping[str, Any], *, negative: bool) -> str | None:
    """The request's text; None when it gives none. Raises :class:`RequestError` if it is no string of Unicode text."""
    key = "negative_prompt" if negative else "prompt"
    text = prompt.get(key)
    if text is not None and not isinstance(text, str):
        raise RequestError(f"{key} must be a string, got {type(text).__name__}; token ids go into {key}_token_ids")
    if text is not None and (half := re.search("[\ud800-\udfff]", text)):
        raise RequestError(f"{key} is no valid text: it holds {half[0]!r}, half of a character; remove it")
    return text


def as_prompt(prompt: object) -> Mapping[str, Any]:
    """The engine's prompt (text or mapping) as a mapping. Raises :class:`RequestError`."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        nested = prompt.get("additional_information")
        return {**nested, **prompt} if isinstance(nested, Mapping) else prompt
    raise RequestError(f"the prompt must be a string or a mapping, got {type(prompt).__name__}")


def _first(prompt: Mapping[str, Any], *keys: str) -> tuple[str, Any]:
    return next(((key, prompt[key]) for key in keys if prompt.get(key) is not None), (keys[0], None))


def _flat(key: str, value: Any) -> list[int]:
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, (list, tuple)) and len(items) == 1 and isinstance(items[0], (list, tuple)):
        items = items[0]
    if not isinstance(items, (list, tuple)) or not all(hasattr(item, "__index__") for item in items):
        raise RequestError(f"{key} must be one row of integers (a list, a 1-D or a [1, L] tensor)")
    return [operator.index(item) for item in items]


def _integer(name: str, value: Any, default: int | None, *, low: int, high: int | None = None) -> int:
    if value is None:
        value = default
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(f"{name} must be an integer, got {value!r}")
    number = operator.index(value)
    if number < low:
        raise RequestError(f"{name}={number} must be at least {low}")
    if high is not None and number > high:
        raise RequestError(f"{name}={number} must be at most {high}")
    return number


def check_number(name: str, value: Any, default: float, *, low: float = -math.inf) -> float:
    """`value`, or `default` for None. Raises :class:`RequestError` if it is no finite number of at least `low`."""
    if value is None:
        return default
    must = f"{name} must be a finite number{'' if low == -math.inf else f' of at least {low:g}'}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{must}, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        raise RequestError(f"{must}, got an integer that no float holds") from None
    if not math.isfinite(number) or number < low:
        raise RequestError(f"{must}, got {value!r}")
    return number


def _one_of(name: str, value: Any, default: str, choices: tuple[str, ...]) -> str:
    if value is None:
        return default
    if value not in choices:
        raise RequestError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")
    return value


def _flag(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return value is not False
    raise RequestError(f"{name} must be true or false, got {value!r}")


def _optional_size(value: Any) -> int | None:
    return None if value is None else _integer("sde_window_size", value, None, low=0)


def _range(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes, Mapping, Set)) or not hasattr(value, "__len__") or len(value) != 2:
        raise RequestError(f"sde_window_range must be two integers [lo, hi], got {value!r}")
    lo, hi = (_integer("sde_window_range", bound, None, low=0) for bound in value)
    return lo, hi
