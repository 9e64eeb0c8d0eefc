"""Prompt files: what each row asks for, as keyword arguments of a request, and what its rewards need."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from verl_omni.workers.config import ConfigError
from verl_omni.workers.config.base import nearest, unknown_key
from verl_omni.workers.rollout.request import RolloutRequest

logger = logging.getLogger(__name__)

ROW_KEYS = frozenset(item.name for item in fields(RolloutRequest)) - {"request_id"}
"""What a row may set for its requests: everything a request takes."""
REWARD_KEYS = frozenset(("ground_truth", "data_source", "extra_info"))
"""What a row may set for its rewards."""
_TEXT_KEYS = ("prompt", "negative_prompt")
_REWARD_MODEL = "reward_model"


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt."""

    values: Mapping[str, Any]
    """Keys of `ROW_KEYS` that the row sets; None where it says null."""
    source: str
    """``file:row``, for messages; lines count from 1, as do rows of a parquet file."""
    ground_truth: str | None = None
    """What a reward compares the image with, such as the text to be written; JSON if the file holds no text there."""
    data_source: str = ""
    """Name of the data set, by which a reward may choose its rule."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else a reward reads."""

    @property
    def prompt(self) -> str | None:
        """The prompt's text; None if the row gives token ids only."""
        return self.values.get("prompt")


def read_prompts(
    files: Sequence[str | Path], max_samples: int | None = None, *, key: str = "data.val_files"
) -> list[PromptRow]:
    """The rows of all files, in order, `max_samples` at most. Keys are checked; :func:`check_values` is for values.

    ``.txt``: a prompt a line, blank lines skipped. ``.jsonl``: an object a line, of `ROW_KEYS` and `REWARD_KEYS`.
    ``.parquet``: verl's schema, with chat messages in ``prompt`` and the ground truth in ``reward_model``; columns that
    are neither are ignored, as is null in any column. `key` names the files in messages.

    Raises :class:`ConfigError` naming file and line for what can't be read, an unknown key, or a file without prompts.
    """
    rows: list[PromptRow] = []
    for file in map(Path, files):
        read = _READERS.get(file.suffix.lower())
        if read is None:
            raise ConfigError(f"{key}: {file} must end in one of {', '.join(_READERS)}")
        if not file.is_file():
            raise ConfigError(f"{key}: there is no file {file}")
        before = len(rows)
        rows += read(file)
        if len(rows) == before:
            raise ConfigError(f"{key}: {file} holds no prompt")
    return rows[:max_samples]


def check_values(rows: Sequence[PromptRow]) -> None:
    """Raise :class:`ConfigError`, with file and row, for a value of another type than its key takes.

    Whether the value can be served, only the model's adapter knows.
    """
    for row in rows:
        for key, value in row.values.items():
            accepts, what = _TYPES[_KINDS[key]]
            if value is not None and not accepts(value):
                shown = f"{value!r}"
                raise ConfigError(f"{row.source}: {key} must be {what}, got {shown[:60]}; correct it or leave it out")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _are_integers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_integer, value))


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a text"),
    "int": (_is_integer, "an integer"),
    "float": (_is_number, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "TokenIds": (_are_integers, "a list of integers"),
    "tuple[int, int]": (lambda value: _are_integers(value) and len(value) == 2, "two integers [lo, hi]"),
}
"""Type of a request's field → what of JSON it may be, in code and in words."""
_KINDS = {item.name: str(item.type).removesuffix(" | None") for item in fields(RolloutRequest)}


def _read_txt(file: Path) -> Iterator[PromptRow]:
    for source, line in _lines(file):
        yield PromptRow(values={"prompt": line}, source=source)


def _read_jsonl(file: Path) -> Iterator[PromptRow]:
    for source, line in _lines(file):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: no valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f'{source}: must be an object such as {{"prompt": "…", "seed": 1}}, got {line[:60]}')
        known = ROW_KEYS | REWARD_KEYS
        for key in values:
            if key not in known:
                raise ConfigError(f"{source}: {unknown_key(key, known)}")
        yield _row(values, source)


def _read_parquet(file: Path) -> Iterator[PromptRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        known = ROW_KEYS | REWARD_KEYS | {_REWARD_MODEL}
        columns = [name for name in names if name in known]
        for name in names:  # other columns are others' business, but not what looks like a slip
            if name not in known and (near := nearest(name, known)):
                logger.warning("%s: the column %s is not read; did you mean %s?", file, name, near)
        if not {"prompt", "prompt_token_ids"} & set(columns):
            raise ConfigError(f"{file}: has no column prompt; there are {', '.join(names)}")
        rows = table.read(columns=columns).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{file}: no readable parquet file: {error}") from error
    for number, row in enumerate(rows, 1):
        values = {key: value for key, value in row.items() if value is not None}
        reward_model = values.pop(_REWARD_MODEL, None)
        if isinstance(reward_model, dict):
            values.setdefault("ground_truth", reward_model.get("ground_truth"))
        yield _row(values, f"{file}:{number}")


_READERS: dict[str, Callable[[Path], Iterable[PromptRow]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """``file:line`` and content of the lines that are not blank."""
    try:
        content = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not readable as UTF-8 text: {error}") from error
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield f"{file}:{number}", line.strip()


def _row(values: dict[str, Any], source: str) -> PromptRow:
    texts = {key: _user_text(values[key], key, source) for key in _TEXT_KEYS if isinstance(values.get(key), list)}
    requested = {key: value for key, value in values.items() if key not in REWARD_KEYS}
    rewards = {key: values[key] for key in REWARD_KEYS & values.keys() if values[key] is not None}
    for key in {"ground_truth", "data_source"} & rewards.keys():
        if not isinstance(rewards[key], str):
            rewards[key] = json.dumps(rewards[key], ensure_ascii=False, default=str)
    if not isinstance(rewards.get("extra_info", {}), dict):
        raise ConfigError(f"{source}: extra_info must be an object, got {rewards['extra_info']!r}")
    return PromptRow(values={**requested, **texts}, source=source, **rewards)


def _user_text(messages: list[Any], key: str, source: str) -> str:
    """What the user says last in a chat."""
    for message in reversed(messages):
        content = message.get("content") if isinstance(message, dict) and message.get("role") == "user" else None
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            content = "".join(part for part in parts if isinstance(part, str))
        if isinstance(content, str):
            return content
    raise ConfigError(
        f'{source}: {key} must be a text, or messages of which one has "role": "user" and a text "content"'
    )
