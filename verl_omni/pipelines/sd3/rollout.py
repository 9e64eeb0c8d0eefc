"""Rollout adapter of Stable Diffusion 3 and 3.5 for FlowGRPO.

Legend: B rows, L text tokens (77 CLIP, then the T5 tokens padded to max_sequence_length), D text width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.models.sd3 import StableDiffusion3Pipeline

from verl_omni.pipelines.graphed import GraphedEncoder, beside, can_graph
from verl_omni.pipelines.hooks import Ids
from verl_omni.pipelines.model_base import VllmOmniPipelineBase
from verl_omni.pipelines.params import RequestError
from verl_omni.pipelines.prompt_cache import PromptEmbeds
from verl_omni.pipelines.queued import to_device
from verl_omni.pipelines.rows import TextBatch
from verl_omni.pipelines.sd3.fused import fuse
from verl_omni.pipelines.sd3.rules import StableDiffusion3Rules


@VllmOmniPipelineBase.register("StableDiffusion3Pipeline")
class StableDiffusion3Rollout(StableDiffusion3Rules, VllmOmniPipelineBase, StableDiffusion3Pipeline):
    """Three text encoders: two of CLIP, padded to their limit, and T5."""

    num_encoders = 3
    default_steps = 28
    default_text_length = 256
    text_limit = 512
    decode_rows = 16  # a quarter faster than 8 at 384x384 (docs/perf/rollout.md)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._encoders = GraphedEncoder(self._encode, enabled=can_graph(self.device, self.od_config))

    def release(self) -> None:
        super().release()
        self._encoders.clear()

    def fuse(self) -> None:
        fuse(self.transformer)

    def compiled_beside(self) -> Sequence[nn.Module]:
        return (self.vae.decoder,)

    def text_to_ids(self, text: str) -> tuple[Ids, ...]:
        clip = [
            tuple(tokenizer(text, truncation=True, max_length=self.tokenizer_max_length).input_ids)
            for tokenizer in (self.tokenizer, self.tokenizer_2)
        ]
        return (*clip, tuple(self.tokenizer_3(text).input_ids))

    def encode(self, ids: tuple[Ids, ...], max_sequence_length: int) -> PromptEmbeds:
        clip_limit = self.tokenizer_max_length
        embeds, pooled = self._encoders(
            self._padded(ids[0], clip_limit, self.tokenizer.pad_token_id, "CLIP's limit for prompt_token_ids,"),
            self._padded(ids[1], clip_limit, self.tokenizer_2.pad_token_id, "CLIP's limit for prompt_token_ids_2,"),
            self._padded(ids[2], max_sequence_length, self.tokenizer_3.pad_token_id, "max_sequence_length"),
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def _encode(self, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        """Text embeddings [L, D] and pooled ones of padded token ids [1, …] of one prompt for each encoder."""
        # Whole masks: transformers would build its own otherwise, and under capture that copies from the host.
        causal = torch.ones(1, 1, first.shape[1], first.shape[1], dtype=torch.bool, device=first.device).tril()
        everything = torch.zeros(1, 1, 1, third.shape[1], dtype=self.text_encoder_3.dtype, device=third.device)
        with beside() as clip_done:  # its kernels are too small to fill a GPU
            outputs = [
                encoder(tokens, attention_mask=causal, output_hidden_states=True)
                for encoder, tokens in ((self.text_encoder, first), (self.text_encoder_2, second))
            ]
        t5 = self.text_encoder_3(third, attention_mask=everything)[0]
        clip_done()
        joined = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        joined = torch.nn.functional.pad(joined, (0, t5.shape[-1] - joined.shape[-1]))
        pooled = torch.cat([output[0] for output in outputs], dim=-1)
        dtype = self.od_config.dtype
        return torch.cat([joined, t5], dim=1)[0].to(dtype), pooled[0].to(dtype)

    def _padded(self, ids: Ids, length: int, pad: int, limit: str) -> Tensor:
        if len(ids) > length:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, above {limit} {length}; shorten it or raise the limit"
            )
        return to_device(torch.tensor([[*ids, *[pad] * (length - len(ids))]]), self.device)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        patch = self.patch_size * self.vae_scale_factor
        if height % patch or width % patch:
            raise RequestError(f"height={height}, width={width} must be multiples of {patch}")
        largest = patch * self.transformer.pos_embed_max_size
        if max(height, width) > largest:
            raise RequestError(f"height={height}, width={width} must be at most {largest}")
        return self.transformer.in_channels, height // self.vae_scale_factor, width // self.vae_scale_factor

    def predict_velocity(self, latents: Tensor, timesteps: Tensor, text: TextBatch, size: tuple[int, int]) -> Tensor:
        inputs = self.transformer_inputs(latents.to(self.od_config.dtype), timesteps, text, size)
        return self.transformer(**inputs, return_dict=False)[0]

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        config = self.vae.config
        return self.vae.decode(
            latents.to(self.vae.dtype) / config.scaling_factor + config.shift_factor, return_dict=False
        )[0]
