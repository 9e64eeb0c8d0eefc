"""Images and managers for the tests of rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from verl_omni.reward_loop import RewardItem, RewardManager, RewardResult
from verl_omni.workers.config import build
from verl_omni.workers.config.reward import RewardConfig


def plain(red: int, green: int, blue: int, size: int = 32) -> Tensor:
    """An image of one colour."""
    return torch.tensor([red, green, blue], dtype=torch.uint8)[:, None, None].expand(3, size, size)


def noise(size: int = 32) -> Tensor:
    return torch.randint(0, 256, (3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def written(text: str, size: int = 384, font_size: int = 56, colour: str = "black") -> Tensor:
    """`text` on white."""
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).text((24, size // 4), text, fill=colour, font=ImageFont.load_default(font_size), spacing=24)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def item(image: Tensor | None = None, **kwargs: Any) -> RewardItem:
    values: dict[str, Any] = dict(uid="g0", request_id="r7", prompt="a red square", image=image)
    if image is None:
        values["image"] = plain(200, 100, 40)
    return RewardItem(**values | kwargs)


def reward_config(**reward: Any) -> RewardConfig:
    return build(RewardConfig, {"num_workers": 2, **reward}, "reward")


async def score(scored: RewardItem, **reward: Any) -> RewardResult:
    """The reward of one item by a manager of its own."""
    async with RewardManager(reward_config(**reward)) as manager:
        return await manager.score(scored)
