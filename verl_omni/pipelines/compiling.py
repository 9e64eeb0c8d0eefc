"""What is compiled of a pipeline, and how: few graphs, made once.

Blocks of one kind share their graphs. Sizes are symbolic, so rows that join and leave, and other text lengths, need no
new graph; only a single row, and text with padding, have graphs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.compile import regionally_compile
from vllm_omni.diffusion.data import OmniDiffusionConfig

GRAPHS_A_FUNCTION = 64
"""torch._dynamo gives a function up after 8 graphs by default and runs it eagerly from then on, without an error. The
blocks of SD3.5 are of three kinds; each has graphs for one row and for many, with and without LoRA."""


def compile_modules(transformer: nn.Module, others: Iterable[nn.Module], od_config: OmniDiffusionConfig) -> None:
    """Compile `transformer` as the engine's configuration says, and each of `others` as a whole; lazily."""
    import torch._dynamo

    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, GRAPHS_A_FUNCTION)
    dynamic = od_config.diffusion_compile_dynamic
    if od_config.diffusion_compile_granularity == "full":
        transformer.compile(dynamic=dynamic)
    else:
        regionally_compile(transformer, dynamic=dynamic)
    for module in others:
        module.forward = _any_batch(torch.compile(module.forward))


def _any_batch(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`compiled` without a graph of its own for each number of rows of its first argument.

    Only that is symbolic: convolutions whose image size is symbolic too take three times as long to compile.
    """

    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        return compiled(rows, *args, **kwargs)

    return forward
