"""Text encoders as CUDA graphs: for one prompt they are thousands of small kernels, and launching them takes longer
than running them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_GRAPHS = 4
"""Graphs kept: text lengths in use at a time. Each holds the activations of its encoders."""
_WARMUPS = 2
"""Calls before the capture, in which libraries set up what may not happen while capturing."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class GraphedEncoder:
    """Calls `encode` through a CUDA graph, one for each combination of the inputs' shapes.

    `encode` takes token ids, reads nothing back to the host, and its weights stay where they are. Where capturing
    fails, and where `enabled` is false, it is simply called.
    """

    def __init__(self, encode: Callable[..., tuple[Tensor, ...]], *, enabled: bool) -> None:
        self._encode = encode
        self._enabled = enabled
        self._graphs: OrderedDict[tuple[torch.Size, ...], _Graph] = OrderedDict()

    def __call__(self, *ids: Tensor) -> tuple[Tensor, ...]:
        """What `encode` returns for `ids`, in memory of its own."""
        if not self._enabled:
            return self._encode(*ids)
        key = tuple(x.shape for x in ids)
        try:
            held = self._graphs.get(key) or self._capture(key, ids)
        except RuntimeError as error:
            logger.warning("the text encoders cannot be captured as a CUDA graph and run eagerly: %s", error)
            self._enabled = False
            return self._encode(*ids)
        self._graphs.move_to_end(key)
        for mine, theirs in zip(held.inputs, ids, strict=True):
            mine.copy_(theirs)
        held.graph.replay()
        return tuple(output.clone() for output in held.outputs)

    def clear(self) -> None:
        """Drop the graphs and their memory; they are made again when needed."""
        self._graphs.clear()

    def _capture(self, key: tuple[torch.Size, ...], ids: tuple[Tensor, ...]) -> _Graph:
        inputs = tuple(x.clone() for x in ids)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                self._encode(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._encode(*inputs)
        held = self._graphs[key] = _Graph(graph, inputs, outputs)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return held
