"""Text for a line of a log or of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def one_line(text: object) -> str:
    """`text`, as ``str`` gives it, with a space for each run of white space and none at its ends."""
    return " ".join(str(text).split())


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings, as overrides write them, each after `prefix`, with their values."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
