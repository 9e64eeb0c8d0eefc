"""A tiny random FLUX.1 in diffusers layout, for the adapter that the docs work out.

python tests/docs/tiny_flux.py OUT [--seed N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import diffusers
import transformers

from verl_omni.testing import tiny_models
from verl_omni.testing.tiny_tokenizers import clip_tokenizer, t5_tokenizer


def flux() -> tuple[str, dict[str, Any]]:
    clip_width, t5_width = 32, 64
    clip_ids, t5_ids = clip_tokenizer(), t5_tokenizer()
    clip = transformers.CLIPTextConfig(
        hidden_size=clip_width,
        intermediate_size=2 * clip_width,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=clip_ids.model_max_length,
        bos_token_id=clip_ids.bos_token_id,
        **_ids(clip_ids),
    )
    t5 = transformers.T5Config(
        d_model=t5_width,
        d_ff=2 * t5_width,
        d_kv=16,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=t5_ids.pad_token_id,
        **_ids(t5_ids),
    )
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=t5_width,
        pooled_projection_dim=clip_width,
        guidance_embeds=True,  # as in FLUX.1-dev
        axes_dims_rope=(4, 6, 6),  # sums to attention_head_dim, each even
    )
    vae = diffusers.AutoencoderKL(
        sample_size=64,
        latent_channels=16,
        block_out_channels=(16, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1159,
        scaling_factor=0.3611,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return "FluxPipeline", {
        "tokenizer": clip_ids,
        "tokenizer_2": t5_ids,
        "text_encoder": transformers.CLIPTextModel(clip),
        "text_encoder_2": transformers.T5EncoderModel(t5),
        "transformer": transformer,
        "vae": vae,
        "scheduler": scheduler,
    }


def _ids(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, int]:
    return dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def build(out: str | Path, seed: int = 0) -> Path:
    """Write the model into the folder `out` and return its path."""
    tiny_models.FAMILIES["flux"] = flux
    try:
        return tiny_models.build("flux", out, seed)
    finally:
        del tiny_models.FAMILIES["flux"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a tiny random FLUX.1.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(build(args.out, args.seed))
