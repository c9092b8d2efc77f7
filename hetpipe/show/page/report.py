"""The report on a plan: one HTML page that asks for no other file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files

from hetpipe.planning.alternatives import (
    EQUAL,
    RULES,
    Alternative,
    MovedCut,
    equal_split,
    moved_cuts,
    other_rules,
    what_if,
)
from hetpipe.show.draw import Given
from hetpipe.show.page import sections
from hetpipe.show.page.glossary import glossary, linked
from hetpipe.show.page.html import escaped, paragraph, section
from hetpipe.show.picture.theme import definitions, style
from hetpipe.show.words import origin

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
TITLES = {
    "words": "In words", "picture": "Picture", "moves": "Move a cut", "timeline": "Timeline", "memory": "Memory",
    "time": "Time", "proof": "Proof", "price": "Price", "measured": "Measured", "front": "Front", "rules": "Partitioners",
    "changes": "What if", "glossary": "Glossary",
}  # fmt: skip


def report_page(
    shown: Given, *, compare: bool = True, what_if: bool = True, progress: Callable[[str], None] = lambda _: None
) -> str:
    """The page. With profile and cluster it compares with the equal split; with other partitioners and with moved cuts
    (`compare`), and plans other clusters (`what_if`), which takes seconds: `progress` is told what is done."""
    predicted = shown.predicted()
    rules, how, changed = _compared(shown, RULES if compare else EQUAL, what_if, progress)
    equal, cuts = equal_split(rules), list[MovedCut]()
    scene = shown.scene(predicted, equal.plan if equal is not None else None)
    if compare and predicted is not None and shown.problem is not None:
        progress("moving cuts")
        cuts = moved_cuts(shown.plan, *shown.problem, [lane.replicas for lane in scene.lanes])
    body = [
        sections.words(scene), sections.picture(scene), sections.moves(scene, cuts),
        sections.timeline(scene, predicted, shown.measured), sections.memory(scene, predicted), sections.time(scene),
        sections.proof(scene), sections.price(scene), sections.against(scene, predicted, shown.measured),
        sections.front(shown.front), sections.rules(scene, rules), sections.changes(how, changed, shown.plan.global_batch),
    ]  # fmt: skip
    body = [*map(linked, body), section("glossary", "Glossary", glossary())]
    there = [(name, title) for name, title in TITLES.items() if any(f'<section id="{name}"' in part for part in body)]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in there)
    title = escaped(f"{shown.plan.model}: the plan")
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f'<title>{title}</title>\n<link rel="icon" href="data:,">',
        f"<style>{_asset('style.css')}{style()}</style>\n</head>\n<body>",
        '<a class="skip" href="#main">Skip to the plan</a>',
        f'<svg width="0" height="0" style="position:absolute" aria-hidden="true">{definitions()}</svg>',
        f"<header><h1>{title}</h1>{paragraph(origin(shown.plan), kind='note')}",
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main id="main">',
        *(part for part in body if part),
        f"</main>\n<script>{_asset('script.js')}</script>\n</body>\n</html>\n",
    ])  # fmt: skip


def _compared(
    shown: Given, names: Sequence[str], changes: bool, progress: Callable[[str], None]
) -> tuple[list[Alternative], str, list[Alternative]]:
    if shown.problem is None:
        return [], "", []
    progress("other partitioners")
    rules = other_rules(shown.plan, *shown.problem, names)
    how, changed = what_if(shown.plan, *shown.problem, progress) if changes else ("", [])
    return rules, how, changed


def _asset(name: str) -> str:
    return files("hetpipe.show.page").joinpath(name).read_text("utf-8")
