"""Fewer passes over memory in a transformer block: what adapters use where the transformer is compiled.

A fused module is a stock one under a subclass: parameters, their names and the layers that LoRA wraps stay as they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from verl_omni.pipelines.fused.linear_gelu import linear_gelu


class FusedGELU(nn.Module):
    """Left of a stock "linear layer ``proj``, then tanh GELU"; runs as the stock one where the layer is not plain."""

    proj: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        if not _is_plain(self.proj):
            out: Tensor = super().forward(hidden_states)
            return out
        return linear_gelu(hidden_states, self.proj.weight, self.proj.bias)


def reclass(module: nn.Module, stock: type[nn.Module], fused: type[nn.Module]) -> None:
    """Make every `stock` within `module` a `fused`, in place."""
    for part in module.modules():
        if type(part) is stock:
            part.__class__ = fused


def _is_plain(layer: Any) -> bool:
    """Whether `layer` is a matrix product with its bias and nothing more: no LoRA around it, no quantization."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    plain = isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)
    return plain and layer.bias is not None
