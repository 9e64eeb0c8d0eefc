"""Full-size Qwen-Image and SD3.5-medium with random weights: for speed and memory where no checkpoint can be had.

:func:`build_full_size` writes a folder in diffusers layout: the published transformer configuration without weights,
text encoders and VAE of full size with random weights. The adapters of :mod:`~verl_omni.bench.random_adapters` draw the
transformer's weights on the device. What the images show means nothing; time and memory do. Left out: 20 of
Qwen-Image's 28 text encoder layers, which take long to write and hardly count in a rollout that encodes each prompt
once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl_omni.bench.random_lora import empty_transformer
from verl_omni.testing import tiny_models

TRANSFORMER = {
    "qwen_image": dict(
        _class_name="QwenImageTransformer2DModel",
        attention_head_dim=128,
        axes_dims_rope=[16, 56, 56],
        guidance_embeds=False,
        in_channels=64,
        joint_attention_dim=3584,
        num_attention_heads=24,
        num_layers=60,
        out_channels=16,
        patch_size=2,
    ),
    "sd3": dict(
        _class_name="SD3Transformer2DModel",
        attention_head_dim=64,
        caption_projection_dim=1536,
        dual_attention_layers=list(range(13)),
        in_channels=16,
        joint_attention_dim=4096,
        num_attention_heads=24,
        num_layers=24,
        out_channels=16,
        patch_size=2,
        pooled_projection_dim=2048,
        pos_embed_max_size=384,
        qk_norm="rms_norm",
        sample_size=128,
    ),
}

WRITTEN = torch.bfloat16
"""Dtype of the weights that are written."""


def build_full_size(family: str, out: Path) -> Path:
    """Write the full-size `family` to `out` and return it; takes up to a minute and 12 GB."""
    tiny_models.build(family, out)
    for weights in (out / "transformer").glob("*.safetensors"):
        weights.unlink()
    (out / "transformer" / "config.json").write_text(json.dumps(TRANSFORMER[family]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, make in _PARTS[family]().items():
        shutil.rmtree(out / name)
        with torch.device(device):
            make().to(WRITTEN).save_pretrained(out / name)
    return out


def parameter_counts(family: str) -> dict[str, int]:
    """Part → number of its parameters. Nothing is allocated."""
    with torch.device("meta"):
        parts = {name: make() for name, make in _PARTS[family]().items()}
    parts["transformer"] = empty_transformer(TRANSFORMER[family])
    return {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in parts.items()}


def _qwen_image() -> dict[str, Callable[[], Any]]:
    from diffusers import AutoencoderKLQwenImage
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = dict(
        vocab_size=1000,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=8,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rope_theta=1e6,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        rope_scaling={"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]},
    )
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=3584)
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**vision, "fullatt_block_indexes": [0]},
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )
    vae = dict(base_dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True])
    return {
        "text_encoder": lambda: Qwen2_5_VLForConditionalGeneration(config),
        "vae": lambda: AutoencoderKLQwenImage(**vae),
    }


def _sd3() -> dict[str, Callable[[], Any]]:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    def clip(hidden: int, feed_forward: int, layers: int, heads: int) -> nn.Module:
        ids = dict(bos_token_id=0, eos_token_id=1, pad_token_id=1, vocab_size=1000, max_position_embeddings=77)
        sizes = dict(hidden_size=hidden, intermediate_size=feed_forward, projection_dim=hidden)
        layout = dict(num_hidden_layers=layers, num_attention_heads=heads, hidden_act="gelu")
        return CLIPTextModelWithProjection(CLIPTextConfig(**ids, **sizes, **layout))

    t5 = T5Config(
        vocab_size=1000,
        d_model=4096,
        d_ff=10240,
        d_kv=64,
        num_layers=24,
        num_heads=64,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    vae = dict(
        sample_size=1024,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5305,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        force_upcast=True,
    )
    return {
        "text_encoder": lambda: clip(768, 3072, 12, 12),
        "text_encoder_2": lambda: clip(1280, 5120, 32, 20),
        "text_encoder_3": lambda: T5EncoderModel(t5),
        "vae": lambda: AutoencoderKL(**vae),
    }


_PARTS: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {"qwen_image": _qwen_image, "sd3": _sd3}
"""Family → what is written beside the transformer's configuration."""
