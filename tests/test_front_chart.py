"""The chart of a front in a report: what is cheaper stands further left, what is quicker further down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetpipe.planning.front import Front
from hetpipe.show.draw import draw_plan
from hetpipe.show.picture.canvas import NARROW, WIDE, text_width
from hetpipe.show.picture.front import front_canvas, kind_of, point_of
from tests.support.plans_shown import three, whole

POSITIVE = st.floats(1e-6, 1e6)


def made(rows: list[tuple[float, float, bool, bool]]) -> Front:
    """(price per million samples, seconds, on the front, planned) of each sub-cluster."""
    documents: list[dict[str, Any]] = []
    for i, (price, seconds, best, planned) in enumerate(rows):
        row: dict[str, Any] = {
            "nodes": {f"type{i}": i + 1},
            "devices": {"gpu": i + 1},
            "price_per_hour": price,
            "status": "dominated",
            "lower_bound_seconds": seconds,
        }
        if planned:
            row |= {
                "status": "planned",
                "on_front": best,
                "plan": {
                    "step_seconds": seconds,
                    "price_per_million_samples": price,
                    "samples_per_second": 1.0,
                    "pipeline_seconds": seconds,
                    "gradient_sync_seconds": 0,
                    "embedding_sync_seconds": 0,
                    "optimizer_seconds": 0,
                    "peak_bytes": 1,
                    "gap": None,
                    "proof": None,
                    "replicas": 1,
                    "microbatch_sizes": [1],
                    "stages": [1],
                    "tensor_parallel": [1],
                    "partitions": {"8": 1},
                },
            }
        documents.append(row)
    document = {"format": "hetpipe.front/1", "model": "net", "global_batch": 8, "partitioner": "auto", "rows": documents}
    return Front.parse(document, "the front")


ROWS = st.lists(st.tuples(POSITIVE, POSITIVE, st.booleans(), st.booleans()), min_size=1, max_size=8)


@given(ROWS, st.sampled_from([WIDE, NARROW]))
def test_points_are_ordered_as_their_numbers_and_inside(rows: list[tuple[float, float, bool, bool]], width: float) -> None:
    front = made(rows)
    canvas = front_canvas(front, width)
    boxes = {box.tip.split(":")[0]: box for box in canvas.boxes if box.tip}
    places = {f"{i + 1} type{i}": point_of(row, front) for i, row in enumerate(front.rows)}
    assert set(boxes) == set(places)
    for name, box in boxes.items():
        assert 0 <= box.x < box.x + box.width <= canvas.width
        assert 0 <= box.y < box.y + box.height <= canvas.height
        for other, beside in boxes.items():
            (x, y), (u, v) = places[name] or (0, 0), places[other] or (0, 0)
            a, b = box.x + box.width / 2, box.y + box.height / 2
            c, d = beside.x + beside.width / 2, beside.y + beside.height / 2
            assert a <= c + 1e-6 or x >= u
            assert b >= d - 1e-6 or y >= v
    for end in ("middle", "end"):  # round values, of both axes
        assert len([words for words in canvas.words if words.anchor == end]) >= 2
    assert sum(bool(group.label) for group in canvas.groups) == sum(kind_of(row) == "front" for row in front.rows)
    for words in canvas.words:
        assert 0 <= words.y <= canvas.height
        if not words.upright and words.anchor == "start":
            assert words.x + text_width(words.text, words.size) <= canvas.width + 1


def test_without_prices_there_is_no_chart() -> None:
    assert front_canvas(made([(0.0, 1.0, True, True)])).height == 0
    assert front_canvas(made([])).height == 0


def test_a_report_has_the_chart_and_the_table_of_its_front(tmp_path: Path) -> None:
    best = [(2.0, 1.0, True, True), (1.0, 3.0, True, True)]
    shown, front = three(), made([*best, (3.0, 3.0, False, True), (2.5, 0.5, False, False)])
    draw_plan(whole(shown, front=front), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    section = page[page.index('<section id="front"') : page.index('<section id="rules"')]
    for name in ("1 type0: 2.00 per million samples, 1.00 s", "2 type1: 1.00 per million samples, 3.00 s"):
        assert f'tabindex="0" aria-label="{name} a step (front)"' in section
    assert "not planned: lower bound" in section
    assert "<td>3.00 s</td>" in section
