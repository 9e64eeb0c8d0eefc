"""Tiny random Qwen-Image and Stable Diffusion 3.5 checkpoints in diffusers layout, made without any download.

    python -m verl_omni.testing.tiny_models {qwen_image,sd3} OUT [--seed N]

They are built like the real ones (same classes, same files, but a few layers of a few channels), so the engine loads
them as it loads the real ones. Same seed and same library versions: same bytes.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from verl_omni.testing.tiny_tokenizers import clip_tokenizer, qwen_tokenizer, t5_tokenizer

MARKER = "tiny_model.json"
"""A file that tells a folder made here, and so one that may be replaced, from any other."""


def build(family: str, out: str | Path, seed: int = 0) -> Path:
    """Writes a tiny model of `family` ("qwen_image" or "sd3") into the folder `out` and returns that path.

    An existing tiny model of the same family is replaced. Raises ValueError for another family or for a seed outside
    0 … 2^63 - 1, and FileExistsError where `out` holds anything else; nothing is touched then.
    """
    if family not in FAMILIES:
        raise ValueError(f"no tiny model family {family!r}; write one of {', '.join(FAMILIES)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed} is out of range; write one from 0 to 2^63 - 1")
    out = Path(out)
    _make_room(out, family)
    # First, so that a build cut short can be repeated. model_index.json, without which nothing loads, comes last.
    _write_json(out / MARKER, {"family": family, "seed": seed})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline, parts = FAMILIES[family]()
        index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": diffusers.__version__}
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                _redraw(part)
            part.save_pretrained(out / name)
            index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
    _write_json(out / "model_index.json", index)
    return out


def _make_room(out: Path, family: str) -> None:
    """Leaves an empty folder at `out`, or raises FileExistsError where that would destroy something else."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; name a folder for the tiny {family} model")
    if out.is_dir() and any(out.iterdir()):
        marker = out / MARKER
        found = json.loads(marker.read_text()).get("family") if marker.is_file() else None
        if found != family:
            what = f"a tiny {found} model" if found else "something other than a tiny model"
            raise FileExistsError(f"{out} holds {what}; name a new or empty folder for the tiny {family} model")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)


def _qwen_image() -> tuple[str, dict[str, Any]]:
    width = 64
    tokenizer = qwen_tokenizer()
    token_id = tokenizer.convert_tokens_to_ids
    text_encoder = transformers.Qwen2_5_VLConfig(
        text_config=dict(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            rope_theta=1e6,
            rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]},  # sums to half a head
            bos_token_id=tokenizer.pad_token_id,
            **_ids(tokenizer),
        ),
        vision_config=dict(
            depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=width, fullatt_block_indexes=[0]
        ),
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=width,
        guidance_embeds=False,
        axes_dims_rope=(4, 6, 6),  # sums to attention_head_dim, each even
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=1.0,
        base_shift=0.5,
        max_shift=0.9,
        shift_terminal=0.02,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )
    return "QwenImagePipeline", {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(text_encoder).float(),
        "transformer": transformer,
        "vae": vae,
        "scheduler": scheduler,
    }


def _sd3() -> tuple[str, dict[str, Any]]:
    width = 32  # of each CLIP; the two side by side are as wide as T5
    parts: dict[str, Any] = {}
    for suffix in ("", "_2"):
        tokenizer = parts[f"tokenizer{suffix}"] = clip_tokenizer()
        clip = transformers.CLIPTextConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_attention_heads=2,
            num_hidden_layers=2,
            hidden_act="gelu",
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            **_ids(tokenizer),
        )
        parts[f"text_encoder{suffix}"] = transformers.CLIPTextModelWithProjection(clip)
    tokenizer = parts["tokenizer_3"] = t5_tokenizer()
    t5 = transformers.T5Config(
        d_model=2 * width,
        d_ff=2 * width,
        d_kv=16,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=tokenizer.pad_token_id,
        **_ids(tokenizer),
    )
    parts["text_encoder_3"] = transformers.T5EncoderModel(t5)
    parts["transformer"] = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        caption_projection_dim=64,
        joint_attention_dim=2 * width,
        pooled_projection_dim=2 * width,
        pos_embed_max_size=48,  # images up to 768 x 768
        dual_attention_layers=(0,),  # this and the next line as in SD3.5-medium
        qk_norm="rms_norm",
    )
    parts["vae"] = diffusers.AutoencoderKL(
        sample_size=64,
        latent_channels=16,
        block_out_channels=(16, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5305,
    )
    parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return "StableDiffusion3Pipeline", parts


FAMILIES: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {"qwen_image": _qwen_image, "sd3": _sd3}


def _ids(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, int]:
    return dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def _redraw(module: torch.nn.Module) -> None:
    """Draws every weight matrix anew, N(0, 1 / fan-in), from torch's generator.

    The libraries start some (modulation, output) at zero or close to it, which would leave the velocity blind to prompt
    and timestep, and the images grey.
    """
    with torch.no_grad():
        for param in module.parameters():
            if param.ndim > 1:
                param.normal_(0.0, param[0].numel() ** -0.5)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verl_omni.testing.tiny_models", description="Make a tiny random model."
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("out", type=Path, help="folder to write; a tiny model of the same family in it is replaced")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    args = parser.parse_args(argv)
    try:
        print(build(args.family, args.out, args.seed))
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
