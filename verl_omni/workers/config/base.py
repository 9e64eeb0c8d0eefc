"""How a config dataclass is built from a mapping and how one value of it is checked.

Every message names the full key, so that it can be copied into an override. Numbers may come as strings, which is what
quoting on a command line makes of them; a bool is never a number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import operator
import os
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
MAX_NAME, MAX_PATH = 255, 4096
"""Bytes that Linux allows a file name and a path, the latter with the NUL at its end."""
MAX_DEPTH = 64
"""Mappings and lists within each other that a configuration may have; ours has six."""
NEAR = 0.6
"""Similarity from which a key counts as a misspelling of another (difflib's own default)."""
MANY_KEYS = 40
"""Above so many known keys, only those most like an unknown one are told."""


class ConfigError(ValueError):
    """The configuration asks for what cannot be; the message names the key and what to write instead."""


def build(cls: type[T], mapping: Mapping[str, Any] | None, prefix: str) -> T:
    """Make the dataclass `cls`, and the dataclasses in it, from a nested mapping.

    Missing keys take their defaults. `prefix` is the dotted key of the mapping, empty at the root. Raises
    :class:`ConfigError` for a key that is no field (naming the nearest one), for something that is no mapping, and
    for whatever the dataclass rejects.
    """
    values = as_mapping(prefix, mapping)
    if not prefix:
        _check_depth("", values, MAX_DEPTH)
    prefix = f"{prefix}." if prefix else ""
    hints = typing.get_type_hints(cls)
    names = field_names(cls)
    for key in values:
        if key not in names:
            raise ConfigError(unknown_key(f"{prefix}{key}", [prefix + name for name in _dotted_names(cls)]))
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = item.default is item.default_factory is dataclasses.MISSING
        if dataclasses.is_dataclass(hints[item.name]) and (required or item.name in values):
            values[item.name] = build(hints[item.name], values.get(item.name), prefix + item.name)
        if required and values.get(item.name) is None:
            raise ConfigError(f"{prefix}{item.name} is required; add {prefix}{item.name}=…")
    return cls(**values)


def _check_depth(key: str, value: Any, left: int) -> None:
    """Raise :class:`ConfigError` for what would exhaust the stack wherever it is copied or written."""
    if left == 0:
        raise ConfigError(f"{key[:80]}… is nested more than {MAX_DEPTH} deep; write it flatter")
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for name, item in items:
        _check_depth(f"{key}.{name}".lstrip("."), item, left - 1)


def as_mapping(key: str, value: Any) -> dict[Any, Any]:
    """`value` as a dict of its own; null is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping of keys, got {value!r}")
    return dict(value or {})


def field_names(cls: type) -> tuple[str, ...]:
    """Names of the fields of a dataclass."""
    return tuple(f.name for f in dataclasses.fields(cls))


def _dotted_names(cls: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for name in field_names(cls):
        if dataclasses.is_dataclass(hints[name]):
            yield from _dotted_names(typing.cast(type, hints[name]), f"{prefix}{name}.")
        else:
            yield prefix + name


def nearest(key: str, known: Collection[str], cutoff: float = NEAR) -> str | None:
    """The one of `known` (dotted) whose last part is most like the last part of `key`; None if none is near."""
    by_leaf: dict[str, str] = {}
    for name in sorted(known, key=lambda name: name.count(".")):
        by_leaf.setdefault(name.rpartition(".")[2], name)
    match = difflib.get_close_matches(key.rpartition(".")[2], list(by_leaf), n=1, cutoff=cutoff)
    return by_leaf[match[0]] if match else None


def unknown_key(key: str, known: Collection[str]) -> str:
    """The message about a (dotted) key that is not one of `known`: the nearest, or what may stand in its place."""
    for name in sorted(known):  # the end of a path, written without its beginning
        if f".{key}." in f"{name}.":
            return f"{key} is not a known key; did you mean {name[: name.index(f'.{key}')]}.{key}?"
    prefix = key[: key.rfind(".") + 1]
    places = {name.removeprefix(prefix).split(".")[0] for name in known if name.startswith(prefix)}
    near = nearest(key, known) or nearest(key, {prefix + place for place in places})
    if near is not None:
        return f"{key} is not a known key; did you mean {near}?"
    if len(places) > MANY_KEYS:
        alike = difflib.get_close_matches(key.rpartition(".")[2], sorted(places), n=5, cutoff=0)
        return f"{key} is not a known key; known: {', '.join(alike)} and {len(places) - len(alike)} more"
    return f"{key} is not a known key; known: {', '.join(sorted(places))}"


def integer(key: str, value: Any, *, low: int, null: str = "") -> Any:
    """`value` as an int of at least `low`. `null` says what None means where None is accepted (returned as it is)."""
    accepted = f"an integer of at least {low}" + (f", or null for {null}" if null else "")
    if value is None and null:
        return None
    number = value
    if isinstance(value, str):
        try:
            number = int(value.strip())
        except ValueError:
            raise ConfigError(f"{key}={value!r} must be {accepted}") from None
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise ConfigError(f"{key}={_shown(value)} must be {accepted}")
    number = operator.index(number)
    if number < low:
        raise ConfigError(f"{key}={number} must be {accepted}")
    return number


def number(
    key: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    null: str = "",
) -> Any:
    """`value` as a finite float within `low` … `high`, and more than `above`; see :func:`integer`."""
    bounds = "" if low == -math.inf else f" of at least {low:g}" if high == math.inf else f" from {low:g} to {high:g}"
    if above != -math.inf:
        bounds = f" above {above:g}" + ("" if high == math.inf else f" and at most {high:g}")
    accepted = f"a finite number{bounds}" + (f", or null for {null}" if null else "")
    if value is None and null:
        return None
    result = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            result = float(value)
    if not (math.isfinite(result) and low <= result <= high and result > above):
        raise ConfigError(f"{key}={_shown(value)} must be {accepted}")
    return result


def flag(key: str, value: Any, *, null: str = "") -> Any:
    """`value` as a bool; see :func:`integer`."""
    if isinstance(value, bool) or (value is None and null):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ConfigError(f"{key}={_shown(value)} must be true or false" + (f", or null for {null}" if null else ""))


def choice(key: str, value: Any, choices: Collection[str], *, null: str = "") -> Any:
    """`value` as one of `choices`; see :func:`integer`."""
    if (isinstance(value, str) and value in choices) or (value is None and null):
        return value
    near = nearest(value, choices) if isinstance(value, str) else None
    hint = f"; did you mean {near}?" if near else ""
    allowed = ", ".join(choices) + (f", or null for {null}" if null else "")
    raise ConfigError(f"{key}={_shown(value)} must be one of {allowed}{hint}")


def text(key: str, value: Any, *, null: str = "") -> Any:
    """`value` as a string that is not empty; see :func:`integer`."""
    if (isinstance(value, str) and value.strip()) or (value is None and null):
        return value
    raise ConfigError(
        f"{key}={_shown(value)} must be a text that is not empty" + (f", or null for {null}" if null else "")
    )


def path(key: str, value: Any, *, null: str = "") -> Any:
    """`value` as a text that can name a file or a folder; see :func:`integer`."""
    name = text(key, value, null=null)
    if name is None:
        return None
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise ConfigError(f"{key}={_short(name)} holds a character that no file name can have; leave it out")
    if len(encoded) >= MAX_PATH or any(len(part) > MAX_NAME for part in encoded.split(b"/")):
        raise ConfigError(
            f"{key}={_short(name)} is too long: {MAX_NAME} bytes at most between two /, fewer than {MAX_PATH} in all"
        )
    return name


def texts(key: str, value: Any, *, what: str, null: str = "") -> Any:
    """`value` as a list of texts, none of them empty; a single text stands for a list of one. `what` is one of them.

    See :func:`integer`.
    """
    if value is None and null:
        return None
    items = [value] if isinstance(value, str) else value
    if isinstance(items, (list, tuple)) and items and all(isinstance(item, str) and item.strip() for item in items):
        return list(items)
    raise ConfigError(
        f"{key}={_shown(value)} must be a {what} or a list of them" + (f", or null for {null}" if null else "")
    )


def paths(key: str, value: Any, *, null: str = "") -> Any:
    """`value` as a list of file names, of which each is a :func:`path`; a single one stands for a list of one."""
    names = texts(key, value, what="file name", null=null)
    return None if names is None else [path(key, name) for name in names]


def _shown(value: Any) -> str:
    """As it would be written in an override."""
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    )


def _short(name: str) -> str:
    shown = f"{name!r}"
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
