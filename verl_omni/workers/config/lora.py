"""What can be said of a PEFT adapter and its scale without the model and without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

LORA_CONFIG, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MIN_LORA_SCALE = 1e-3
"""The engine keeps scales to three places: below this one it might take it for 0, which switches the LoRA off."""
_UNSUPPORTED = ("rank_pattern", "alpha_pattern")
"""PEFT options that the engine ignores, which would scale some modules wrongly."""
_ENDINGS = (".lora_A.weight", ".lora_B.weight")
_FLOATS = ("f", "bf")
"""How float dtypes start: float32, bfloat16 in torch, F32, BF16 in safetensors."""


class TensorLike(Protocol):
    """What of a LoRA weight is checked: a tensor has it, and so has its entry in a file's header."""

    @property
    def shape(self) -> Sequence[int]:
        """A: [r, in]; B: [out, r]; of a convolution with the kernel's after these."""

    @property
    def dtype(self) -> Any:
        """As torch or safetensors writes it."""


class _Header(NamedTuple):
    shape: Sequence[int]
    dtype: str


def is_lora_scale(scale: Any) -> bool:
    """Whether the engine applies a LoRA at this scale: a finite number, `MIN_LORA_SCALE` or more away from 0."""
    return _is_finite(scale) and abs(scale) >= MIN_LORA_SCALE


def read_lora_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json`` of the PEFT adapter in `folder`.

    Raises ValueError if a file is missing or can't be read, and as :func:`check_lora_adapter`. Reads no weights.
    Whether they fit a model, only the model can tell.
    """
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; name the one that holds {LORA_CONFIG}, such as global_step_N/lora"
        )
    for name in (LORA_CONFIG, LORA_WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; save the adapter with PEFT's save_pretrained(…)")
    try:
        config = json.loads((folder / LORA_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / LORA_CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / LORA_CONFIG} must hold an object")
    check_lora_adapter(config, _headers(folder / LORA_WEIGHTS), str(folder))
    return config


def check_lora_adapter(config: Mapping[str, Any], tensors: Mapping[str, TensorLike], source: str) -> None:
    """Raises ValueError for an option that the engine ignores, tensors that are none of a LoRA, not of a float dtype or
    not of the rank ``r``, and an ``r`` or ``lora_alpha`` that gives no scale.

    `source` is what messages call the adapter.
    """
    if ignored := [option for option in _UNSUPPORTED if config.get(option)]:
        raise ValueError(
            f"{source} uses {', '.join(ignored)}, which the engine ignores; train all modules with one rank and alpha"
        )
    if odd := [name for name in tensors if not name.endswith(_ENDINGS)]:
        raise ValueError(f"{source} holds {odd[0]}, which is no LoRA weight ({' or '.join(_ENDINGS)})")
    if not tensors:
        raise ValueError(f"{source} holds no weights")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"{source} has r={rank!r} in its config; r must be an integer of at least 1")
    if not _is_finite(alpha) or alpha <= 0:
        raise ValueError(f"{source} has lora_alpha={alpha!r} in its config; lora_alpha must be a finite number above 0")
    for name, tensor in tensors.items():
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        side = 0 if name.endswith(_ENDINGS[0]) else 1
        if len(shape) < 2 or shape[side] != rank:
            layout = ("[r, in]", "[out, r]")[side]
            raise ValueError(f"{source}: {name} has shape {shape}, which is not {layout} with r={rank} of its config")
        if not dtype.lower().startswith(_FLOATS):
            raise ValueError(f"{source}: {name} is of dtype {dtype}; save LoRA weights in a float dtype")


def _is_finite(value: Any) -> TypeGuard[float]:
    """Whether it is a number, no bool, that is finite as a float."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _headers(file: Path) -> dict[str, _Header]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as weights:  # headers need no framework; this one is light
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (not a mapping)
            return {name: _Header(part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
