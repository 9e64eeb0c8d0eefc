"""Policies to load into an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_lora(
    folder: Path,
    transformer: Mapping[str, torch.Tensor],
    seed: int,
    leaves: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0"),
) -> Path:
    """A PEFT adapter of rank 4 with random weights on these layers of the checkpoint's transformer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in transformer.items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and module.endswith(leaves):
            for half, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4))):
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": sorted(leaves)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
