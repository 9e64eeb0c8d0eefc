"""Rollout adapter of Qwen-Image for FlowGRPO.

Legend: B rows, S image tokens (2×2 latent patches), C packed channels, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from verl_omni.pipelines.hooks import Ids
from verl_omni.pipelines.model_base import VllmOmniPipelineBase
from verl_omni.pipelines.params import RequestError
from verl_omni.pipelines.prompt_cache import PromptEmbeds
from verl_omni.pipelines.queued import to_device
from verl_omni.pipelines.qwen_image.frame_decoder import FrameDecoder
from verl_omni.pipelines.qwen_image.fused import fuse
from verl_omni.pipelines.qwen_image.rules import QwenImageRules, refuse_distilled
from verl_omni.pipelines.rows import TextBatch


@VllmOmniPipelineBase.register("QwenImagePipeline")
class QwenImageRollout(QwenImageRules, VllmOmniPipelineBase, QwenImagePipeline):
    """Token ids include the chat template, whose first tokens are dropped after encoding, as the model was trained."""

    lora_key_map: ClassVar = {"to_out.0": "to_out"}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        refuse_distilled(self.transformer.guidance_embeds)
        self.frame_decoder = FrameDecoder(self.vae)
        config = self.vae.config
        self._latents_mean = torch.tensor(config.latents_mean, device=self.device).view(-1, 1, 1, 1)
        self._latents_std = torch.tensor(config.latents_std, device=self.device).view(-1, 1, 1, 1)

    def fuse(self) -> None:
        fuse(self.transformer, self.od_config)

    def compiled_beside(self) -> Sequence[nn.Module]:
        return (self.frame_decoder,)

    def text_to_ids(self, text: str) -> tuple[Ids, ...]:
        return (tuple(self.tokenizer(self.prompt_template_encode.format(text)).input_ids),)

    def encode(self, ids: tuple[Ids, ...], max_sequence_length: int) -> PromptEmbeds:
        prefix = self.prompt_template_encode_start_idx
        length = len(ids[0]) - prefix
        if length < 1:
            raise RequestError(
                f"the prompt has {len(ids[0])} tokens, of which the first {prefix} belong to the chat template and are "
                "dropped; apply the chat template before tokenizing, or give text"
            )
        if length > max_sequence_length:
            raise RequestError(
                f"the prompt has {length} tokens after the template, above max_sequence_length={max_sequence_length}; "
                f"shorten it, or raise max_sequence_length (at most {self.text_limit})"
            )
        tokens = to_device(torch.tensor(ids), self.device)
        hidden = self.text_encoder(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True
        ).hidden_states[-1][0, prefix:]
        mask = torch.ones(length, dtype=torch.bool, device=self.device)
        return {"prompt_embeds": hidden.to(self.od_config.dtype).clone(), "prompt_embeds_mask": mask}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        if height % self.patch or width % self.patch:
            raise RequestError(f"height={height}, width={width} must be multiples of {self.patch}")
        return (height // self.patch) * (width // self.patch), self.transformer.in_channels

    def draw_latents(self, height: int, width: int, generator: torch.Generator) -> Tensor:
        channels = self.transformer.in_channels // 4
        return self.prepare_latents(1, channels, height, width, torch.float32, self.device, generator)[0]

    def predict_velocity(self, latents: Tensor, timesteps: Tensor, text: TextBatch, size: tuple[int, int]) -> Tensor:
        inputs = self.transformer_inputs(latents.to(self.od_config.dtype), timesteps, text, size)
        lengths = [text.embeds.shape[1]] * len(latents)
        return self.transformer(**inputs, guidance=None, txt_seq_lens=lengths, return_dict=False)[0]

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        z = self._unpack_latents(latents, *size, self.vae_scale_factor) * self._latents_std + self._latents_mean
        whole = not (self.vae.use_tiling or self.vae.use_slicing)
        decode = self.frame_decoder if whole else lambda z: self.vae.decode(z, return_dict=False)[0]
        return decode(z.to(self.vae.dtype))[:, :, 0]
