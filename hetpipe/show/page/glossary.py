"""The report's terms: where they are explained, and links from where they are used."""

from __future__ import annotations

import re

from hetpipe.show.page.html import escaped
from hetpipe.show.terms import PATTERN, TERMS, term

_PLAIN = re.compile(r"(<(p|li|th|td)(?: [^>]*)?>)([^<]+)(?=</\2>)")  # an element with nothing but text in it


def glossary() -> str:
    """The terms as a list of definitions, to which `linked` leads."""
    entries = (f'<dt id="{_anchor(name)}">{escaped(name)}</dt><dd>{escaped(text)}</dd>' for name, text in TERMS.items())
    return f"<dl>{''.join(entries)}</dl>"


def linked(section: str) -> str:
    """A section of the page with a link to the glossary where it first uses a term, in its paragraphs, lists and tables."""
    seen = set[str]()

    def link(match: re.Match[str]) -> str:
        name = term(match[1])
        if name is None or name in seen:
            return match[0]
        seen.add(name)
        return f'<a class="term" href="#{_anchor(name)}">{match[0]}</a>'

    return _PLAIN.sub(lambda found: found[1] + PATTERN.sub(link, found[3]), section)


def _anchor(name: str) -> str:
    return f"term-{name.lower().replace(' ', '-')}"
