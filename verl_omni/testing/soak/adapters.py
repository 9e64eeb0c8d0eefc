"""The rollout adapters with faults planted in their hooks: requests whose prompt names one bring it along."""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

import torch
from torch import Tensor

from verl_omni.pipelines.hooks import Ids
from verl_omni.pipelines.prompt_cache import PromptEmbeds
from verl_omni.pipelines.qwen_image.rollout import QwenImageRollout
from verl_omni.pipelines.rows import RowBatch, rollout_of
from verl_omni.pipelines.sd3.rollout import StableDiffusion3Rollout
from verl_omni.testing.soak.faults import SCARCE_ROWS, planted_fault


class PlantedFaults:
    """Left of an adapter."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if multiprocessing.parent_process() is not None:  # who reads the log knows the planted errors
            logging.getLogger("verl_omni").setLevel(logging.CRITICAL)
        self._misshapen: set[tuple[Ids, ...]] = set()
        self._most_rows: float = float("inf")

    def text_to_ids(self, text: str) -> tuple[Ids, ...]:
        """Raises for the faults "tokenize" and "exit"."""
        fault = planted_fault(text)
        if fault == "tokenize":
            raise RuntimeError("planted in tokenize")
        if fault == "exit":
            raise SystemExit("planted in tokenize")
        ids: tuple[Ids, ...] = super().text_to_ids(text)  # type: ignore[misc]
        if fault == "embeds":
            self._misshapen.add(ids)
        return ids

    def encode(self, ids: tuple[Ids, ...], max_sequence_length: int) -> PromptEmbeds:
        """Embeddings too narrow to be batched, or to run at all, for the fault "embeds"."""
        embeds: PromptEmbeds = super().encode(ids, max_sequence_length)  # type: ignore[misc]
        if ids in self._misshapen:
            return {**embeds, "prompt_embeds": embeds["prompt_embeds"][:, :-1]}
        return embeds

    def guided_velocity(self, batch: RowBatch) -> Tensor:
        """Raises for the fault "forward"; NaN rows for "nan"."""
        faults = [fault_of(state) for state in batch.states]
        if "forward" in faults:
            raise RuntimeError("planted in forward")
        self._most_rows = 0 if "no memory" in faults else SCARCE_ROWS if "scarce" in faults else float("inf")
        velocity: Tensor = super().guided_velocity(batch)  # type: ignore[misc]
        if "nan" not in faults:
            return velocity
        bad = [fault == "nan" for fault, s in zip(faults, batch.states, strict=True) for _ in rollout_of(s).rows]
        return velocity.index_fill(0, torch.tensor(bad, device=velocity.device).nonzero()[:, 0], float("nan"))

    def predict_velocity(self, latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Out of memory for the faults "no memory" and, over too many rows, "scarce"."""
        if len(latents) > self._most_rows:
            raise torch.OutOfMemoryError(f"planted: no memory for {len(latents)} rows")
        velocity: Tensor = super().predict_velocity(latents, *args, **kwargs)  # type: ignore[misc]
        return velocity

    def step_scheduler(self, state: Any, noise_pred: Tensor | None, **kwargs: Any) -> None:
        """Raises for the fault "step"."""
        if fault_of(state) == "step":
            raise RuntimeError("planted in step")
        super().step_scheduler(state, noise_pred, **kwargs)  # type: ignore[misc]

    def post_decode(self, state: Any, **kwargs: Any) -> Any:
        """Raises for the fault "finish"."""
        if fault_of(state) == "finish":
            raise RuntimeError("planted in finish")
        return super().post_decode(state, **kwargs)  # type: ignore[misc]


def fault_of(state: Any) -> str | None:
    """The planted fault of an engine's request."""
    return planted_fault(state.prompt.get("prompt") if isinstance(state.prompt, dict) else state.prompt)


class SoakQwenImage(PlantedFaults, QwenImageRollout):
    """Qwen-Image with planted faults."""


class SoakStableDiffusion3(PlantedFaults, StableDiffusion3Rollout):
    """Stable Diffusion 3.5 with planted faults."""
