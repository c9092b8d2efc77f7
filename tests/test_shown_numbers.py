"""One plan's SVG, PNG, text, page and trace agree on every number: each is read back."""

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from hetpipe.documents.plan import Plan
from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.predict.idle import CAUSES
from hetpipe.show.draw import draw_plan
from hetpipe.show.picture.canvas import NARROW, WIDE
from hetpipe.show.picture.partition import partition_canvas
from hetpipe.show.report import plan_rows, plan_table
from hetpipe.show.tables import step_table
from hetpipe.show.text_picture import TextPicture
from hetpipe.show.trace import load_trace, save_trace
from hetpipe.show.words import (
    description,
    devices_text,
    drawn_devices,
    edge_text,
    explanations,
    headlines,
    idle_text,
    lane_title,
    memory_text,
    percent,
    stage_key,
    stage_sentence,
    work_share,
)
from hetpipe.study.make import make_study
from hetpipe.study.rules import rule_names
from hetpipe.study.scene import LaneScene, Scene, StageScene
from hetpipe.study.study import Study
from tests.support.plans_shown import LINK, demo, many, three, whole
from tests.support.strategies import make_cluster, make_profile

SVG = "{http://www.w3.org/2000/svg}"
PLANS = [three, demo, many]


def labels(svg: str) -> dict[str, str]:
    """What each stage of a picture says of itself, by its key."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return {key: group.attrib["aria-label"] for group in groups if (key := group.get("data-stage")) is not None}


def drawn_in(svg: str) -> dict[str, str]:
    """What a picture's words and tips say in each stage, by its key; all of its words under ""."""
    whole = ElementTree.fromstring(svg)
    parts = {key: group for group in whole.iter(f"{SVG}g") if (key := group.get("data-stage")) is not None}
    return {
        key: " ".join(element.text or "" for kind in ("text", "title") for element in part.iter(f"{SVG}{kind}"))
        for key, part in {**parts, "": whole}.items()
    }


class Page(HTMLParser):
    """What stands on a page: the labels of stages, the texts of scripts with an id, sections, and cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stages: dict[str, list[str]] = {}
        self.scripts: dict[str, str] = {}
        self.sections: list[str] = []
        self.cells: set[str] = set()
        self._script = self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found, self._tag = dict(attrs), tag
        if "data-stage" in found:
            self.stages.setdefault(found["data-stage"] or "", []).append(found["aria-label"] or "")
        if tag == "section":
            self.sections.append(found["id"] or "")
        self._script = (found.get("id") or "-") if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        self._script = "" if tag == "script" else self._script

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = data
        if self._tag in ("td", "th"):
            self.cells.add(data)


def keyed(scene: Scene) -> dict[str, tuple[LaneScene, StageScene]]:
    return {f"{lane.replicas[0]}.{stage.number}": (lane, stage) for lane, stage in scene.stages}


def printed(thing: object, width: int) -> str:
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(thing)
    return capture.get()


@pytest.mark.parametrize("make", PLANS)
def test_svg_png_text_page_and_trace_agree_on_every_number(make: Callable[[], Study], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("resvg_py")
    shown = make()
    scene, predicted = shown.scene, shown.predicted
    assert predicted is not None
    for suffix in ("svg", "png"):
        draw_plan(shown, tmp_path / f"plan.{suffix}")
    draw_plan(whole(shown), tmp_path / "plan.html")
    save_trace(tmp_path / "trace.json", {"predicted": predicted})

    sentences = {key: stage_sentence(scene, lane, stage) for key, (lane, stage) in keyed(scene).items()}
    svg = (tmp_path / "plan.svg").read_text("utf-8")
    assert labels(svg) == sentences
    said = image.open(io.BytesIO((tmp_path / "plan.png").read_bytes())).text["Description"]
    assert said == description(scene)
    assert set(sentences.values()) <= set(said.splitlines())
    page = Page((tmp_path / "plan.html").read_text("utf-8"))
    assert {key: set(found) for key, found in page.stages.items()} == {key: {text} for key, text in sentences.items()}
    assert {key: own["text"] for key, own in json.loads(page.scripts["stages"]).items()} == sentences

    text = printed(TextPicture(scene, width=300), 300)
    drawn = {element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert {line for line in explanations(scene) if line not in text} == set()
    assert set(explanations(scene)) <= drawn
    assert {"replica", "micro-batch", scene.plan.schedule} <= {line.split(":")[0] for line in explanations(scene)}
    for lane, stage in scene.stages:
        assert all(" + ".join(twin) in devices_text(lane, stage) for twin in stage.twins[:2])
        assert len(stage.twins) == lane.count
        assert stage.devices in stage.twins
        assert devices_text(lane, stage) in text
        assert any(drawn_devices(lane, stage) in (own or "") for own in drawn)
    trace = load_trace(tmp_path / "trace.json")["predicted"]
    assert len(trace.spans) == len(predicted.spans)
    for read, span in zip(*(sorted(x.spans, key=lambda s: (s.device, s.kind, s.start)) for x in (trace, predicted)), strict=True):
        assert (read.device, read.kind, read.microbatch) == (span.device, span.kind, span.microbatch)
        assert (read.start, read.end) == pytest.approx((span.start, span.end), abs=1e-6)
    assert human_seconds(trace.step_seconds) == human_seconds(scene.seconds or 0.0)
    for lane, stage in scene.stages:
        assert lane_title(lane, scene) in text
        facts = sentences[f"{lane.replicas[0]}.{stage.number}"]
        for number in (human_seconds(stage.busy), memory_text(stage)):
            assert number in facts
            assert number in text
            assert number in page.cells
        for cause in CAUSES:
            if stage.idle[cause] > 0:
                assert f"{cause} {human_seconds(stage.idle[cause])}" in facts
                assert f"{cause} {human_seconds(stage.idle[cause])}" in text
                assert human_seconds(stage.idle[cause]) in page.cells
        device = stage.devices[0]
        assert trace.busy_seconds()[device] == pytest.approx(stage.busy, abs=1e-6)
        assert max(size for _, size in trace.memory[device]) <= (stage.memory or 0)
        sends = sum(
            span.end - span.start
            for span in trace.spans
            if span.kind == "send"
            and span.replica == lane.replicas[0]
            and (span.device == device or span.stage == stage.number + 1)
        )
        if stage.edge is not None and stage.number == 0 and len(lane.stages) == 2:
            assert sends >= stage.edge.seconds - 1e-6  # what shares an adapter takes longer than alone
            assert human_bytes(stage.edge.bytes) in text


@pytest.mark.parametrize("make", PLANS)
def test_the_words_drawn_in_a_picture_wide_or_narrow_are_these_numbers(make: Callable[[], Study]) -> None:
    scene = make().scene
    for picture in (partition_canvas(scene, width).to_svg() for width in (WIDE, NARROW)):
        said_in = drawn_in(picture)
        assert {line for line in headlines(scene) if line not in said_in[""]} == set()
        for key, (lane, stage) in keyed(scene).items():
            busy = percent(stage.busy / (scene.seconds or 1.0))
            facts = [work_share(lane, stage), f"{human_seconds(stage.busy)}, {busy} busy", memory_text(stage)]
            facts += [f"idle, {cause}: {seconds}" for cause, seconds in idle_text(stage)]
            facts += [f"layer {tile.layer}: {tile.name}" for tile in stage.tiles]
            facts += [f"{human_seconds(tile.seconds or 0.0)} a step" for tile in stage.tiles]
            assert [fact for fact in facts if fact not in said_in[key]] == []
            assert stage.edge is None or edge_text(stage.edge) in said_in[""]


@pytest.mark.parametrize("make", PLANS)
def test_the_numbers_of_a_scene_add_up(make: Callable[[], Study]) -> None:
    scene = make().scene
    assert scene.seconds is not None
    for _, stage in scene.stages:
        assert stage.busy + stage.idle_total == pytest.approx(scene.seconds, abs=1e-9)
        assert sum(tile.seconds or 0.0 for tile in stage.tiles) + stage.optimizer == pytest.approx(stage.busy, abs=1e-9)
    assert sum(lane.count * stage.work for lane, stage in scene.stages) == pytest.approx(1)
    samples = sum(lane.count * lane.samples for lane in scene.lanes)
    assert samples == scene.plan.global_batch
    assert sum(lane.count * len(lane.stages) for lane in scene.lanes) == scene.device_count


@pytest.mark.parametrize("make", PLANS)
def test_the_text_fits_80_columns(make: Callable[[], Study]) -> None:
    scene = make().scene
    for thing in (TextPicture(scene), step_table(scene)):
        assert max(map(len, printed(thing, 80).splitlines())) <= 80
    table = printed(step_table(scene), 80)
    for _, stage in scene.stages:
        assert percent(stage.busy / (scene.seconds or 1.0)) in table


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("make", PLANS)
def test_no_terminal_is_too_narrow_for_a_number(make: Callable[[], Study], width: int) -> None:
    """Stages and devices, too, are whole and not cut; below 60 columns no bars are drawn, and a line says so."""
    shown = make()
    plan = printed(plan_table(shown.plan, profile=shown.profile, cluster=shown.cluster), width)
    picture, step = printed(TextPicture(shown.scene), width), printed(step_table(shown.scene), width)
    for text in (plan, picture, step):
        assert max(map(len, text.splitlines())) <= width
    for row in plan_rows(shown.plan, profile=shown.profile, cluster=shown.cluster):
        assert [row[name] for name in ("stage", "device", "share", "layers", "F", "B", "memory") if row[name] not in plan] == []
    for lane, stage in shown.scene.stages:
        for said in (stage_key(lane, stage), f"{stage.named} {stage.kind}", percent(stage.busy / (shown.scene.seconds or 1.0))):
            assert said in step
    told = "no picture: it needs 60 columns" in " ".join(picture.split())
    assert ("█" in picture, told) == (width >= 60, width < 60)


def test_64_devices_in_alike_pipelines_are_two_rows() -> None:
    scene, predicted = many().scene, many().predicted
    assert predicted is not None
    assert [(lane.count, len(lane.stages)) for lane in scene.lanes] == [(32, 2)]
    assert "replicas 0–31, alike: 8 of 256 samples each, in 4 micro-batches of 2" in printed(TextPicture(scene), 80)
    assert len(printed(TextPicture(scene), 80).splitlines()) < 45


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    shown = demo()
    assert shown.profile is not None
    evil = "</script><script>alert(1)</script>"
    layers = tuple(layer.model_copy(update={"name": f"{evil}{i}"}) for i, layer in enumerate(shown.profile.layers))
    known = shown.profile.model_copy(update={"layers": layers, "model": evil})
    plan = shown.plan.model_copy(update={"model": evil})
    evil_study = make_study(plan, profile=known, cluster=shown.cluster, rules=rule_names(), cuts=True)
    draw_plan(evil_study, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text("utf-8")
    assert text.count("<script") == 3
    assert "alert(1)" in text
    assert not re.search(r"(?:src|href)=[\"'](?!#|data:,)", text)
    assert len(text) < 1_000_000


@pytest.mark.thorough
def test_a_pipeline_of_a_hundred_stages_is_a_page_below_a_megabyte(tmp_path: Path) -> None:
    cluster = make_cluster([{"slow": 8}] * 13, memory=10**12, link=LINK)
    times = [0.01] * 104
    stages = [{"layers": [s, s + 1], "devices": [f"n{s // 8}/{s % 8}"]} for s in range(104)]
    document = {
        "format": "hetpipe.plan/1",
        "model": "test",
        "global_batch": 128,
        "replicas": [{"microbatch_sizes": [1] * 128, "stages": stages}],
    }
    shown = make_study(Plan.parse(document, "the plan"), profile=make_profile({"slow": times}), cluster=cluster)
    draw_plan(whole(shown), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    page = (tmp_path / "report.html").read_text("utf-8")
    assert all(page.count(f'data-stage="0.{s}"') == 2 for s in range(104)), "a column each, wide and narrow"
