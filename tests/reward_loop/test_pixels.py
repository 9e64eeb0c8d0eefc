"""Scores of pixels against their formulas."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from tests.reward_loop.items import item, noise, plain, score


async def parts(image, **scorers) -> dict[str, float]:
    return (await score(item(image), scorers=scorers)).parts


async def test_jpeg_size_in_kilobytes():
    image = noise()
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=95)
    found = await parts(image, less={"type": "jpeg_compressibility"}, more={"type": "jpeg_incompressibility"})
    assert found == {"less": -len(file.getvalue()) / 1000, "more": len(file.getvalue()) / 1000}


async def test_a_smooth_image_and_a_low_quality_are_smaller():
    jpeg = {"type": "jpeg_compressibility"}
    smooth, rough = [await parts(x, a=jpeg, b={**jpeg, "quality": 20}) for x in (plain(1, 2, 3), noise())]
    assert smooth["a"] > rough["b"] > rough["a"]


async def test_brightness_is_the_mean():
    bright = {"type": "brightness"}
    assert await parts(plain(255, 255, 255), b=bright) == {"b": 1.0}
    assert await parts(plain(0, 0, 0), b=bright) == {"b": 0.0}
    image = noise()
    assert (await parts(image, b=bright))["b"] == pytest.approx(image.double().mean().item() / 255)


async def test_color_is_one_channel_less_the_mean_of_the_others():
    colours = {name: {"type": "color", "channel": name} for name in ("red", "green", "blue")}
    found = await parts(plain(200, 100, 40), **colours)
    assert found == pytest.approx({"red": 130 / 255, "green": -20 / 255, "blue": -110 / 255})
    assert await parts(plain(255, 0, 0), **colours) == {"red": 1.0, "green": -0.5, "blue": -0.5}


@pytest.mark.parametrize(
    "image", [torch.zeros(3, 4, 4), torch.zeros(4, 4, 3, dtype=torch.uint8), torch.zeros(1, 3, 4, 4, dtype=torch.uint8)]
)
def test_an_image_of_another_kind_is_refused(image):
    with pytest.raises(ValueError, match=r"image of request r7 must be uint8 \[3, H, W\], got torch"):
        item(image)
