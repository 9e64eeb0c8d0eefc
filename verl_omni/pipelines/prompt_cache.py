"""Prompt embeddings by token ids: each distinct prompt is encoded once while it is cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

PromptEmbeds = dict[str, Tensor]
"""Unpadded tensors of one prompt: ``prompt_embeds`` [L, D] and what else the model takes."""

NEGATIVE = "negative_"
"""Prefix of what belongs to the negative prompt, where both prompts' tensors stand side by side."""

MAX_BYTES = 1 << 30  # about 2000 Qwen-Image prompts or 400 SD3.5 ones; a training step rarely has more distinct ones


class PromptCache:
    """Least-recently-used cache bounded in bytes of device memory."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, PromptEmbeds] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, encode: Callable[[], PromptEmbeds]) -> tuple[PromptEmbeds, bool]:
        """The embeddings of `key` and whether `encode` had to run. The caller must not write to them."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key], False
        embeds = encode()
        self._entries[key] = embeds
        self._bytes += _nbytes(embeds)
        while self._bytes > self.max_bytes and len(self._entries) > 1:
            self._bytes -= _nbytes(self._entries.popitem(last=False)[1])
        return embeds, True

    def clear(self) -> None:
        """Forget everything; call it when the text encoder's weights change."""
        self._entries.clear()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)


def with_masks(embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`embeddings` with a mask for each sequence that comes without: all ones, as nothing is padded."""
    masks = {
        f"{name}_mask": torch.ones(len(value), dtype=torch.bool)
        for name, value in embeddings.items()
        if name.endswith("prompt_embeds") and value.ndim == 2
    }
    return {**masks, **embeddings}


def _nbytes(embeds: PromptEmbeds) -> int:
    return sum(tensor.nbytes for tensor in embeds.values())
