"""A random LoRA on the linear layers of a transformer's blocks, for its cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl_omni.workers.rollout.staging import LoraAdapter

_MODULATION = ("norm", "_mod.")
"""In the names of layers that make the modulation, which the engine adapts in some models only."""
_B_STD = 1e-3
"""Small, so that activations stay finite."""


def empty_transformer(config: Mapping[str, Any]) -> nn.Module:
    """The transformer with diffusers configuration `config`, on the meta device."""
    import diffusers

    with torch.device("meta"):
        transformer: nn.Module = getattr(diffusers, config["_class_name"]).from_config(dict(config))
    return transformer


def random_lora(config: Mapping[str, Any], rank: int, dtype: torch.dtype) -> LoraAdapter:
    """An adapter for the transformer with diffusers configuration `config`, seed 0, on all linear layers of its blocks
    but those of the modulation; tensors in `dtype` on the host."""
    transformer = empty_transformer(config)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    targets = set()
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and "blocks." in name and not any(part in name for part in _MODULATION):
            targets.add(name.rpartition(".")[2])
            a = torch.randn(rank, module.in_features, generator=generator) / rank
            b = torch.randn(module.out_features, rank, generator=generator) * _B_STD
            tensors |= {f"base_model.model.{name}.lora_{half}.weight": t.to(dtype) for half, t in (("A", a), ("B", b))}
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(targets)}
    return LoraAdapter(config=adapter, tensors=tensors)
