"""Stable Diffusion 3's transformer blocks with fewer passes over memory."""

from __future__ import annotations

from torch import Tensor, nn
from vllm_omni.diffusion.models.sd3 import sd3_transformer as stock

from verl_omni.pipelines.fused import FusedGELU, reclass
from verl_omni.pipelines.fused.join_qkv import join_qkv


class FusedAttention(stock.SD3CrossAttention):
    """Joint attention, or with `encoder_hidden_states` None attention within the image; text goes first."""

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        image, _ = self.to_qkv(hidden_states)
        text = None if encoder_hidden_states is None else self.add_kv_proj(encoder_hidden_states)[0]
        own = (self.norm_q.weight, self.norm_k.weight)
        added = own if text is None else (self.norm_added_q.weight, self.norm_added_k.weight)
        q, k, v = join_qkv(text, image, (*added, *own), None, heads=self.to_qkv.num_heads, eps=self.eps)
        joint = self.attn(q, k, v).flatten(2, 3)
        length = 0 if text is None else text.shape[1]
        out, _ = self.to_out[0](joint[:, length:])
        if text is None:
            return out
        return out, joint[:, :length] if self.to_add_out is None else self.to_add_out(joint[:, :length])[0]


class FusedUp(FusedGELU, stock.GELU):
    """The first layer of the feed-forward network with its activation."""


def fuse(transformer: nn.Module) -> None:
    """Let the blocks of `transformer` run fused; a model without norms of q and k (SD3.0) only in their MLPs."""
    reclass(transformer, stock.GELU, FusedUp)
    if transformer.qk_norm == "rms_norm":
        reclass(transformer, stock.SD3CrossAttention, FusedAttention)
