"""Qwen-Image's video VAE, decoding single frames.

Its convolutions are causal in time: before the first frame they see zeros. An image is a first frame, so of each 3-D
kernel only the last time slice meets anything but zeros, and the layers that upsample time do nothing. Keeping that
slice as a 2-D convolution gives the same image with a third of the multiplications and none of the cached frames.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class FrameConv(nn.Module):
    """The last time slice of a causal 3-D convolution: [B, C, 1, H, W] → [B, C', 1, H', W']."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, conv: Any) -> None:
        super().__init__()
        left, right, top, bottom, *_ = conv._padding
        if left != right or top != bottom or conv.stride[1:] != (1, 1):
            raise ValueError(f"cannot flatten a convolution with padding {conv._padding} and stride {conv.stride}")
        self.padding = (top, left)
        self.register_buffer("weight", conv.weight.detach()[:, :, -1].contiguous(), persistent=False)
        self.register_buffer("bias", None if conv.bias is None else conv.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x.squeeze(2), self.weight, self.bias, padding=self.padding).unsqueeze(2)


class FrameDecoder(nn.Module):
    """Decodes latents [B, z, 1, h, w] of a Qwen-Image VAE to images [B, 3, 1, H, W] in -1…1, as ``vae.decode`` does."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.post_quant_conv = _flat(copy.deepcopy(vae.post_quant_conv))
        self.decoder = _flat(copy.deepcopy(vae.decoder))
        self.requires_grad_(False)

    def forward(self, latents: Tensor) -> Tensor:
        return torch.clamp(self.decoder(self.post_quant_conv(latents)), -1.0, 1.0)


def _flat(module: nn.Module) -> nn.Module:
    """`module` with every causal 3-D convolution replaced, and those that only upsample time removed."""
    if isinstance(module, nn.Conv3d):
        return FrameConv(module)
    for name, child in module.named_children():
        setattr(module, name, None if name == "time_conv" else _flat(child))
    return module
