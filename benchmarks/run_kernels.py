"""The fused kernels on a GPU: how far they are from float64 formulas, and what memory bandwidth they reach.

    python benchmarks/run_kernels.py [--out benchmarks/gpu_kernels.json]

Shapes are those of Qwen-Image at 512², SD3.5-medium at 384², and odd ones. Errors are relative,
‖out − exact‖ / ‖exact‖, beside those of the same formula in torch, which rounds like the modules that they replace.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_omni.pipelines.fused.add_lora import add_lora
from verl_omni.pipelines.fused.join_qkv import Rotation, join_qkv
from verl_omni.pipelines.fused.linear_gelu import linear_gelu
from verl_omni.pipelines.fused.modulate import modulate

HEADS, EPS = 24, 1e-6
JOINED = {"Qwen-Image": (4, 64, 1024, 128, True), "SD3.5": (8, 333, 576, 64, False), "odd": (3, 5, 9, 32, True)}
"""Name → rows, text tokens, image tokens, width of a head, rotated."""
MODULATED = {"Qwen-Image": (4, 1024, 3072, 1, 1), "SD3.5": (8, 576, 1536, 2, 2), "odd": (3, 7, 96, 0, 2)}
"""Name → rows, tokens, width, residuals, modulations."""
WITH_LORA = {
    "Qwen-Image, q k v": (4352, 3072, 3072, 3, 64, False),
    "SD3.5, q k v": (7272, 1536, 1536, 3, 64, False),
    "SD3.5, up": (7272, 1536, 6144, 1, 64, True),
    "odd": (77, 96, 200, 2, 8, False),
}
"""Name → tokens, inputs, outputs of a part, parts, rank, activated."""


def error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative error."""
    pairs = zip(results, exact, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def milliseconds(call: Callable[[], Any]) -> float:
    """Median of 20."""
    times = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[10]


def compare(name: str, operator: str, call: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """`call` on the GPU against itself in float64 and in torch, both on the host's implementation."""

    def cast(value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, Tensor):
            return value.cpu().to(dtype)
        if isinstance(value, Rotation):
            return Rotation(*(cast(item, dtype) for item in value))
        return type(value)(cast(item, dtype) for item in value) if isinstance(value, (list, tuple)) else value

    exact = call(*cast(list(arguments), torch.float64))
    plain = call(*cast(list(arguments), None))
    results = call(*arguments)
    moved = sum(t.nbytes for t in _tensors([*arguments, *results]))
    on_host = [result.cpu() for result in results]  # before the next call: some work in place
    took = milliseconds(lambda: call(*arguments))
    return {
        "operator": operator,
        "shape": name,
        "dtype": str(next(_tensors(list(arguments))).dtype).removeprefix("torch."),
        "error": error(on_host, exact),
        "error_of_torch": error(plain, exact),
        "ms": took,
        "gb_per_s": moved / took / 1e6,
    }


def with_lora(out: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], activated: bool) -> list[Tensor]:
    return [add_lora(out, x, a, b, [i * len(b[0]) for i in range(len(b))], gelu=activated)]


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def cases(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Every operator and shape, on fresh random inputs."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    rows = []
    for name, (b, text, image, width, rotate) in JOINED.items():
        turns = [torch.polar(torch.ones(n, width // 2), torch.rand(n, width // 2) * 6).cuda() for n in (text, image)]
        packed = [draw(b, n, 3 * HEADS * width) for n in (text, image)]
        norms = tuple(draw(width).abs() + 0.5 for _ in range(4))
        arguments = (*packed, norms, Rotation.of(*turns) if rotate else None)
        rows.append(compare(name, "join_qkv", lambda *a: join_qkv(*a, heads=HEADS, eps=EPS), arguments))
    for name, (b, n, width, residuals, modulations) in MODULATED.items():
        pairs = [(draw(b, width), draw(b, width)) for _ in range(modulations)]
        added = [(draw(b, width), draw(b, n, width)) for _ in range(residuals)]
        rows.append(
            compare(name, "modulate", lambda *a: modulate(*a, eps=EPS)[not a[2] :], (draw(b, n, width), pairs, added))
        )
    for name, (n, inputs, width, parts, rank, activated) in WITH_LORA.items():
        a = [draw(rank, inputs) * inputs**-0.5 for _ in range(parts)]
        b = [draw(width, rank) * rank**-0.5 for _ in range(parts)]
        arguments = (draw(n, parts * width), draw(n, inputs), a, b)
        rows.append(compare(name, "add_lora", functools.partial(with_lora, activated=activated), arguments))
    x, weight, bias = draw(4096, 1536), draw(6144, 1536) * 0.02, draw(6144)
    rows.append(compare("SD3.5", "linear_gelu", lambda *a: [linear_gelu(*a)], (x, weight, bias)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("gpu_kernels.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the kernels run on CUDA only; elsewhere their formulas in torch are used")
    torch.manual_seed(0)
    rows = [row for dtype in (torch.bfloat16, torch.float32) for row in cases(dtype)]
    record = {
        "command": " ".join(["python", "benchmarks/run_kernels.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "kernels": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{value:.3g}" if isinstance(value, float) else f"{value:<12}" for value in row.values()))


if __name__ == "__main__":
    main()
