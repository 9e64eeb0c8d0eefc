"""What the names of a soak's policies stand for, and how they get into an engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from verl_omni.testing.soak.workload import Policy
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.staging import LoraAdapter

RANK = 4
LEAVES = ("to_q", "to_k", "to_v", "to_out.0")
"""Layers with a LoRA."""
_SEEDS = {"a": 1, "b": 2}
_STD = 0.2
"""Of LoRA weights: enough to tell policies apart, and little enough that rounding is not magnified."""
_SCALED = 1.05
"""The weights called "scaled" are the checkpoint's times this."""


class Policies:
    """Policies of the model in the folder `model`."""

    def __init__(self, model: Path) -> None:
        (file,) = (model / "transformer").glob("*.safetensors")
        self._transformer = load_file(file)

    def weights(self, name: str) -> dict[str, Tensor]:
        """The transformer's weights of this name, as the engine takes them."""
        factor = _SCALED if name == "scaled" else 1.0
        return {f"transformer.{key}": tensor * factor for key, tensor in self._transformer.items()}

    @cached_property
    def loras(self) -> Mapping[str, LoraAdapter]:
        """Random adapters by name; the one called "misfit" is one column too narrow."""
        narrow = {key: t[:, :-1] if t.ndim == 2 else t for key, t in self._transformer.items()}
        return {
            **{name: _random_lora(self._transformer, seed) for name, seed in _SEEDS.items()},
            "misfit": _random_lora(narrow, 0),
        }

    async def change(self, engine: RolloutEngine, old: Policy, new: Policy, version: int) -> None:
        """From `old` to `new`, which differ in the weights or in the LoRA; `version` is one more than the old one."""
        if old.weights != new.weights:
            await engine.update_weights(self.weights(new.weights), version=version)
        elif new.lora is None:
            await engine.remove_lora()
        else:
            await engine.load_lora(self.loras[new.lora], scale=new.scale, version=version)

    async def install(self, engine: RolloutEngine, policy: Policy, version: int) -> None:
        """`policy` as `version`, whatever there was before."""
        if policy.lora is None:
            await engine.remove_lora()
        await engine.update_weights(self.weights(policy.weights), version=version)
        if policy.lora is not None:
            await engine.load_lora(self.loras[policy.lora], scale=policy.scale, version=version)

    async def offer_misfit(self, engine: RolloutEngine, kind: str) -> None:
        """Offer a LoRA or weights that do not fit; returns only if the engine takes them."""
        if kind == "lora":
            await engine.load_lora(self.loras["misfit"])
        else:
            await engine.update_weights(dict(list(self.weights("original").items())[1:]))


def _random_lora(transformer: Mapping[str, Tensor], seed: int) -> LoraAdapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, weight in transformer.items():
        module = key.removesuffix(".weight")
        if weight.ndim == 2 and module.endswith(LEAVES):
            for half, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                drawn = torch.randn(shape, generator=generator) * _STD
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = drawn
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(LEAVES)}
    return LoraAdapter(config=config, tensors=tensors)
