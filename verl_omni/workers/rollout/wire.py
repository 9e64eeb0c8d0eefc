"""Tensors on their way through Ray's object store.

Ray copies a torch tensor several times to send it. The bytes of a numpy array it keeps in shared memory as they are,
where every process of the machine reads them without a copy: so tensors travel as bytes.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from verl_omni.workers.rollout.request import RolloutError, RolloutSample


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as bytes."""

    data: np.ndarray
    """uint8 [bytes]."""
    dtype: torch.dtype
    """What the bytes are."""
    shape: tuple[int, ...]
    """Of the tensor."""


def pack(tensors: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """`tensors`, on any device, ready to be sent. They share memory with what is returned if they can."""
    return {name: _pack(tensor) for name, tensor in tensors.items()}


def unpack(packed: Mapping[str, PackedTensor | Tensor]) -> dict[str, Tensor]:
    """What :func:`pack` was given, on the host. Only to be read: the memory is Ray's.

    Tensors that were sent as they are stay so.
    """
    return {name: _unpack(item) for name, item in packed.items()}


def buckets(tensors: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """`tensors` in order, in groups of at most `size` bytes; a larger one is a group of its own.

    They are taken out of `tensors`: who sends each group before the next never holds all of them twice.
    """
    bucket: dict[str, Tensor] = {}
    filled = 0
    for name in list(tensors):
        tensor = tensors.pop(name)
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = tensor
        filled += tensor.nbytes
    if bucket:
        yield bucket


def pack_results(results: Sequence[RolloutSample | RolloutError]) -> list[RolloutSample | RolloutError]:
    """`results` with all tensors packed, to be sent together to :func:`unpack_results`.

    A tensor that several samples share, as those of a prompt do the embeddings, is sent once.
    """
    return _changed(results, _pack)


def unpack_results(results: Sequence[RolloutSample | RolloutError]) -> list[RolloutSample | RolloutError]:
    """What :func:`pack_results` was given; shared is what was shared, all else has storage of its own."""
    return _changed(results, lambda item: _unpack(item).clone())


def _changed(results: Sequence[RolloutSample | RolloutError], change: Any) -> list[Any]:
    """`results` with every tensor of the samples, packed or not, changed; each once."""
    made: dict[Hashable, Any] = {}

    def once(item: Tensor | PackedTensor) -> Any:
        # An engine in this process gives each sample tensor objects of its own, some of them over the same memory.
        of = id(item) if isinstance(item, PackedTensor) else (item.data_ptr(), item.dtype, item.shape, item.stride())
        if of not in made:
            made[of] = change(item)
        return made[of]

    return [result if isinstance(result, Exception) else _mapped(result, once) for result in results]


def _mapped(sample: RolloutSample, change: Any) -> RolloutSample:
    changed: dict[str, Any] = {}
    for knob in dataclasses.fields(sample):
        value = getattr(sample, knob.name)
        if isinstance(value, Mapping):
            changed[knob.name] = {name: change(item) for name, item in value.items()}
        elif hasattr(value, "dtype"):
            changed[knob.name] = change(value)
    return dataclasses.replace(sample, **changed)


def _pack(tensor: Tensor) -> PackedTensor:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return PackedTensor(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def _unpack(item: PackedTensor | Tensor) -> Tensor:
    import torch

    if isinstance(item, torch.Tensor):
        return item
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(item.data).view(item.dtype).reshape(item.shape)
