"""What is compiled of a pipeline, and how: few graphs, made once.

Blocks of one kind share their graphs. Sizes are symbolic, so rows that join and leave, and other text lengths, need no
new graph; only a single row, and text with padding, have graphs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

GRAPHS_A_FUNCTION = 64
"""torch._dynamo gives a function up after 8 graphs by default and runs it eagerly from then on, without an error. The
blocks of SD3.5 are of three kinds; each has graphs for one row and for many, with and without LoRA."""


def compile_modules(
    transformers: Iterable[nn.Module], others: Iterable[nn.Module], od_config: OmniDiffusionConfig, *, full_batch: int
) -> None:
    """Compile `transformers` as the engine's configuration says, and each of `others` as a whole; lazily.

    `others` take one tensor [B, ...], most often of `full_batch` rows.
    """
    from vllm_omni.diffusion.compile import regionally_compile

    dynamic = od_config.diffusion_compile_dynamic
    for transformer in transformers:
        if od_config.diffusion_compile_granularity == "full":
            transformer.compile(dynamic=dynamic)
        else:
            regionally_compile(transformer, dynamic=dynamic)
    for module in others:
        module.forward = _by_batch(module.forward, full=full_batch)


@contextmanager
def compile_settings() -> Iterator[None]:
    """Around calls of what is compiled, as that is when graphs are made; it holds for this thread.

    A function may have `GRAPHS_A_FUNCTION` graphs. Sizes that happen to be equal when one is made, as the rows of a
    batch and the tokens of a text, stay apart in it: else it would be for that number alone.
    """
    import torch._dynamo
    import torch.fx.experimental._config

    shapes: Any = torch.fx.experimental._config
    with torch._dynamo.config.patch(recompile_limit=GRAPHS_A_FUNCTION), shapes.patch(use_duck_shape=False):
        yield


def _by_batch(forward: Callable[..., Tensor], *, full: int) -> Callable[[Tensor], Tensor]:
    """`forward` of [B, ...], compiled once for B = `full` and once for all others (and for B = 1).

    With any symbolic size Inductor keeps the layout of convolutions, which costs an eighth of a VAE's time; so the
    batch that nearly all rows are in has a graph of its own. The image size is never symbolic: that takes three times
    as long to compile.
    """

    def whole(rows: Tensor) -> Tensor:
        return forward(rows)

    def part(rows: Tensor) -> Tensor:
        return forward(rows)

    static, symbolic = torch.compile(whole, dynamic=False), torch.compile(part)

    def run(rows: Tensor) -> Tensor:
        if len(rows) == full:
            return static(rows)
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        return symbolic(rows)

    return run
