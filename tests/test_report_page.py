"""The report in a real browser: sections, no errors, nothing asked for, keyboard, slider. Skipped where there is no browser."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from docs.screenshots import FLAGS, chromium
from hetpipe.cli.commands import app
from hetpipe.files.units import human_seconds
from hetpipe.predict.timeline import Timeline
from hetpipe.show.draw import draw_plan
from hetpipe.show.page.report import TITLES
from hetpipe.study.cuts import moved_plan
from hetpipe.study.study import Study
from tests.support.plans_shown import demo, many, three, whole
from tests.test_front_chart import made

pytestmark = pytest.mark.slow
SECTIONS = set(TITLES) - {"price", "measured", "front", "proof"}  # which not every plan has
PLANS = {
    "three": (three, SECTIONS | {"price", "proof", "front"}),
    "demo": (demo, SECTIONS | {"measured"}),
    "many": (many, SECTIONS),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = chromium()
    if path is None:
        pytest.skip("no chromium is installed")
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module", params=PLANS)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path, set[str]]:
    make, sections = PLANS[request.param]
    shown = make()
    front = made([(2.0, 1.0, True, True), (1.0, 3.0, True, True), (3.0, 3.0, False, True)]) if request.param == "three" else None
    shown = whole(shown, changes=True, measured=shown.predicted if request.param == "demo" else None, front=front)
    path = tmp_path_factory.mktemp(request.param) / "report.html"
    draw_plan(shown, path)
    return shown, path, sections


def opened(browser: Any, path: Path, width: int, scheme: str) -> tuple[Any, list[str], list[str]]:
    """The page, what its console says, and what it asks for beside itself."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{path}")
    return page, said, [url for url in asked if url != f"file://{path}" and not url.startswith("data:")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_every_section_is_there_nothing_fails_and_nothing_is_asked_for(
    browser: Any, report: tuple[Study, Path, set[str]], width: int, scheme: str
) -> None:
    _, path, sections = report
    page, said, asked = opened(browser, path, width, scheme)
    assert said == []
    assert asked == []
    assert {section.get_attribute("id") for section in page.query_selector_all("main > section")} == sections - {"run"}, "no run"
    assert all(section.inner_text().strip() for section in page.query_selector_all("main > section"))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ends = page.evaluate("[...document.querySelectorAll('main svg')].map(e => e.getBoundingClientRect().right)")
    assert max(ends) <= width, "a picture is cut off"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(255, 255, 255)") == (scheme == "light")
    unnamed = page.evaluate("""[...document.querySelectorAll('[tabindex], input, select, section, svg[role=group]')].filter(
        e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.labels?.length)).length""")
    assert unnamed == 0
    assert path.stat().st_size < 1_000_000
    page.close()


def test_focus_by_keyboard_shows_the_layers_of_each_stage(browser: Any, report: tuple[Study, Path, set[str]]) -> None:
    shown, path, _ = report
    page, _, _ = opened(browser, path, 1280, "light")
    seen: dict[str, str] = {}
    for _ in range(200):
        page.keyboard.press("Tab")
        key = page.evaluate("document.activeElement.dataset.stage ?? ''")
        if key:
            seen[key] = page.inner_text("#details")
        elif page.evaluate("document.activeElement.id") == "cut":
            break
    assert set(seen) == set(json.loads(page.evaluate("document.getElementById('stages').textContent")))
    assert shown.profile is not None
    for key, text in seen.items():
        r, s = map(int, key.split("."))
        lo, hi = shown.plan.replicas[r].stages[s].layers
        assert all(layer.name in text for layer in shown.profile.layers[lo:hi])
    page.close()


def test_a_term_leads_to_its_explanation_by_keyboard(browser: Any, report: tuple[Study, Path, set[str]]) -> None:
    _, path, _ = report
    page, _, asked = opened(browser, path, 360, "dark")
    links = page.query_selector_all("a.term")
    assert len(links) > 5
    for link in links:
        assert page.query_selector(link.get_attribute("href")) is not None
    links[0].focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_function("""(() => { const box = document.querySelector('dt:target')?.getBoundingClientRect();
        return box && box.top >= 0 && box.bottom <= innerHeight; })()""")
    assert asked == []
    page.close()


def test_a_mouse_on_a_stage_shows_its_layers(browser: Any, report: tuple[Study, Path, set[str]]) -> None:
    _, path, _ = report
    page, _, _ = opened(browser, path, 1280, "light")
    page.hover(".wide [data-stage='0.0'] rect[fill-opacity]", force=True)
    assert "0 embed" in page.inner_text("#details")
    page.close()


def test_the_slider_says_what_simulate_says_of_that_plan(
    browser: Any, report: tuple[Study, Path, set[str]], tmp_path: Path
) -> None:
    shown, path, _ = report
    assert shown.profile is not None
    assert shown.cluster is not None
    shown.profile.save(tmp_path / "profile.json")
    shown.cluster.save(tmp_path / "cluster.json")
    page, _, _ = opened(browser, path, 1280, "light")
    cuts = json.loads(page.inner_text("#cuts") or page.evaluate("document.getElementById('cuts').textContent"))
    chosen = page.evaluate("document.getElementById('moved').dataset.seconds")
    assert float(chosen) == pytest.approx(simulated(shown, tmp_path, (), 0, 0))
    for value, cut in enumerate(cuts):
        page.select_option("#cut", str(value))
        match = re.match(r"r([0-9]+)(?:–([0-9]+))?: between s([0-9]+)", cut["name"])
        assert match is not None
        group = range(int(match[1]), int(match[2] or match[1]) + 1)
        for position in (0, len(cut["moves"]) - 1):
            page.focus("#by")
            page.keyboard.press("End" if position else "Home")
            expected = simulated(shown, tmp_path, tuple(group), int(match[3]), cut["moves"][position]["by"])
            assert float(page.evaluate("document.getElementById('moved').dataset.seconds")) == pytest.approx(expected, rel=1e-12)
            assert page.inner_text("#moved strong") == f"{human_seconds(expected)} a step"
    page.close()


def simulated(shown: Study, folder: Path, group: tuple[int, ...], stage: int, by: int) -> float:
    """What the command says of the plan with this cut moved."""
    plan = moved_plan(shown.plan, group, stage, by) if group else shown.plan
    plan.save(folder / "moved.json")
    files = ["--plan", "moved.json", "--profile", "profile.json", "--cluster", "cluster.json"]
    arguments = [str(folder / name) if name.endswith(".json") else name for name in files]
    found = CliRunner().invoke(app, ["simulate", *arguments, "--json"])
    assert found.exit_code == 0, found.output
    seconds: float = json.loads(found.stdout)["step_seconds"]
    return seconds


def test_measured_stands_above_predicted_in_the_report(tmp_path: Path) -> None:
    make: Callable[[], Study] = demo
    shown = make()
    predicted = shown.predicted
    assert predicted is not None
    slower = Timeline(
        spans=predicted.spans, step_seconds=1.1 * predicted.step_seconds, pipeline_seconds=0, sync_seconds=0, optimizer_seconds=0
    )
    draw_plan(whole(shown, measured=slower), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert text.index("measured, stage 0 on n0/1") < text.index("predicted, stage 0 on n0/1")
    assert "<td>+10.0 %</td>" in text
