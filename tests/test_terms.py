"""The terms of pictures and reports: the glossary explains them, and a page links to each."""

from __future__ import annotations

import re

import pytest

from hetpipe.predict.idle import CAUSES
from hetpipe.show.page.glossary import glossary, linked
from hetpipe.show.terms import TERMS, in_short, term
from tests.support.commands import ROOT

GLOSSARY = ROOT / "hetpipe/show/glossary.md"


def told() -> dict[str, str]:
    """What the glossary says of each term, without its marks and links."""
    parts = re.split(r"^### (.+)$", GLOSSARY.read_text("utf-8"), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "").replace("*", "") for text in parts[2::2])
    return {name.lower(): " ".join(text.split()) for name, text in zip(parts[1::2], plain, strict=True)}


@pytest.mark.parametrize("name", TERMS)
def test_pictures_and_reports_say_what_the_glossary_says(name: str) -> None:
    assert told()[name.lower()].startswith(TERMS[name])
    assert in_short(name).endswith(TERMS[name].split(". ")[0].rstrip(".")[1:])
    assert not re.search(r"[*`\[\]]|See ", TERMS[name])


def test_the_glossary_has_each_term_once_by_the_alphabet_and_in_short() -> None:
    names = re.findall(r"^### (.+)$", GLOSSARY.read_text("utf-8"), flags=re.MULTILINE)
    assert names == sorted(set(names), key=lambda name: re.sub(r"\W", " ", name.lower()))
    assert [name for name, text in told().items() if not 0 < len(text.split(". ")[0]) <= 150] == []


def test_terms_are_found_however_they_are_written() -> None:
    assert (term("1f1b"), term("GAP"), term("nothing")) == ("1F1B", "gap", None)
    assert {cause for cause in CAUSES if term(cause) is None} == {"overhead"}


def test_the_first_use_of_a_term_in_a_section_leads_to_it() -> None:
    section = (
        "<section><h2>gap</h2><p>Gap: the gap of replicas</p><svg><text>link</text></svg><th scope=col>idle: link</th></section>"
    )
    assert linked(section) == (
        '<section><h2>gap</h2><p><a class="term" href="#term-gap">Gap</a>: the gap of '
        '<a class="term" href="#term-replica">replicas</a></p><svg><text>link</text></svg>'
        '<th scope=col>idle: <a class="term" href="#term-link">link</a></th></section>'
    )
    assert linked("<p>a &amp; linked, bystep &lt;gapless</p>") == "<p>a &amp; linked, bystep &lt;gapless</p>"


def test_every_link_of_a_page_has_its_entry() -> None:
    entries = set(re.findall(r'id="(term-[^"]+)"', glossary()))
    assert len(entries) == len(TERMS)
    page = linked("".join(f"<p>{name}</p>" for name in TERMS))
    assert set(re.findall(r'href="#(term-[^"]+)"', page)) == entries
