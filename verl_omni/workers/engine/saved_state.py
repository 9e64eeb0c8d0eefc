"""torch's distributed checkpoints, read without running what may be hidden in them.

torch reads the list of tensors, and every value that is no tensor, with pickle, which runs whatever the file says. Here
the list may only name what torch writes there, and values are read with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath"},
}
"""Module → the names that the list may ask for, beside torch's dtypes."""
_NUMPY = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np._core.multiarray._reconstruct]  # type: ignore[attr-defined]
"""What the state of numpy's random numbers is made of."""


class SafeReader(FileSystemReader):
    """Of a checkpoint's folder. Raises ValueError, with the file's name, for a list that is none."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list of what the checkpoint holds."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Reads values that are no tensors as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one value into its place, in the bytes that torch's own planner expects."""
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def read_metadata(folder: Path) -> Metadata:
    """The list of what the checkpoint in `folder` holds. Raises ValueError, with the file's name, if it is none."""
    file = folder / METADATA
    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except Exception as error:  # whatever a broken pickle raises
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise ValueError(f"{file} holds no list of a checkpoint")
    return metadata


def read_own(file: Path) -> Any:
    """The plain data and tensors of `file`. Raises ValueError, with the file's name, if it can't be read."""
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a broken file raises
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def check_saved_state(folder: Path) -> None:
    """Raises ValueError, with the name of the file, if one of a checkpoint's files is missing, cut short or no part of
    it. Reads little: contents are not compared."""
    needed: dict[str, int] = {}
    for part in read_metadata(folder).storage_data.values():
        name = str(part.relative_path)
        if name != Path(name).name:
            raise ValueError(f"{folder / METADATA} names {name!r}, a file outside the checkpoint")
        needed[name] = max(needed.get(name, 0), part.offset + part.length)
    for name, size in needed.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < size:
            state = "is missing" if found is None else f"was cut short: it has {found} bytes of {size}"
            raise ValueError(f"{file} {state}")
    for file in folder.glob("rank_*.pt"):
        read_own(file)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()) and not (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)
