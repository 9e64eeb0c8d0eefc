"""Layers of the engine under a subclass that runs the fused operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm_omni.diffusion.lora.layers.base_linear import DiffusionBaseLinearLayerWithLoRA

from verl_omni.pipelines.fused.add_lora import add_lora
from verl_omni.pipelines.fused.linear_gelu import linear_gelu


class FusedLora(DiffusionBaseLinearLayerWithLoRA):
    """Left of the engine's layer with a LoRA beside its weights."""

    def apply(self, x: Tensor, bias: Tensor | None = None, *, gelu: bool = False) -> Tensor:
        """[..., K] → [..., N]; `gelu`, the tanh form of it, is for a layer of one part whose base is plain."""
        base, active = self.base_layer, self._diffusion_lora_active_slices
        if not any(active):
            return linear_gelu(x, base.weight, bias) if gelu else base.quant_method.apply(base, x, bias)
        flat = x.reshape(-1, x.shape[-1])
        out = base.quant_method.apply(base, flat, bias)
        a, b = ([stacked[0, 0] for stacked in halves] for halves in (self.lora_a_stacked, self.lora_b_stacked))
        starts = itertools.accumulate((len(expand) for expand in b[:-1]), initial=0)
        on = [list(itertools.compress(of_parts, active)) for of_parts in (a, b, starts)]
        return add_lora(out, flat, *on, gelu=gelu).view(*x.shape[:-1], out.shape[-1])


_FUSED: dict[type[nn.Module], type[FusedLora]] = {}
"""By the engine's class; one of each, as another one would be compiled anew."""


class FusedGELU(nn.Module):
    """Left of a stock "linear layer ``proj``, then tanh GELU"; as the stock one if it is not plain, its LoRA aside."""

    proj: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        layer = self.proj
        if _is_plain(layer):
            return linear_gelu(hidden_states, layer.weight, layer.bias)
        if isinstance(layer, FusedLora) and _is_plain(layer.base_layer) and len(layer.lora_b_stacked) == 1:
            return layer.apply(hidden_states, layer.base_layer.bias, gelu=True)
        out: Tensor = super().forward(hidden_states)
        return out


def fuse_loras(layers: Iterable[Any]) -> None:
    """Make `layers`, all of which can have a LoRA beside their weights, :class:`FusedLora`, in place."""
    for layer in layers:
        if not isinstance(layer, FusedLora):
            layer.__class__ = _fused(type(layer))


def reclass(module: nn.Module, stock: type[nn.Module], fused: type[nn.Module]) -> None:
    """Make every `stock` within `module` a `fused`, in place."""
    for part in module.modules():
        if type(part) is stock:
            part.__class__ = fused


def _fused(stock: type[nn.Module]) -> type[FusedLora]:
    if stock not in _FUSED:
        _FUSED[stock] = type(f"Fused{stock.__name__}", (FusedLora, stock), {})
    return _FUSED[stock]


def _is_plain(layer: Any) -> bool:
    """Whether `layer` is a matrix product with its bias and nothing more: no LoRA around it, no quantization."""
    plain = isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)
    return plain and layer.bias is not None
