"""Text for a line of a log or of a table."""

from __future__ import annotations


def one_line(text: object) -> str:
    """`text`, as ``str`` gives it, with a space for each run of white space and none at its ends."""
    return " ".join(str(text).split())
