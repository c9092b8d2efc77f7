"""The terms of pictures and reports, in plain words: read from glossary.md, which the documentation shows whole."""

from __future__ import annotations

import re
from pathlib import Path

# Those that pictures and reports use, in the order in which a report explains them
_USED = (
    *("step", "replica", "stage", "share", "micro-batch", "1F1B", "GPipe", "depth", "recompute", "offload", "fill and drain"),
    *(
        "slower stage",
        "slower optimizer",
        "link",
        "gradient sum",
        "equal split",
        "lower bound",
        "fluid bound",
        "gap",
        "peak memory",
    ),
)
_LINK = r"\[([^\]]+)\]\([^)]+\)"


def _plain(markdown: str) -> str:
    """A text without its marks, links, and sentences that only lead to another place."""
    text = re.sub(_LINK, r"\1", re.sub(rf"\bSee\s{_LINK}\.", "", markdown))
    return " ".join(re.sub(r"[`*]", "", text).split())


def _entries() -> dict[str, str]:
    """What glossary.md says of each of its terms, by its name in small letters."""
    _, *parts = re.split(r"^### (.+)\n", Path(__file__).with_name("glossary.md").read_text("utf-8"), flags=re.MULTILINE)
    return {name.lower(): _plain(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


_ENTRIES = _entries()
TERMS = {name: _ENTRIES[name.lower()] for name in _USED}
_NAMES = {name.lower(): name for name in TERMS}
PATTERN = re.compile(rf"\b({'|'.join(sorted(map(re.escape, _NAMES), key=len, reverse=True))})(e?s)?\b", re.IGNORECASE)


def term(name: str) -> str | None:
    """The term of this name, however it is written; None where there is none."""
    return _NAMES.get(name.lower())


def in_short(name: str) -> str:
    """What a term means, in its first sentence: `gap: how far a plan can be …`."""
    first = TERMS[_NAMES[name.lower()]].split(". ")[0].rstrip(".")
    return f"{name}: {first[0].lower()}{first[1:]}"
