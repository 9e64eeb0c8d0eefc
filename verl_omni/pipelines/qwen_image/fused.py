"""Qwen-Image's transformer blocks with fewer passes over memory. Shapes as in :mod:`~verl_omni.pipelines.fused`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.models.qwen_image import qwen_image_transformer as stock

from verl_omni.pipelines.fused import FusedGELU, reclass
from verl_omni.pipelines.fused.join_qkv import Rotation, join_qkv


class FusedAttention(stock.QwenImageCrossAttention):
    """Joint attention; text goes first."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        vid_freqs: Tensor,
        txt_freqs: Tensor,
        hidden_states_mask: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        image, _ = self.to_qkv(hidden_states)
        text, _ = self.add_kv_proj(encoder_hidden_states)
        norms = (self.norm_added_q.weight, self.norm_added_k.weight, self.norm_q.weight, self.norm_k.weight)
        rotation = Rotation.of(txt_freqs, vid_freqs)
        q, k, v = join_qkv(text, image, norms, rotation, heads=self.query_num_heads, eps=self.eps)
        mask = None
        if encoder_hidden_states_mask is not None:
            whole = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
            mask = AttentionMetadata(attn_mask=torch.cat([encoder_hidden_states_mask, whole], dim=1))
        joint = self.attn(q, k, v, mask).flatten(2, 3)
        length = text.shape[1]
        return self.to_out(joint[:, length:]), self.to_add_out(joint[:, :length])


class FusedUp(FusedGELU, stock.ColumnParallelApproxGELU):
    """The first layer of the feed-forward network with its activation."""


def fuse(transformer: nn.Module, od_config: Any) -> None:
    """Let the blocks of `transformer` run fused; with sequence parallelism, which splits the image, only their MLPs."""
    reclass(transformer, stock.ColumnParallelApproxGELU, FusedUp)
    if od_config.parallel_config.sequence_parallel_size == 1:
        reclass(transformer, stock.QwenImageCrossAttention, FusedAttention)
