"""Text encoders as CUDA graphs: for one prompt they are thousands of small kernels, and launching them takes longer
than running them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

logger = logging.getLogger(__name__)

MAX_GRAPHS = 4
"""Graphs kept: text lengths in use at a time. Each holds the activations of its encoders."""
_WARMUPS = 2
"""Calls before the capture, in which libraries set up what may not happen while capturing."""
_MOVING = ("enable_cpu_offload", "enable_layerwise_offload", "enable_distributed_layerwise_offload")
"""Options of the engine with which weights move: a graph knows them by their addresses."""


def can_graph(device: torch.device, od_config: OmniDiffusionConfig) -> bool:
    """Whether encoders may run as graphs: on CUDA, unless eager execution was asked for or weights move."""
    moving = any(getattr(od_config, option, False) for option in _MOVING)
    return device.type == "cuda" and not od_config.enforce_eager and not moving


@contextmanager
def beside() -> Iterator[Callable[[], None]]:
    """In a capture, the block's kernels run beside those that follow it, up to the call of what this yields.

    What the block reads must live until that call. Elsewhere the block runs as it stands: memory that two streams share
    needs more care than it is worth there.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        yield lambda: None
        return
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield lambda: current.wait_stream(side)


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class GraphedEncoder:
    """Calls `encode` through a CUDA graph, one for each combination of the inputs' shapes.

    `encode` takes token ids, reads nothing back to the host, and its weights stay where they are. Where `enabled` is
    false, and from the first capture that fails on, it is simply called.
    """

    def __init__(self, encode: Callable[..., tuple[Tensor, ...]], *, enabled: bool) -> None:
        self._encode = encode
        self._enabled = enabled
        self._graphs: OrderedDict[tuple[torch.Size, ...], _Graph] = OrderedDict()

    def __call__(self, *ids: Tensor) -> tuple[Tensor, ...]:
        """What `encode` returns for `ids`, in memory of its own. Raises what it raises."""
        key = tuple(x.shape for x in ids)
        if self._enabled and key not in self._graphs:
            self._keep(key, ids)
        held = self._graphs.get(key)
        if held is None:
            return self._encode(*ids)
        self._graphs.move_to_end(key)
        for mine, theirs in zip(held.inputs, ids, strict=True):
            mine.copy_(theirs)
        held.graph.replay()
        return tuple(output.clone() for output in held.outputs)

    def clear(self) -> None:
        """Drop the graphs and their memory; they are made again when needed."""
        self._graphs.clear()

    def _keep(self, key: tuple[torch.Size, ...], ids: tuple[Tensor, ...]) -> None:
        """Capture a graph for `key`, in place of the one that was not used for longest, or give graphs up."""
        try:
            self._graphs[key] = _capture(self._encode, ids)
        except torch.OutOfMemoryError:  # for want of memory now: this prompt runs without a graph
            self.clear()
        except RuntimeError as error:
            logger.warning("the text encoders cannot be captured as a CUDA graph and run eagerly: %s", error)
            self._enabled = False
            self.clear()
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)


def _capture(encode: Callable[..., tuple[Tensor, ...]], ids: tuple[Tensor, ...]) -> _Graph:
    inputs = tuple(x.clone() for x in ids)
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    # A capture that fails leaves its stream as the current one (torch/cuda/graphs.py); this block puts ours back.
    with torch.cuda.stream(side):
        for _ in range(_WARMUPS):
            encode(*inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the engine copy results meanwhile; only what this one does must be capturable.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            outputs = encode(*inputs)
    current.wait_stream(side)
    return _Graph(graph, inputs, outputs)
