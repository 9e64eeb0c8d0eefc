"""What is scored, and what comes of it."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One image, and what it was made from."""

    uid: str
    """Of the group: the images of one prompt."""
    request_id: str
    """Of the image; errors name it."""
    prompt: str
    """What the image should show."""
    image: Tensor
    """uint8 [3, H, W], RGB."""
    ground_truth: str | None = None
    """What the scorer compares with, such as the text to be read; None: not known."""
    data_source: str = ""
    """Name of the data set."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Anything further of the prompt's row."""

    def __post_init__(self) -> None:
        import torch

        if self.image.dtype != torch.uint8 or self.image.ndim != 3 or self.image.shape[0] != 3:
            raise ValueError(
                f"the image of request {self.request_id} must be uint8 [3, H, W], "
                f"got {self.image.dtype} {list(self.image.shape)}"
            )

    def pil_image(self) -> Image:
        """The image as PIL knows it, RGB."""
        from PIL import Image

        return Image.fromarray(self.image.permute(1, 2, 0).cpu().numpy())

    def png(self, max_bytes: int | None = None) -> bytes:
        """The image as PNG, lossless. Raises :class:`ScoreError` if that is more than `max_bytes`."""
        file = io.BytesIO()
        self.pil_image().save(file, "PNG", compress_level=1)
        content = file.getvalue()
        if max_bytes is not None and len(content) > max_bytes:
            _, height, width = self.image.shape
            raise ScoreError(
                f"the image of {width}×{height} pixels has {len(content)} bytes as a PNG, more than "
                f"max_image_bytes={max_bytes}, and was not sent"
            )
        return content


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """The reward of one image."""

    total: float
    """Σ weight · score over the scorers."""
    parts: dict[str, float]
    """scorer → its score, without the weight; ``scorer/key`` → what a function returned beside its score."""


class RewardError(RuntimeError):
    """An image could not be scored."""

    def __init__(self, scorer: str, request_id: str, reason: str) -> None:
        super().__init__(scorer, request_id, reason)
        self.scorer = scorer
        """Name of the scorer."""
        self.request_id = request_id
        """Of the image."""
        self.reason = reason
        """What was wrong."""

    def __str__(self) -> str:
        return f"reward scorer {self.scorer} could not score request {self.request_id}: {self.reason}"


class ScoreError(ValueError):
    """Why a scorer gives no score, in words that need no further explanation."""


class Scorer(Protocol):
    """One way to score an image."""

    def score(self, item: RewardItem) -> Any:
        """The score: a finite number, or a mapping with one as "score" and further numbers; or an awaitable of these.

        A plain method runs in one of several threads at a time, a coroutine function in the event loop. Whatever is
        raised, or is no score, becomes a :class:`RewardError`.
        """

    async def close(self) -> None:
        """Let go of connections and the like."""


def read_score(result: Any) -> tuple[float, dict[str, float]]:
    """What a scorer gave, as its score and the further numbers beside it.

    Further values that are no numbers are left out; a bool is no number. Raises :class:`ScoreError` unless the score
    and all further numbers are finite.
    """
    if not isinstance(result, Mapping):
        return finite(result, "the score"), {}
    if "score" not in result:
        raise ScoreError(f'a mapping of scores needs the key "score", got {_shown(list(result))}')
    further = {
        str(key): finite(value, str(key)) for key, value in result.items() if key != "score" and _is_number(value)
    }
    return finite(result["score"], "the score"), further


def finite(value: Any, what: str) -> float:
    """`value` as a float. Raises :class:`ScoreError` if it is no finite number."""
    try:
        number = float(value) if _is_number(value) else math.nan
    except (ArithmeticError, TypeError, ValueError, RuntimeError):  # too large an int, an array of many numbers
        number = math.nan
    if not math.isfinite(number):
        raise ScoreError(f"{what} must be a finite number, got {_shown(value)}")
    return number


def _is_number(value: Any) -> bool:
    """Numbers, and tensors and arrays, which may hold one."""
    return hasattr(value, "__float__") and not isinstance(value, bool)


def _shown(value: Any) -> str:
    shown = f"{value!r}"
    return shown if len(shown) <= 100 else f"{shown[:100]}…"
