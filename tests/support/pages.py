"""The pages of the documentation as data: their blocks of code, the commands in them, their links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer

from hetpipe.cli.commands import app
from tests.support.commands import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
AFTER = re.compile(r"^<!-- (?:in the folder of|after) (\S+) -->$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its language and text."""

    language: str
    text: str

    @property
    def name(self) -> str:
        """The file that the first comment names, behind a `#!` if there is one."""
        lines = self.text.splitlines()
        return lines[lines[0].startswith("#!")].removeprefix("# ")

    @property
    def commands(self) -> list[list[str]]:
        """A shell block's lines as words, comments left out."""
        return [words for line in self.text.splitlines() if (words := shlex.split(line, comments=True))]


class Page(NamedTuple):
    """A page by its path in the repository."""

    name: str

    @property
    def text(self) -> str:
        return (ROOT / self.name).read_text("utf-8")

    @property
    def prose(self) -> str:
        """All but its blocks."""
        return FENCE.sub("", self.text)

    @property
    def blocks(self) -> list[Block]:
        return [Block(*found) for found in FENCE.findall(self.text)]

    @property
    def after(self) -> list[Page]:
        """The pages whose files lie in the folder where a reader follows this one."""
        paths = [(ROOT / self.name).parent / name for name in AFTER.findall(self.text)]
        return [Page(path.resolve().relative_to(ROOT).as_posix()) for path in paths]

    @property
    def links(self) -> list[str]:
        return LINK.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """What a link may lead to within the page: its headings, as GitHub and mkdocs both write them."""
        names = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in HEADING.findall(self.prose))
        return {re.sub(r"\s", "-", name) for name in names}


def pages() -> list[Page]:
    """README.md and all of docs/."""
    return [Page("README.md"), *(Page(p.relative_to(ROOT).as_posix()) for p in sorted((ROOT / "docs").rglob("*.md")))]


def linked() -> list[Page]:
    """All pages with links between them."""
    beside = [p for folder in ("models", "examples", "bench/*") for p in sorted(ROOT.glob(f"{folder}/README.md"))]
    alone = (Page(name) for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "hetpipe/show/glossary.md"))
    return [*pages(), *alone, *(Page(p.relative_to(ROOT).as_posix()) for p in beside)]


def commands(page: Page) -> Iterator[list[str]]:
    """Every command line of a page: of its blocks, and spans of its prose that are one."""
    for block in page.blocks:
        if block.language == "sh":
            yield from block.commands
        elif block.language == "bash":
            yield from (words for words in block.commands if "hetpipe" in words)
    for span in SPAN.findall(page.prose):
        words = span.split()
        if words[0] == "make" or (words[0] == "hetpipe" and not set(span) & set("…|=ABCDEFGHIJKLMNOPQRSTUVWXYZ")):
            yield words


def check_hetpipe(words: list[str]) -> None:
    """Whether `hetpipe words…` has these options and arguments."""
    command: Any = typer.main.get_command(app)
    rest = words
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    if hasattr(command, "commands") or not rest:  # `hetpipe --version`, or a command's name only
        assert all(any(word in p.opts for p in command.params) or word == "--help" for word in rest), words
    else:
        command.make_context("hetpipe", list(rest))
