"""A LoRA in the weights: exact, in place, and gone without a trace."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from verl_omni.pipelines import merged_lora
from verl_omni.pipelines.merged_lora import LoraPart, LoraSlot, MergedLora, check_mergeable, read_parts

WIDTH_IN, WIDTH_OUT, RANK = 48, 96, 8
Q, K = slice(0, 32), slice(32, 64)


def linear(dtype: torch.dtype, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(WIDTH_IN, WIDTH_OUT, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(WIDTH_OUT, WIDTH_IN, generator=torch.Generator().manual_seed(seed)))
    return layer


def part(layer: nn.Module, seed: int = 1, rows: slice = slice(0, WIDTH_OUT), factor: float = 0.3) -> LoraPart:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(RANK, WIDTH_IN, generator=generator)
    return LoraPart(layer, rows, a, torch.randn(rows.stop - rows.start, RANK, generator=generator) / 8, factor)


def exact(base: torch.Tensor, *parts: LoraPart) -> torch.Tensor:
    """The sum in float64."""
    total = base.double()
    for p in parts:
        total[p.rows] += p.factor * p.b.double() @ p.a.double()
    return total


def bits(layer: nn.Module) -> bytes:
    return layer.weight.detach().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_sum_is_rounded_once_to_the_weights_dtype(dtype):
    layer, merged = linear(dtype), MergedLora()
    base, added = layer.weight.detach().clone(), part(layer)
    merged.merge([added])
    total = exact(base, added)
    ulp = 2.0 ** total.abs().log2().floor() * torch.finfo(dtype).eps
    terms = base.double().abs() + (added.factor * added.b.double().abs() @ added.a.double().abs())
    float32_error = (RANK + 2) * torch.finfo(torch.float32).eps * terms
    assert ((layer.weight.double() - total).abs() <= ulp / 2 + float32_error).all()
    assert not torch.equal(layer.weight, base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_twenty_swaps_leave_no_drift_and_the_base_comes_back_bit_for_bit(dtype):
    layer, merged = linear(dtype), MergedLora()
    place, before = layer.weight.data_ptr(), bits(layer)
    for seed in range(20):
        merged.merge([part(layer, seed)])
        fresh = linear(dtype)
        MergedLora().merge([part(fresh, seed)])
        assert bits(layer) == bits(fresh) != before
    merged.merge([])
    assert bits(layer) == before and layer.weight.data_ptr() == place


def test_a_compiled_layer_is_not_compiled_again():
    layer, merged, graphs = linear(torch.float32), MergedLora(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled, x = torch.compile(layer, backend=backend), torch.randn(3, WIDTH_IN)
    base = layer.weight.detach().clone()
    for parts in ([], [part(layer, 1)], [part(layer, 2)], []):
        merged.merge(parts)
        torch.testing.assert_close(compiled(x), x @ exact(base, *parts).float().T)
    assert len(graphs) == 1


def test_parts_of_a_packed_layer_change_their_own_rows_only():
    layer, merged = linear(torch.bfloat16), MergedLora()
    base = layer.weight.detach().clone()
    parts = [part(layer, 1, Q), part(layer, 2, K)]
    merged.merge(parts)
    both = exact(base, *parts).to(torch.bfloat16)
    assert torch.equal(layer.weight[:64], both[:64]) and torch.equal(layer.weight[64:], base[64:])
    merged.merge(parts[:1])
    assert torch.equal(layer.weight[Q], both[Q]) and torch.equal(layer.weight[32:], base[32:])


def test_a_lora_on_other_layers_takes_the_one_before_out():
    first, second, merged = linear(torch.bfloat16, 1), linear(torch.bfloat16, 2), MergedLora()
    before = bits(first)
    merged.merge([part(first)])
    merged.merge([part(second)])
    assert bits(first) == before and bits(second) != bits(linear(torch.bfloat16, 2))


def test_a_merge_that_fails_half_way_leaves_the_one_before():
    first, second, merged = linear(torch.bfloat16, 1), linear(torch.bfloat16, 2), MergedLora()
    merged.merge([part(first)])
    before = bits(first), bits(second)
    with pytest.raises(RuntimeError):
        merged.merge([part(first, 5), part(second), part(second, rows=slice(0, WIDTH_OUT + 1))])
    assert (bits(first), bits(second)) == before
    merged.merge([])
    assert bits(first) == bits(linear(torch.bfloat16, 1))


@pytest.mark.parametrize("fails", [False, True])
def test_new_base_weights_get_the_lora_that_was_merged(fails):
    layer, merged = linear(torch.bfloat16), MergedLora()
    base, new = bits(layer), linear(torch.bfloat16, 7)
    merged.merge([part(layer)])
    loading = pytest.raises(OSError, match="ends here") if fails else nullcontext()
    with loading, merged.unmerged():
        assert bits(layer) == base
        with torch.no_grad():
            layer.weight.copy_(new.weight)
        if fails:
            raise OSError("the file ends here")
    MergedLora().merge([part(new)])
    assert bits(layer) == bits(new)
    merged.merge([])
    assert bits(layer) == bits(linear(torch.bfloat16, 7))


def test_copies_in_pinned_blocks_are_apart_and_aligned(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(merged_lora, "PIN_MEMORY", True)
    monkeypatch.setattr(merged_lora, "_PINNED_BLOCK", 300)
    monkeypatch.setattr(merged_lora.torch, "empty", lambda *size, pin_memory=False, **knobs: empty(*size, **knobs))
    host = merged_lora._HostMemory()
    tensors = [torch.full((n, 3), float(n), dtype=torch.bfloat16) for n in (1, 7, 11, 90, 2)]
    copies = [host.like(tensor).copy_(tensor) for tensor in tensors]
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert all(copy.is_contiguous() and copy.dtype == torch.bfloat16 for copy in copies)


def adapter(folder: Path, modules: tuple[str, ...], rows: dict[str, int], **config) -> str:
    tensors = {}
    for module in modules:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, WIDTH_IN, dtype=torch.bfloat16)
        out = rows.get(module, WIDTH_OUT)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, RANK, dtype=torch.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": [], **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def slots():
    layer = linear(torch.bfloat16)
    return {
        "block.to_qkv": LoraSlot(layer, 0, WIDTH_OUT),
        "block.to_q": LoraSlot(layer, 0, 32),
        "block.to_k": LoraSlot(layer, 32, 32),
        "proj_out": LoraSlot(linear(torch.bfloat16), 0, WIDTH_OUT),
    }


@pytest.mark.parametrize(("rslora", "alpha_over_rank"), [(False, 4 / RANK), (True, 4 / math.sqrt(RANK))])
def test_alpha_rank_and_scale_make_the_factor_and_parts_find_their_rows(tmp_path, slots, rslora, alpha_over_rank):
    modules = ("transformer.block.to_k", "proj_out")
    path = adapter(tmp_path, modules, {modules[0]: 32}, use_rslora=rslora)
    by_layer = {part.layer: part for part in read_parts(path, slots, scale=-2.0)}
    assert set(by_layer) == {slots["block.to_k"].layer, slots["proj_out"].layer}
    k = by_layer[slots["block.to_k"].layer]
    assert k.rows == K and k.a.shape == (RANK, WIDTH_IN) and k.b.shape == (32, RANK)
    assert k.a.dtype == k.b.dtype == torch.float32
    assert [part.factor for part in by_layer.values()] == [pytest.approx(-2.0 * alpha_over_rank)] * 2


@pytest.mark.parametrize("option", [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["proj_out"]}])
def test_an_adapter_that_is_more_than_two_matrices_is_refused(tmp_path, slots, option):
    assert set(option) <= set(PEFTHelper.__dataclass_fields__)
    with pytest.raises(ValueError, match="cannot be merged"):
        read_parts(adapter(tmp_path, ("proj_out",), {}, **option), slots, 1.0)


def test_a_layer_and_a_part_of_it_at_once_are_refused(tmp_path, slots):
    path = adapter(tmp_path, ("block.to_q", "block.to_qkv"), {"block.to_q": 32})
    with pytest.raises(ValueError, match=r"block\.to_\w+ and block\.to_\w+ add to the same weight"):
        read_parts(path, slots, 1.0)


def layer_of(**changes) -> LoraSlot:
    plain = dict(quant_method=UnquantizedLinearMethod(), tp_size=1, output_size=4, input_size=2)
    return LoraSlot(SimpleNamespace(weight=torch.zeros(4, 2), **plain | changes), 0, 4)


def test_whole_plain_weights_can_be_merged_into():
    check_mergeable({"a": layer_of(), "b": layer_of()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": object()}, "odd: its weight is quantized"),
        ({"tp_size": 2}, "odd: its weight is spread over several devices"),
        ({"input_size": 8}, r"odd: its weight is \[4, 2\], packed or offloaded"),
    ],
)
def test_what_cannot_be_merged_into_says_why_and_what_to_write(changes, message):
    with pytest.raises(ValueError, match=message + ".*; use merge_lora=false"):
        check_mergeable({"plain": layer_of(), "odd": layer_of(**changes)})
    with pytest.raises(ValueError, match="no layers that take a LoRA; use merge_lora=false"):
        check_mergeable({})
