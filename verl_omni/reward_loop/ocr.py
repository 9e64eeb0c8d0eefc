"""Reads the text in images with RapidOCR, on the CPU. The models come with its wheel; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.reward_loop.item import RewardItem
from verl_omni.reward_loop.text import target_text, text_score
from verl_omni.workers.config import ConfigError
from verl_omni.workers.config.scorers import OcrConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MODELS = {"Det": "PP-OCRv6_det_small.onnx", "Rec": "PP-OCRv6_rec_small.onnx"}
"""Finding and reading of lines → file in the folder ``models`` of RapidOCR's wheel."""


class OcrScorer:
    """See :func:`~verl_omni.reward_loop.text.text_score`; lines are read from top to bottom, then left to right."""

    def __init__(self, config: OcrConfig) -> None:
        self._config = config
        self._parameters = engine_parameters(config.min_confidence)
        self._engines = threading.local()  # an engine keeps state during a call
        self._import_lock = threading.Lock()

    def score(self, item: RewardItem) -> float:
        """0 to 1. Raises :class:`~verl_omni.reward_loop.item.ScoreError` for an item without a text to be shown."""
        target = target_text(item.prompt, item.ground_truth)
        read = " ".join(self.read(item))
        return text_score(read, target, ignore_extra_text=self._config.ignore_extra_text)

    def read(self, item: RewardItem) -> list[str]:
        """The lines of text in the image."""
        return list(self._engine()(bgr_pixels(item.image)).txts or ())

    async def close(self) -> None:
        """Each engine ends with its thread."""

    def _engine(self) -> Any:
        if not hasattr(self._engines, "engine"):
            with self._import_lock:
                from rapidocr import RapidOCR

                self._engines.engine = RapidOCR(params=self._parameters)
        return self._engines.engine


def bgr_pixels(image: Tensor) -> np.ndarray:
    """uint8 [3, H, W], RGB, as the reader takes it: uint8 [H, W, 3], BGR."""
    return image.flip(0).permute(1, 2, 0).cpu().contiguous().numpy()


def engine_parameters(min_confidence: float) -> dict[str, Any]:
    """Options of RapidOCR. A model that is named by its file is never downloaded.

    Raises :class:`~verl_omni.workers.config.ConfigError` if the installed RapidOCR brings other models.
    """
    spec = importlib.util.find_spec("rapidocr")
    folder = Path(spec.origin).parent / "models" if spec and spec.origin else Path("rapidocr/models")
    for name in MODELS.values():
        if not (folder / name).is_file():
            raise ConfigError(f"the ocr scorer needs {folder / name}, which comes with rapidocr 3.10; install that")
    return {
        "Global.log_level": "critical",
        "Global.text_score": min_confidence,
        "Global.use_cls": False,
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # images are read side by side
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        **{f"{stage}.model_path": str(folder / name) for stage, name in MODELS.items()},
    }
