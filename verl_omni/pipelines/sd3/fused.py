"""Stable Diffusion 3's transformer blocks with fewer passes over memory."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from vllm_omni.diffusion.models.sd3 import sd3_transformer as stock

from verl_omni.pipelines.fused.join_qkv import join_qkv
from verl_omni.pipelines.fused.layers import FusedGELU, reclass
from verl_omni.pipelines.fused.modulate import modulate


class FusedAttention(stock.SD3CrossAttention):
    """Joint attention, or with `encoder_hidden_states` None attention within the image; text goes first."""

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        image, _ = self.to_qkv(hidden_states)
        text = None if encoder_hidden_states is None else self.add_kv_proj(encoder_hidden_states)[0]
        own = (self.norm_q.weight, self.norm_k.weight)
        added = own if text is None else (self.norm_added_q.weight, self.norm_added_k.weight)
        q, k, v = join_qkv(text, image, (*added, *own), None, heads=self.attn.num_heads, eps=self.eps)
        joint = self.attn(q, k, v).flatten(2, 3)
        length = 0 if text is None else text.shape[1]
        out, _ = self.to_out[0](joint[:, length:])
        if text is None:
            return out
        return out, joint[:, :length] if self.to_add_out is None else self.to_add_out(joint[:, :length])[0]


class FusedBlock(stock.SD3TransformerBlock):
    """Both streams through attention, a second one of the image in some blocks, and MLP."""

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | tuple[Tensor, ...], temb: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        text = encoder_hidden_states[0] if isinstance(encoder_hidden_states, tuple) else encoder_hidden_states
        active = functional.silu(temb)
        image_mod = self.norm1.linear(active).chunk(9 if self.use_dual_attention else 6, dim=1)
        image, *image_in = modulate(
            hidden_states, [image_mod[:2], *([image_mod[6:8]] if self.use_dual_attention else [])]
        )
        text_mod = self.norm1_context.linear(active).chunk(2 if self.context_pre_only else 6, dim=1)
        text, text_in = modulate(text, [text_mod[1::-1] if self.context_pre_only else text_mod[:2]])
        image_out, text_out = self.attn(image_in[0], text_in)
        residuals = [(image_mod[2], image_out)]
        if self.use_dual_attention:
            residuals.append((image_mod[8], self.attn2(image_in[1])))
        image, mlp_in = modulate(image, [image_mod[3:5]], residuals)
        image = image + image_mod[5][:, None] * self.ff(mlp_in)
        if self.context_pre_only:
            return None, image
        text, text_in = modulate(text, [text_mod[3:5]], [(text_mod[2], text_out)])
        return text + text_mod[5][:, None] * self.ff_context(text_in), image


class FusedUp(FusedGELU, stock.GELU):
    """The first layer of the feed-forward network with its activation."""


def fuse(transformer: nn.Module) -> None:
    """Let the blocks of `transformer` run fused; in a model without norms of q and k (SD3.0), all but attention."""
    reclass(transformer, stock.GELU, FusedUp)
    reclass(transformer, stock.SD3TransformerBlock, FusedBlock)
    if transformer.qk_norm == "rms_norm":
        reclass(transformer, stock.SD3CrossAttention, FusedAttention)
