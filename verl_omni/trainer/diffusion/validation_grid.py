"""Grids of validation images, ``validation/step_<k>.png``: the same prompts at each validation, with their rewards."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from verl_omni.trainer.generation.grid import Tile, draw_grid

if TYPE_CHECKING:
    from verl_omni.trainer.diffusion.batch import ScoredSample

FOLDER = "validation"
_NAME = re.compile(r"step_(\d+)\.png")


def validation_tiles(samples: Sequence[ScoredSample], prompts: Mapping[str, str], *, limit: int) -> list[Tile]:
    """Places on the grid for the first image of each of the first `limit` samples, captioned with their rewards.

    `prompts` holds the text of each group's prompt, by the samples' ``uid``. Samples without pixels have no place.
    """
    tiles = []
    for item in samples[:limit]:
        if item.sample.images is not None:
            pixels = item.sample.images[0].permute(1, 2, 0).contiguous().cpu().numpy()
            label = reward_caption(item.reward.total, item.reward.parts)
            tiles.append(Tile(image=Image.fromarray(pixels), label=label, prompt=prompts[item.uid]))
    return tiles


def reward_caption(reward: float, parts: Mapping[str, float]) -> str:
    """Such as ``0.512: ocr 0.40, jpeg 0.80``; the scores are left out where there is but one."""
    scores = [f"{name} {value:.2f}" for name, value in parts.items() if "/" not in name]
    return f"{reward:.3f}" + (f": {', '.join(scores)}" if len(scores) > 1 else "")


def write_grid(folder: str | Path, step: int, tiles: Sequence[Tile]) -> Path:
    """Draw `tiles` into the grid of `step` below the run's `folder`, where it appears complete; returns its path."""
    path = Path(folder) / FOLDER / f"step_{step}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    draw_grid(tiles, columns=math.ceil(math.sqrt(len(tiles)))).save(part, format="PNG")
    os.replace(part, path)
    return path


def find_grids(folder: str | Path) -> dict[int, Path]:
    """Step → its grid, for the grids below the run's `folder`, in the order of the steps."""
    paths = (Path(folder) / FOLDER).glob("step_*.png")
    found = {int(match[1]): path for path in paths if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def drop_grids(folder: str | Path, *, keep: int | None) -> None:
    """Remove the grids below the run's `folder`, but for those of the steps 0 … `keep`; None: all of them."""
    for step, path in find_grids(folder).items():
        if keep is None or step > keep:
            path.unlink()
