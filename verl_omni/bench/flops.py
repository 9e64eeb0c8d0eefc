"""Floating point operations of one image, from the configuration of its transformer: 2 for each multiply-add.

Counted are the matrix products of the transformer, attention's included. Left out: text encoders and VAE, which are a
few percent, and what is no matrix product. A LoRA that is not merged comes on top and is left out too: what it costs
shall show.

Legend: S image tokens, L text tokens, d width of the transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]


def forward_flop(config: Config, image_tokens: int, text_tokens: int) -> float | None:
    """FLOP of a forward over one row; `config` is that of the transformer. None for a class that is not known here."""
    formula = _FORMULAS.get(config["_class_name"])
    return None if formula is None else float(formula(config, image_tokens, text_tokens))


def _block(d: int, s: int, l: int) -> int:  # noqa: E741 (the legend's letter)
    """A block of two streams: q, k, v, output (4 d²) and feed-forward (8 d²) of each token; attention over all; the
    modulation (6 d²) of each stream."""
    return 2 * 12 * d * d * (s + l) + 4 * (s + l) ** 2 * d + 2 * 2 * 6 * d * d


def _qwen_image(config: Config, s: int, l: int) -> int:  # noqa: E741
    d = config["num_attention_heads"] * config["attention_head_dim"]
    image = config["in_channels"] + config["patch_size"] ** 2 * config["out_channels"]
    return config["num_layers"] * _block(d, s, l) + 2 * d * (s * image + l * config["joint_attention_dim"])


def _sd3(config: Config, s: int, l: int) -> int:  # noqa: E741
    d = config["num_attention_heads"] * config["attention_head_dim"]
    dual = 2 * 4 * d * d * s + 4 * s * s * d + 2 * 3 * d * d  # a second attention, over the image alone
    unused = 2 * 9 * d * d * l + 2 * 4 * d * d  # no output, feed-forward and gates of the text in the last block
    image = config["patch_size"] ** 2 * (config["in_channels"] + config["out_channels"])
    blocks = config["num_layers"] * _block(d, s, l) + len(config["dual_attention_layers"]) * dual - unused
    return blocks + 2 * d * (s * image + l * config["joint_attention_dim"])


_FORMULAS: dict[str, Callable[[Config, int, int], int]] = {
    "QwenImageTransformer2DModel": _qwen_image,
    "SD3Transformer2DModel": _sd3,
}
