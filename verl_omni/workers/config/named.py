"""What users register by name and choose by a key of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from verl_omni.workers.config.base import choice

T = TypeVar("T")


class NamedRegistry(Generic[T]):
    """Classes or functions by name; `key` is the dotted key that chooses one."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._entries: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Decorator. Raises ValueError if another one has the name; the same one may come again, by a reload."""

        def decorate(entry: Any) -> Any:
            present = self._entries.setdefault(name, entry)
            if _path(present) != _path(entry):
                raise ValueError(
                    f"{name!r} is registered to {_path(present)} already; register {_path(entry)} as other"
                )
            self._entries[name] = entry
            return entry

        return decorate

    def get(self, name: str) -> T:
        """Raises :class:`ConfigError` naming those there are."""
        entry: T = self._entries[choice(self._key, name, tuple(self._entries))]
        return entry


def _path(entry: Any) -> str:
    return f"{entry.__module__}.{entry.__qualname__}"
