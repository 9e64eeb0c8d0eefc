"""The policy that rollout servers serve, kept so that a fresh server gets it too."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_omni.workers.rollout.wire import pack

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True, kw_only=True)
class ServedLora:
    """A LoRA as the servers take it."""

    config: Mapping[str, Any]
    """Of PEFT."""
    tensors: ray.ObjectRef
    """To the packed tensors, by name."""
    scale: float
    """With which it runs."""


@dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    """What a server must be given to serve as the others do. What a training step sends is all of one kind."""

    version: int = 0
    """What samples carry."""
    weights: Sequence[ray.ObjectRef] = ()
    """To all weights of the transformer, packed, some by name in each; none: those of the checkpoint. While they are
    kept, so are the objects, in host memory or where Ray spills them to."""
    lora: ServedLora | None = None
    """On top of the weights."""

    def lora_arguments(self) -> tuple[Any, ...]:
        """Of the server's ``set_lora``. Raises ValueError without a LoRA."""
        if self.lora is None:
            raise ValueError("the policy has no LoRA")
        return self.version, self.lora.config, self.lora.tensors, self.lora.scale


async def put(tensors: Mapping[str, Any]) -> ray.ObjectRef:
    """`tensors` in Ray's object store."""
    import ray

    return await asyncio.to_thread(lambda: ray.put(pack(tensors)))
