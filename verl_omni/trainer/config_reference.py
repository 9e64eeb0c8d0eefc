"""The page docs/reference/config.md, made from the config dataclasses.

python -m verl_omni.trainer.config_reference > docs/reference/config.md
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from verl_omni.trainer.diffusion.settings import TrainSettings
from verl_omni.utils.text import one_line
from verl_omni.workers.config.reward import SCORER_TYPES, RewardConfig

HEAD = """\
# Configuration reference

All keys of `python -m verl_omni.trainer.main_diffusion`, with their defaults. Any of them is set on the command line as
`key=value` or `++key=value`; `--cfg job --resolve`, as the last argument, shows the configuration of a run unchecked.
Texts leave out the prefix `actor_rollout_ref.` of other keys. What the rollout's keys do together is told in
[Rollouts in batches](../start/rollout_batching.md), and which symbol of the algorithm a key stands for in
[FlowGRPO](../start/flowgrpo.md).

This page is made from the code; after a change of a setting:

```bash
python -m verl_omni.trainer.config_reference > docs/reference/config.md
```
"""
REQUIRED = "required"
SCORER = "NAME"
"""Stands for the name that the user gives to a scorer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One table of keys."""

    title: str
    """Markdown."""
    summary: str
    """What the section is for; may be empty."""
    rows: list[tuple[str, str, str]]
    """Full key, default as it is written in an override, meaning in Markdown."""


def sections() -> Iterator[Section]:
    """Those of the page, in order."""
    yield from _sections(TrainSettings, "")


def _scorers() -> Iterator[Section]:
    for kind, cls in SCORER_TYPES.items():
        key = f"reward.scorers.{SCORER}"
        rows = [(f"{key}.type", kind, "The type."), *_rows(cls, key)]
        yield Section(title=f"`{key}` of type `{kind}`", summary=_markdown(_own_doc(cls)), rows=rows)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section in sections():
        lines = [f"## {section.title}", "", *([section.summary, ""] if section.summary else [])]
        lines += ["| key | default | meaning |", "|---|---|---|"]
        lines += [
            f"| `{key}` | {default if default == REQUIRED else f'`{default}`'} | {meaning} |"
            for key, default, meaning in section.rows
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def written(value: Any) -> str:
    """As an override writes a value."""
    if isinstance(value, str):
        return value if value.isprintable() else json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value)


def _sections(cls: type, prefix: str) -> Iterator[Section]:
    """The section of `cls`, if it has keys of its own, and those of the dataclasses in it."""
    rows = list(_rows(cls, prefix))
    if rows:
        yield Section(title=f"`{prefix}`", summary=_summary(cls), rows=rows)
    for name, hint in _fields(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _sections(typing.cast(type, hint), f"{prefix}.{name}".lstrip("."))
    if cls is RewardConfig:
        yield from _scorers()


def _rows(cls: type, prefix: str) -> Iterator[tuple[str, str, str]]:
    docs = {name: doc for base in reversed(cls.__mro__[:-1]) for name, doc in field_docs(base).items()}
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(_fields(cls)[item.name]):
            continue
        if item.default is not dataclasses.MISSING:
            default = written(item.default)
        elif item.default_factory is not dataclasses.MISSING:
            default = written(item.default_factory())
        else:
            default = REQUIRED
        yield f"{prefix}.{item.name}".lstrip("."), default, _markdown(docs[item.name])


def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Name → the docstring under it, of the fields that `cls` itself defines."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    body: Sequence[ast.stmt] = definition.body if isinstance(definition, ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(doc.value.value)
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


def _own_doc(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def _summary(cls: type) -> str:
    """The class's docstring without the key that it begins with."""
    text = _markdown(re.sub(r"^``[\w.]+``[.:]?\s*", "", _own_doc(cls)))
    return text[:1].upper() + text[1:]


def _markdown(doc: str) -> str:
    """One line of Markdown from a docstring."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", one_line(doc)).replace("``", "`")
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
