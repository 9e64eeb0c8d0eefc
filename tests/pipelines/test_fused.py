"""Fused parts of transformer blocks against float64 formulas and against the stock modules they stand in for."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl_omni.pipelines.fused.add_lora import add_lora
from verl_omni.pipelines.fused.join_qkv import Rotation, join_qkv
from verl_omni.pipelines.fused.linear_gelu import linear_gelu
from verl_omni.pipelines.fused.modulate import modulate

EPS = 1e-6


def angles(tokens: int, width: int) -> Tensor:
    return torch.polar(torch.ones(tokens, width // 2), torch.rand(tokens, width // 2) * 6)


def exact(packed: Tensor, part: int, weight: Tensor | None, turn: Tensor | None, heads: int) -> Tensor:
    """Part `part` of packed projections [B, N, 3·H·D] as [B, N, H, D] float64, normed with `weight`, times `turn`."""
    x = packed.double().unflatten(-1, (3, heads, -1))[:, :, part]
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    if turn is not None:
        x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn[:, None]).flatten(-2)
    return x


@given(
    batch=st.integers(1, 3),
    text=st.integers(0, 4),
    image=st.integers(1, 5),
    heads=st.integers(1, 3),
    width=st.sampled_from([2, 4, 8]),
    rotate=st.booleans(),
)
def test_joined_projections_are_those_of_the_formula(batch, text, image, heads, width, rotate):
    torch.manual_seed(batch + 10 * text)
    packed = [torch.randn(batch, tokens, 3 * heads * width) for tokens in (text, image)]
    weights = [torch.rand(width) + 0.5 for _ in range(4)]
    turns = [angles(tokens, width) for tokens in (text, image)] if rotate else [None, None]
    rotation = Rotation.of(*turns) if rotate else None
    joined = join_qkv(packed[0] if text else None, packed[1], tuple(weights), rotation, heads=heads, eps=EPS)
    for part, result in enumerate(joined):
        streams = [
            exact(packed[i], part, None if part == 2 else weights[2 * i + part], None if part == 2 else turns[i], heads)
            for i in range(2)
        ]
        torch.testing.assert_close(result.double(), torch.cat(streams, dim=1), rtol=1e-5, atol=1e-5)


@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 4),
    width=st.sampled_from([4, 6]),
    residuals=st.integers(0, 2),
    modulations=st.integers(1, 2),
)
def test_modulation_is_that_of_the_formula(batch, tokens, width, residuals, modulations):
    torch.manual_seed(batch + 10 * tokens)
    x = torch.randn(batch, tokens, width)
    added = [(torch.randn(batch, width), torch.randn(batch, tokens, width)) for _ in range(residuals)]
    pairs = [(torch.randn(batch, width), torch.randn(batch, width)) for _ in range(modulations)]
    exact = x.double() + sum(gate.double()[:, None] * residual.double() for gate, residual in added)
    centred = exact - exact.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    h, *results = modulate(x, pairs, added, eps=EPS)
    torch.testing.assert_close(h.double(), exact, rtol=1e-5, atol=1e-5)
    for result, (shift, scale) in zip(results, pairs, strict=True):
        wanted = unit * (1 + scale.double()[:, None]) + shift.double()[:, None]
        torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_linear_layer_with_its_gelu_is_that_of_the_formula():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)
    y = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear_gelu(x, weight, bias).double(), gelu(y), rtol=1e-5, atol=1e-5)


def gelu(y: Tensor) -> Tensor:
    return 0.5 * y * (1 + (math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)).tanh())


@given(
    tokens=st.integers(1, 5),
    rank=st.integers(1, 5),
    parts=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3),
    activate=st.booleans(),
)
def test_a_lora_is_added_to_its_columns_as_in_the_formula(tokens, rank, parts, activate):
    torch.manual_seed(tokens)
    activate &= len(parts) == 1 and parts[0][1]
    x, out = torch.randn(tokens, 6), torch.randn(tokens, sum(width for width, _ in parts))
    exact, a, b, starts, start = out.double(), [], [], [], 0
    for width, has_lora in parts:
        if has_lora:
            a.append(torch.randn(rank, 6))
            b.append(torch.randn(width, rank))
            starts.append(start)
            exact[:, start : start + width] += x.double() @ a[-1].double().T @ b[-1].double().T
        start += width
    if a:
        out = add_lora(out, x, a, b, starts, gelu=activate)
    torch.testing.assert_close(out.double(), gelu(exact) if activate else exact, rtol=1e-5, atol=1e-5)


def test_operators_tell_the_compiler_their_shapes_and_strides():
    torch.manual_seed(0)
    torch.library.opcheck(linear_gelu, (torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)))
    packed = [torch.randn(2, tokens, 3 * 2 * 4) for tokens in (3, 5)]
    weights = [torch.rand(4) for _ in range(4)]
    for angle in (None, torch.rand(8, 2)):
        torch.library.opcheck(torch.ops.verl_omni.join_qkv.default, (*packed, *weights, angle, angle, 2, EPS))
    x, rows = torch.randn(2, 3, 8), [torch.randn(2, 8)]
    strided = torch.randn(2, 8, 3).transpose(1, 2)  # as patches come out of a convolution
    for tokens in (x, strided):
        for gates, residuals in (([], []), (rows, [x + 1])):
            torch.library.opcheck(torch.ops.verl_omni.modulate.default, (tokens, gates, residuals, rows, rows, EPS))
