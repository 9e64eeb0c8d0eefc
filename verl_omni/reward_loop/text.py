"""How near a text that was read comes to the text that should be there."""

from __future__ import annotations

import re
import unicodedata

from verl_omni.reward_loop.item import ScoreError

_DOUBLE = re.compile(r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»|「([^」]*)」')
_SINGLE = re.compile(r"(?<!\w)'([^']+(?:'(?=\w)[^']+)*)'(?!\w)|‘([^’]+(?:’(?=\w)[^’]+)*)’(?!\w)")
"""A single quote between letters is an apostrophe."""


def quoted_text(prompt: str) -> str | None:
    """The parts of `prompt` in double quotes, else those in single quotes, joined by spaces; None without any."""
    for pattern in (_DOUBLE, _SINGLE):
        quoted = ["".join(filter(None, match.groups())) for match in pattern.finditer(prompt)]
        if found := [text for text in quoted if text.strip()]:
            return " ".join(found)
    return None


def target_text(prompt: str, ground_truth: str | None) -> str:
    """The text that an image should show: `ground_truth`, else what is quoted in `prompt`.

    Raises :class:`~verl_omni.reward_loop.item.ScoreError` if there is none.
    """
    target = ground_truth if ground_truth is not None else quoted_text(prompt)
    if target is None:
        raise ScoreError(
            f"the prompt {prompt!r} has no text in quotes and no ground_truth; "
            'write the text to be shown in double quotes, such as a sign that says "OPEN"'
        )
    if not normalised(target):
        raise ScoreError(f"the text to be shown is empty: {target!r}")
    return target


def normalised(text: str) -> str:
    """`text` in lower case and without white space, with full-width and the like made plain (NFKC)."""
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: how many characters to insert, delete or replace to turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, from_a in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, from_b in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (from_a != from_b))
    return row[-1]


def text_score(read: str, target: str, *, ignore_extra_text: bool = False) -> float:
    """1 - min(d, |target|) / |target|, with d the edit distance of the normalised texts: 1 equal, 0 nothing alike.

    With `ignore_extra_text`, d is 0 if the target is part of what was read, as in the OCR reward of Flow-GRPO (Liu et
    al., 2025). The target must not be empty.
    """
    read, target = normalised(read), normalised(target)
    if ignore_extra_text and target in read:
        return 1.0
    return 1.0 - min(edit_distance(read, target), len(target)) / len(target)
