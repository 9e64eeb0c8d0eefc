"""Hands a policy to the engine's workers as files in shared memory: they may live in other processes.

What is in such a file is in memory once, however many processes of the machine map it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.utils.locks import held
from verl_omni.workers.config.lora import LORA_CONFIG, LORA_WEIGHTS, check_lora_adapter, read_lora_config

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = "/dev/shm"
_PREFIX = "verl_omni_staged_"
_HELD_WITHIN_S = 60.0
"""A folder is held right after it was made; one that was made just now is left alone."""


@dataclass(frozen=True, kw_only=True)
class LoraAdapter:
    """A PEFT adapter in memory."""

    config: Mapping[str, Any]
    """What its ``adapter_config.json`` would hold."""
    tensors: Mapping[str, Tensor]
    """Named as in its ``adapter_model.safetensors``, on any device."""


@contextmanager
def staging_folder(size: int) -> Iterator[Path]:
    """A folder with room for `size` bytes, in shared memory if that has it, and gone afterwards.

    Those that processes left there which died meanwhile are removed: each may hold all weights of a model.
    """
    for place in (SHARED_MEMORY, tempfile.gettempdir()):
        _remove_abandoned(Path(place))
    roomy = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > size
    chosen = SHARED_MEMORY if roomy else None
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=chosen) as folder, held(Path(folder)):
        yield Path(folder)


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone this moment
            is_ours = folder.is_dir() and not folder.is_symlink()
            if is_ours and time.time() - folder.stat().st_mtime > _HELD_WITHIN_S:
                with held(folder) as abandoned:
                    if abandoned:
                        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class WeightsFile:
    """The named tensors of a safetensors file, for whoever takes them one by one. Nothing is read before."""

    path: Path
    """Of the file."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


@contextmanager
def staged_weights(named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
    """The tensors as one safetensors file; a :class:`WeightsFile` is that already, and stays."""
    from safetensors.torch import save_file

    if isinstance(named_tensors, WeightsFile):
        yield named_tensors.path
        return
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    # One by one, so that a generator which gathers each from a sharded model never holds two on the device.
    for name, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() > tensor.nbytes:
            tensor = tensor.clone()  # the file format refuses tied weights and views
        storages.add(storage.data_ptr())
        tensors[name] = tensor
    with staging_folder(sum(tensor.nbytes for tensor in tensors.values())) as folder:
        path = folder / "weights.safetensors"
        save_file(tensors, path)
        tensors.clear()  # the file is the copy that is left while it is read
        yield path


def remove_staged(file: Path) -> None:
    """Remove the folder of a staged file whose process died before it could. Anything else is left alone."""
    if file.parent.name.startswith(_PREFIX):
        shutil.rmtree(file.parent, ignore_errors=True)


@contextmanager
def staged_lora(source: str | Path | LoraAdapter, key_map: Mapping[str, str]) -> Iterator[Path]:
    """A PEFT adapter, in a folder or in memory, as a folder with its modules under the engine's names.

    `key_map`: trailing part of a PEFT module name → of the engine's. Raises ValueError if `source` holds no adapter,
    one that :func:`check_lora_adapter` refuses, or one with a weight that is not finite.
    """
    from safetensors.torch import load_file, save_file
    from torch import float64

    if isinstance(source, LoraAdapter):
        check_lora_adapter(source.config, source.tensors, "the LoRA adapter")
        config = dict(source.config)
        # copied, as the file format refuses tied weights and views
        given = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in source.tensors.items()}
    else:
        config, given = read_lora_config(Path(source)), load_file(Path(source) / LORA_WEIGHTS)
    for key, tensor in given.items():
        if not tensor.sum(dtype=float64).isfinite():
            raise ValueError(f"the LoRA adapter's {key} holds NaN or infinity; load one that has not diverged")
    tensors = {engine_name(key, key_map): tensor for key, tensor in given.items()}
    # The engine wraps what the config names; by the tensors it can't miss one, whatever pattern the trainer wrote.
    config["target_modules"] = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
    with staging_folder(sum(tensor.nbytes for tensor in tensors.values())) as folder:
        save_file(tensors, folder / LORA_WEIGHTS)
        (folder / LORA_CONFIG).write_text(json.dumps(config))
        yield folder


@asynccontextmanager
async def in_thread(manager: AbstractContextManager[Path]) -> AsyncIterator[Path]:
    """A context manager that writes files, entered and left off the event loop."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


def engine_name(key: str, key_map: Mapping[str, str]) -> str:
    """The LoRA tensor name `key` with the trailing part of its module name mapped."""
    module, marker, rest = key.partition(".lora_")
    for theirs, ours in key_map.items():
        if module == theirs or module.endswith(f".{theirs}"):
            return module.removesuffix(theirs) + ours + marker + rest
    return key
