"""Qwen-Image's transformer blocks with fewer passes over memory; shapes as in its part ``join_qkv``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.models.qwen_image import qwen_image_transformer as stock

from verl_omni.pipelines.fused.join_qkv import Rotation, join_qkv
from verl_omni.pipelines.fused.layers import FusedGELU, reclass
from verl_omni.pipelines.fused.modulate import modulate


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


class FusedBlock(stock.QwenImageTransformerBlock):
    """Both streams through attention and MLP."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: list[int] | None = None,
        hidden_states_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        image_mod = self.img_mod(temb).chunk(6, dim=-1)  # shift, scale, gate of the attention, then of the MLP
        text_mod = self.txt_mod(temb).chunk(6, dim=-1)
        image, image_in = modulate(hidden_states, [image_mod[:2]])
        text, text_in = modulate(encoder_hidden_states, [text_mod[:2]])
        image_out, text_out = self.attn(
            hidden_states=image_in,
            encoder_hidden_states=text_in,
            vid_freqs=image_rotary_emb[0],
            txt_freqs=image_rotary_emb[1],
            hidden_states_mask=hidden_states_mask,
            encoder_hidden_states_mask=encoder_hidden_states_mask,
        )
        image, image_in = modulate(image, [image_mod[3:5]], [(image_mod[2], image_out)])
        text, text_in = modulate(text, [text_mod[3:5]], [(text_mod[2], text_out)])
        image = image + image_mod[5][:, None] * self.img_mlp(image_in)
        text = text + text_mod[5][:, None] * self.txt_mlp(text_in)
        return text, image


class FusedUp(FusedGELU, stock.ColumnParallelApproxGELU):
    """The first layer of the feed-forward network with its activation."""


def fuse(transformer: nn.Module, od_config: Any) -> None:
    """Let the blocks of `transformer` run fused.

    With sequence parallelism, which splits the image, only their MLPs; in float16, where the stock block clips, and in
    models that edit images, not the block around attention and MLP.
    """
    reclass(transformer, stock.ColumnParallelApproxGELU, FusedUp)
    if od_config.parallel_config.sequence_parallel_size == 1:
        reclass(transformer, stock.QwenImageCrossAttention, FusedAttention)
    if od_config.dtype is not torch.float16 and not transformer.zero_cond_t:
        reclass(transformer, stock.QwenImageTransformerBlock, FusedBlock)
