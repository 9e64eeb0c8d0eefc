"""Reads the docs: fenced blocks, tables, commands."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BATCHING = DOCS / "start/rollout_batching.md"
INTEGRATING = DOCS / "contributing/integrating_a_diffusion_model.md"
WORKED_OUT = DOCS / "contributing/integrating_a_stepwise_continuous_batching_model.md"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.text.strip().splitlines()[0][:40]}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; cells are Markdown."""

    heading: str
    """Of the section that it stands in."""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def blocks(*pages: Path, language: str) -> list[Block]:
    """Fenced blocks of `language` in `pages`, or in all pages."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = ((page, match) for page in pages or PAGES for match in fence.finditer(page.read_text(encoding="utf-8")))
    return [Block(page=page, language=m[1], text=m[2]) for page, m in found if m[1] == language]


def block(page: Path, language: str, containing: str) -> str:
    """The one block of `page` in which `containing` stands."""
    (found,) = (b.text for b in blocks(page, language=language) if containing in b.text)
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as argument lists, without the environment variables that are set before them."""
    lines = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, line)) for line in lines]


def console(text: str) -> tuple[str, str]:
    """Script and output of a console block ``$ … python -c "⏎ script ⏎" ⏎ output``."""
    head, _, output = text.partition('\n"\n')
    return head.partition('python -c "\n')[2], output


def tables(page: Path) -> list[Table]:
    """All tables of `page`."""
    found: list[Table] = []
    heading, rows = "", list[tuple[str, ...]]()
    for line in [*_outside_fences(page), ""]:
        if line.startswith("|"):
            rows.append(tuple(cell.strip() for cell in line.strip().strip("|").split("|")))
        elif rows:
            found.append(Table(heading=heading, header=rows[0], rows=tuple(rows[2:])))
            rows = []
        if line.startswith("#"):
            heading = line.lstrip("# ")
    return found


def table(page: Path, *header: str, heading: str | None = None) -> Table:
    """The one table of `page` whose header begins with these cells, in the section `heading` if given."""
    (found,) = (t for t in tables(page) if t.header[: len(header)] == header and heading in (None, t.heading))
    return found


def code_spans(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return "\n".join(_outside_fences(page))


def matches(pattern: str, message: str) -> bool:
    """Whether `message` reads like `pattern`, in which … stands for anything."""
    return re.search(".*".join(map(re.escape, pattern.split("…"))), message, re.DOTALL) is not None


def documented_messages(heading: str) -> list[str]:
    """The messages in the symptoms of one troubleshooting table."""
    cells = [row[0] for row in table(BATCHING, "symptom", heading=heading).rows]
    return [code_spans(cell)[0] for cell in cells if cell.startswith("`") and " " in code_spans(cell)[0]]


def _outside_fences(page: Path) -> Iterator[str]:
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield line
