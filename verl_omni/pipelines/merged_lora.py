"""A LoRA added to the weights instead of run beside them.

Of each layer that the LoRA names, W + s · B·A is computed in float32, rounded once to the weight's dtype, and written
into the live parameter. The storage stays where it is and no layer is wrapped, so nothing is compiled or captured
again, and a forward costs what it costs without a LoRA. W is always the exact base: the first merge copies it to the
host, and every later one starts from that copy, so swaps leave no drift and the base comes back bit for bit. The copies
take as much host memory as the weights of the layers that were ever merged, in every worker, until the worker ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.utils.torch_utils import PIN_MEMORY

_PINNED_BLOCK = 2**30
"""Bytes pinned at a time: each allocation is rounded up to a power of two, which would double many weights."""
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class LoraSlot:
    """Where a LoRA module acts: `width` rows, from `start` on, of the weight of a layer."""

    layer: LinearBase
    start: int
    width: int


@dataclass(frozen=True, eq=False)
class LoraPart:
    """What a LoRA adds to some rows of the weight of `layer`: `factor` · `b` · `a`."""

    layer: nn.Module
    rows: slice
    a: Tensor
    """[r, in], float32, on the host."""
    b: Tensor
    """[number of rows, r], float32, on the host."""
    factor: float


class MergedLora:
    """Which LoRA is in the weights of a model, and what they are without it."""

    def __init__(self) -> None:
        self._base: dict[nn.Module, Tensor] = {}
        self._parts: list[LoraPart] = []
        self._host = _HostMemory()

    @torch.no_grad()
    def merge(self, parts: Iterable[LoraPart]) -> None:
        """Add `parts` to the base weights, in place of those before; none: the base.

        If that fails, say for want of memory, the parts before are in the weights again.
        """
        before, parts = self._parts, list(parts)
        try:
            for part in parts:
                self._keep_base(part.layer)
            self._write(parts)
        except BaseException:
            self._write(before)
            raise
        self._parts = parts

    @contextmanager
    def unmerged(self) -> Iterator[None]:
        """For a loader of weights: inside they are the base, and what they are at its end is the new base."""
        with torch.no_grad():
            self._write([])
            try:
                yield
            finally:
                for layer, base in self._base.items():
                    base.copy_(_weight(layer))
                self._write(self._parts)

    def _keep_base(self, layer: nn.Module) -> None:
        if layer not in self._base:
            weight = _weight(layer)
            self._base[layer] = self._host.like(weight).copy_(weight)

    def _write(self, parts: Sequence[LoraPart]) -> None:
        by_layer: dict[nn.Module, list[LoraPart]] = {}
        for part in parts:
            by_layer.setdefault(part.layer, []).append(part)
        for layer, base in self._base.items():
            weight = _weight(layer)
            weight.copy_(_merged(base, by_layer[layer], weight.device) if layer in by_layer else base)


def _merged(base: Tensor, parts: Sequence[LoraPart], device: torch.device) -> Tensor:
    """`base` with `parts` added, float32, on `device`."""
    merged = base.to(device, copy=True).float()  # moved before it is widened: half the bytes
    for part in parts:
        merged[part.rows].addmm_(part.b.to(device), part.a.to(device), alpha=part.factor)
    return merged


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.data


class _HostMemory:
    """Memory for copies on the host, pinned where the device needs that for fast transfers."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def like(self, tensor: Tensor) -> Tensor:
        """Room for a copy of `tensor`."""
        if not PIN_MEMORY:
            return torch.empty_like(tensor, device="cpu")
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._free.numel():
            self._free = torch.empty(max(size, _PINNED_BLOCK), dtype=torch.uint8, pin_memory=True)
        taken, self._free = self._free[: tensor.nbytes], self._free[size:]
        return taken.view(tensor.dtype).view(tensor.shape)


def read_parts(path: str, slots: Mapping[str, LoraSlot], scale: float) -> list[LoraPart]:
    """The PEFT adapter in folder `path`, as it is to be merged at `scale`; `slots` by module name.

    Config and names are read as vLLM reads them. Raises ValueError for an adapter that is more than matrices A and B,
    or that adds to the same rows twice.
    """
    helper = PEFTHelper.from_local_dir(path, max_position_embeddings=None)
    try:
        helper.validate_legal(LoRAConfig(max_lora_rank=max(get_args(MaxLoRARanks))))
    except ValueError as error:
        raise ValueError(f"the LoRA cannot be merged: {error}") from error
    leaves = {name.rpartition(".")[2] for name in slots}
    model = LoRAModel.from_local_checkpoint(
        path, leaves, helper, lora_model_id=1, device="cpu", dtype=torch.float32, model_vocab_size=None
    )
    parts: list[LoraPart] = []
    taken: dict[LinearBase, list[tuple[int, int, str]]] = {}
    for name, lora in model.loras.items():
        slot = slots[name.removeprefix("transformer.")]
        stop = slot.start + slot.width
        others = taken.setdefault(slot.layer, [])
        if twice := [other for start, end, other in others if slot.start < end and start < stop]:
            raise ValueError(f"the LoRA cannot be merged: {twice[0]} and {name} add to the same weight")
        others.append((slot.start, stop, name))
        rows = slice(slot.start, stop)
        parts.append(LoraPart(slot.layer, rows, lora.lora_a, lora.lora_b, scale * lora.scaling))
    return parts


def check_mergeable(slots: Mapping[str, LoraSlot]) -> None:
    """Raises ValueError naming the first layer whose parameter is not its whole, plain weight, or if there is none."""
    if not slots:
        raise ValueError("this pipeline has no layers that take a LoRA; use merge_lora=false")
    for name, slot in slots.items():
        if problem := _obstacle(slot.layer):
            raise ValueError(f"a LoRA cannot be merged into {name}: {problem}; use merge_lora=false")


def _obstacle(layer: LinearBase) -> str | None:
    if not isinstance(layer.quant_method, UnquantizedLinearMethod):
        return f"its weight is quantized ({type(layer.quant_method).__name__})"
    if layer.tp_size > 1 or isinstance(layer.weight, DTensor):
        return "its weight is spread over several devices"
    if layer.weight.shape != (layer.output_size, layer.input_size):
        return f"its weight is {list(layer.weight.shape)}, packed or offloaded"
    return None
