"""The report on a plan: one HTML page that asks for no other file."""

from __future__ import annotations

from importlib.resources import files

from hetpipe.show.page.glossary import glossary, linked
from hetpipe.show.page.html import escaped, paragraph, section
from hetpipe.show.page.sections import (
    against_section,
    changes_section,
    front_section,
    memory_section,
    moves_section,
    picture_section,
    price_section,
    proof_section,
    rules_section,
    run_section,
    time_section,
    timeline_section,
    words_section,
)
from hetpipe.show.picture.loss import RunCurve
from hetpipe.show.picture.theme import definitions, style
from hetpipe.show.words import origin_text
from hetpipe.study.study import Study

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
TITLES = {
    "run": "Run",
    "words": "In words",
    "picture": "Picture",
    "moves": "Move a cut",
    "timeline": "Timeline",
    "memory": "Memory",
    "time": "Time",
    "proof": "Proof",
    "price": "Price",
    "measured": "Measured",
    "front": "Front",
    "rules": "Partitioners",
    "changes": "What if",
    "glossary": "Glossary",
}


def report_page(study: Study, run: RunCurve | None = None) -> str:
    """The page: a section for each thing that the study knows, behind one of the run by this plan, if there was one."""
    scene, predicted, measured = study.scene, study.predicted, study.measured
    differ = study.profile is not None and bool(study.profile.lengths)
    body = [
        run_section(run),
        words_section(scene),
        picture_section(scene),
        moves_section(scene, study.cuts),
        timeline_section(scene, predicted, measured),
        memory_section(scene, predicted),
        time_section(scene),
        proof_section(scene),
        price_section(scene),
        against_section(scene, predicted, measured, differ=differ),
        front_section(study.front),
        rules_section(scene, study.rules),
        changes_section(study.changes, study.plan.global_batch),
    ]
    body = [*map(linked, body), section("glossary", "Glossary", glossary())]
    there = [(name, title) for name, title in TITLES.items() if any(f'<section id="{name}"' in part for part in body)]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in there)
    title = escaped(f"{study.plan.model}: the plan" if run is None else f"{run.model}: the run and its plan")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f'<title>{title}</title>\n<link rel="icon" href="data:,">',
            f"<style>{_asset('style.css')}{style()}</style>\n</head>\n<body>",
            '<a class="skip" href="#main">Skip to the plan</a>',
            f'<svg width="0" height="0" style="position:absolute" aria-hidden="true">{definitions()}</svg>',
            f"<header><h1>{title}</h1>{paragraph(origin_text(study.plan), kind='note')}",
            f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main id="main">',
            *(part for part in body if part),
            f"</main>\n<script>{_asset('script.js')}</script>\n</body>\n</html>\n",
        ]
    )


def _asset(name: str) -> str:
    return files("hetpipe.show.page").joinpath(name).read_text("utf-8")
