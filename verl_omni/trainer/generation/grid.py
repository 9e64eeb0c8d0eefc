"""All images of a run on one sheet, each with its label and its prompt."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

MIN_TILE = 128  # pixels; below it neither image nor label can be read
MAX_TILE = 256  # pixels; 64 tiles of this make a sheet that every viewer opens
_FONT_SIZE = 12
_LINE = 15
_GAP = 8
_PROMPT_LINES = 2


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One place on the sheet."""

    image: Image.Image | None
    """None: the request failed."""
    label: str
    """Id, or what else tells it apart; shortened to one line."""
    prompt: str
    """Shortened to two lines."""


def draw_grid(tiles: Sequence[Tile], columns: int) -> Image.Image:
    """The sheet, `columns` tiles wide. Tiny images are enlarged without smoothing, large ones are reduced."""
    images = [None if tile.image is None else fit(tile.image) for tile in tiles]
    width = max((image.width for image in images if image), default=MIN_TILE)
    height = max((image.height for image in images if image), default=MIN_TILE)
    caption = _LINE * (1 + _PROMPT_LINES)
    sheet_size = (columns * (width + _GAP) + _GAP, math.ceil(len(tiles) / columns) * (height + caption + _GAP) + _GAP)
    sheet = Image.new("RGB", sheet_size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT_SIZE)
    characters = max(1, int(width / font.getlength("n")))
    for index, (tile, image) in enumerate(zip(tiles, images, strict=True)):
        x, y = _GAP + index % columns * (width + _GAP), _GAP + index // columns * (height + caption + _GAP)
        if image is None:
            draw.rectangle((x, y, x + width - 1, y + height - 1), fill="#ddd")
            draw.text((x + _GAP, y + _GAP), "failed", fill="#a00", font=font)
        else:
            sheet.paste(image, (x, y))
        label = textwrap.wrap(tile.label, characters, max_lines=1, placeholder=" …") or [""]
        prompt = textwrap.wrap(tile.prompt, characters, max_lines=_PROMPT_LINES, placeholder=" …")
        for number, line in enumerate([*label, *prompt]):
            draw.text((x, y + height + number * _LINE), line, fill="black" if number == 0 else "#555", font=font)
    return sheet


def fit(image: Image.Image) -> Image.Image:
    """`image` with its longer side from `MIN_TILE` to `MAX_TILE`; enlarged by a whole factor only."""
    longer = max(image.size)
    if longer < MIN_TILE:
        factor = math.ceil(MIN_TILE / longer)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if longer > MAX_TILE:
        sides = (max(1, round(side * MAX_TILE / longer)) for side in image.size)
        width, height = sides
        return image.resize((width, height), Image.Resampling.LANCZOS)
    return image
