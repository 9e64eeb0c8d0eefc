"""Secrets, kept out of what is logged and written."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_WORDS = r"api_?key|access_?key|private_?key|token|passw(?:or)?d|passphrase|secret|authorization|credentials?|cookie"
_NAME = re.compile(rf"(?:^|_)(?:{_WORDS}|auth)$")
_VARIABLE = re.compile(rf"(?:^|_)(?:{_WORDS}|key)$")
_SHORTEST = 8
"""Characters of a variable's value from which it is taken for a secret; shorter ones are words that stand anywhere."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/?#]*@")
_QUERY_VALUE = re.compile(r"(?<==)[^&#]+")
_HEADER = re.compile(
    r"(\bauthorization\b['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+)[^\s'\",;)}\]]+", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether what has that name, such as ``api_key``, ``hf_token`` or ``X-Auth-Token``, is to be hidden."""
    return _NAME.search(_words(name)) is not None


def is_secret_variable(name: str) -> bool:
    """The same of an environment variable, of which any ``…_KEY`` may hold a key."""
    return _VARIABLE.search(_words(name)) is not None


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the nested `config` with secrets hidden: by the name of their key, or as :func:`scrubbed` does."""
    return {str(key): _masked(str(key), value) for key, value in config.items()}


def scrubbed(text: str) -> str:
    """`text` with secrets hidden: user, password and all query values of an address, an Authorization header, and the
    values of this process's environment variables that are named like secrets."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and is_secret_variable(name):
            text = text.replace(value, HIDDEN)
    text = _URL.sub(lambda match: _plain_address(match[0]), text)
    return _HEADER.sub(rf"\1{HIDDEN}", text)


class ScrubbingFormatter(logging.Formatter):
    """Hides secrets in all that it formats, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of `record`."""
        return scrubbed(super().format(record))


def _masked(key: str, value: Any, hide: bool = False) -> Any:
    hide = hide or is_secret(key)
    if isinstance(value, Mapping):
        return {str(name): _masked(str(name), item, hide) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(key, item, hide) for item in value]
    if hide and not isinstance(value, bool) and value not in (None, ""):
        return HIDDEN
    return scrubbed(value) if isinstance(value, str) else value


def _plain_address(url: str) -> str:
    """`url` without user, password and query values."""
    start, mark, query = _USER.sub(f"{HIDDEN}@", url).partition("?")
    return start + mark + _QUERY_VALUE.sub(HIDDEN, query)


def _words(name: str) -> str:
    """``X-ApiKey`` → ``x_api_key``."""
    return _HUMP.sub("_", name).replace("-", "_").lower()
