"""What can be said of a PEFT adapter and its scale without the model and without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LORA_CONFIG, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MIN_LORA_SCALE = 1e-3
"""The engine keeps scales to three places: below this one it might take it for 0, which switches the LoRA off."""
_UNSUPPORTED = ("rank_pattern", "alpha_pattern")
"""PEFT options that the engine ignores, which would scale some modules wrongly."""
_ENDINGS = (".lora_A.weight", ".lora_B.weight")


def is_lora_scale(scale: float) -> bool:
    """Whether the engine applies a LoRA at this scale: finite, and `MIN_LORA_SCALE` or more away from 0."""
    return math.isfinite(scale) and abs(scale) >= MIN_LORA_SCALE


def read_lora_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json`` of the PEFT adapter in `folder`.

    Raises ValueError if a file is missing or can't be read, if the adapter has an option that the engine ignores, or if
    it holds anything but LoRA weights. Whether these fit a model, only the model can tell.
    """
    for name in (LORA_CONFIG, LORA_WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; save the adapter with PEFT's save_pretrained(…)")
    try:
        config = json.loads((folder / LORA_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / LORA_CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / LORA_CONFIG} must hold an object")
    check_lora_adapter(config, _tensor_names(folder / LORA_WEIGHTS), str(folder))
    return config


def check_lora_adapter(config: Mapping[str, Any], names: Iterable[str], source: str) -> None:
    """Raises ValueError for an option that the engine ignores, or tensor names that are not those of a LoRA.

    `source` is what messages call the adapter.
    """
    if ignored := [option for option in _UNSUPPORTED if config.get(option)]:
        raise ValueError(
            f"{source} uses {', '.join(ignored)}, which the engine ignores; train all modules with one rank and alpha"
        )
    names = list(names)
    if odd := [name for name in names if not name.endswith(_ENDINGS)]:
        raise ValueError(f"{source} holds {odd[0]}, which is no LoRA weight ({' or '.join(_ENDINGS)})")
    if not names:
        raise ValueError(f"{source} holds no weights")


def _tensor_names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as weights:  # the names need no framework; this one is light
            return list(weights.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
