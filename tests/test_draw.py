import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hetpipe.files.messages import InputError
from hetpipe.predict.simulator import simulate
from hetpipe.show.canvas import Box, Canvas, Words, fitting, text_width
from hetpipe.show.draw import _spread, draw_plan, plan_canvas, plan_page
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile

SVG = "{http://www.w3.org/2000/svg}"

CLUSTER = Cluster.parse({
    "format": "hetpipe.cluster/1", "device_types": {"fast": {"memory": "4 GiB"}, "slow": {"memory": "2 GiB"}},
    "nodes": [{"name": "n0", "devices": {"fast": 2, "slow": 1}}], "link": {"bandwidth": "1 GB/s"},
}, "the cluster")  # fmt: skip


def profile(names: list[str], model: str = "net") -> Profile:
    count = len(names)
    return Profile.parse({
        "format": "hetpipe.profile/1", "model": model, "optimizer": {"state_bytes_per_parameter_byte": 0},
        "layers": [{"name": name, "parameter_bytes": 4, "output_bytes_per_sample": 4,
                    "saved_bytes_per_sample": 8}
                   for name in names],
        "measurements": [
            {"device_type": kind, "microbatch_sizes": [1], "forward_seconds": [[f] * count],
             "backward_seconds": [[2 * f] * count], "optimizer_seconds": [0.0] * count}
            for kind, f in (("fast", 0.001), ("slow", 0.002))],
    }, "the profile")  # fmt: skip


def plan(*replicas: list[tuple[int, int, str]], model: str = "net", **changes: object) -> Plan:
    return Plan.parse({
        "format": "hetpipe.plan/1", "model": model, "global_batch": 3 * len(replicas),
        "replicas": [{"microbatch_sizes": [2, 1],
                      "stages": [{"layers": [lo, hi], "devices": [d]} for lo, hi, d in stages]}
                     for stages in replicas],
        **changes,
    }, "the plan")  # fmt: skip


TWO_REPLICAS = plan([(0, 3, "n0/0"), (3, 4, "n0/2")], [(0, 4, "n0/1")])
NAMES = ["embed", "body.0", "body.1", "head"]
PREDICTED = {
    "step_seconds": 0.05, "pipeline_seconds": 0.05, "gradient_sync_seconds": 0, "optimizer_seconds": 0,
    "samples_per_second": 120, "price_per_hour": 0, "price_per_million_samples": 0, "peak_bytes": {},
    "gap": 0.031,
}  # fmt: skip


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_device_layer_range_share_and_name_is_in_the_picture(tmp_path: Path) -> None:
    draw_plan(TWO_REPLICAS, tmp_path / "plan.svg", profile=profile(NAMES), cluster=CLUSTER)
    shown = texts((tmp_path / "plan.svg").read_text("utf-8"))
    assert {"n0/0 · fast", "n0/1 · fast", "n0/2 · slow"} <= set(shown)
    assert {"layers 0–2 · 18.0 ms", "layer 3 · 12.0 ms", "layers 0–3 · 24.0 ms"} <= set(shown)
    assert {"replica 0", "replica 1", "2 + 1 = 3 samples", *NAMES} <= set(shown)
    assert {"fast · 4.00 GiB", "slow · 2.00 GiB", "no prediction"} <= set(shown)


def test_widths_are_proportional_to_seconds() -> None:
    canvas = plan_canvas(TWO_REPLICAS, profile=profile(NAMES), cluster=CLUSTER)
    a, b, c = (box.width for box in canvas.boxes if box.fill == "none")
    assert (b / a, c / a) == pytest.approx((12 / 18, 24 / 18))


def test_widths_are_numbers_of_layers_where_no_times_are_known() -> None:
    canvas = plan_canvas(TWO_REPLICAS)
    a, b, c = (box.width for box in canvas.boxes if box.fill == "none")
    assert (b / a, c / a) == pytest.approx((1 / 3, 4 / 3))
    shown = [words.text for words in canvas.words]
    assert {"width: number of layers", "n0/2", "layer 3", "0", "3"} <= set(shown)


def test_the_title_has_the_prediction() -> None:
    shown = [words.text for words in plan_canvas(plan([(0, 4, "n0/0")], predicted=PREDICTED)).words]
    assert "predicted: 50.0 ms a step, 120 samples/s, gap 3.1 % to the lower bound" in shown
    assert "1 replica on 1 device, 3 samples a step, 1f1b, planned by hand" in shown


def test_a_timeline_is_drawn_below() -> None:
    known: dict[str, Any] = {"profile": profile(NAMES), "cluster": CLUSTER}
    step = simulate(TWO_REPLICAS, *known.values())
    alone, both = plan_canvas(TWO_REPLICAS, **known), plan_canvas(TWO_REPLICAS, **known, timeline=step)
    assert both.height > alone.height + 3 * 17
    tips = [box.tip for box in both.boxes if box.tip.startswith("backward")]
    assert sorted(tips)[0].startswith("backward 0, ")
    assert len(tips) == 6  # three devices, two micro-batches
    assert {"r0 s0 n0/0", "r0 s1 n0/2", "r1 s0 n0/1"} <= {words.text for words in both.words}


@pytest.mark.parametrize("seed", range(3))
def test_nothing_overlaps_or_leaves_the_page(seed: int) -> None:
    count = 12 * (seed + 1)
    nodes = [{"name": "a-long-name", "devices": {"slow": 12}}]
    cluster = Cluster.parse(CLUSTER.model_dump(exclude_none=True) | {"nodes": nodes}, "the cluster")
    stages = [(i, i + 1, f"a-long-name/{i}") for i in range(11)] + [(11, count, "a-long-name/11")]
    known: dict[str, Any] = {"profile": profile([f"layer.{i}" for i in range(count)]), "cluster": cluster}
    deep = plan(stages)
    canvas = plan_canvas(deep, **known, timeline=simulate(deep, *known.values()))
    extents = []
    for w in canvas.words:
        wide = 0.0 if w.upright else text_width(w.text, w.size, bold=w.bold)
        left = w.x - {"start": 0, "middle": wide / 2, "end": wide}[w.anchor]
        assert left >= 0
        assert left + wide <= canvas.width
        assert 0 <= w.y <= canvas.height
        if "·" in w.text and w.anchor == "middle":
            extents.append((w.y, left, left + wide))
    extents.sort()
    assert len(extents) == 24
    assert all(a[2] <= b[1] for a, b in pairwise(extents) if a[0] == b[0])
    for box in canvas.boxes:
        assert box.x >= 0
        assert box.x + box.width <= canvas.width
        assert box.y + box.height <= canvas.height


def test_labels_move_apart_but_stay_inside() -> None:
    assert _spread([10, 12, 14], [20, 20, 20], 100) == [10, 30, 50]
    assert _spread([90, 95, 99], [20, 20, 20], 100) == [50, 70, 90]
    assert _spread([30, 70], [20, 20], 100) == [30, 70]


def test_names_cannot_break_out_of_the_page() -> None:
    names = ["<script>alert(1)</script>", "&\x01\U0001f600", '"><b>', "日本語"]
    evil = plan([(0, 4, "n0/0")], model="<script>x</script>")
    page = plan_page(evil, profile=profile(names, model="<script>x</script>"), cluster=CLUSTER)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert not re.search(r'(?:src|href)=|url\(|@import', page)
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    assert {"<script>x</script>", '"><b>', "日本語"} <= set(texts(svg))


def test_the_page_has_the_picture_the_table_and_the_prediction(tmp_path: Path) -> None:
    draw_plan(plan([(0, 4, "n0/0")], predicted=PREDICTED), tmp_path / "plan.HTML")
    page = (tmp_path / "plan.HTML").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 1
    assert "<td>n0/0</td><td>2 + 1 = 3</td><td>0–3</td>" in page
    assert "<td>gap</td><td>3.1 %</td>" in page


def test_one_layer_and_zero_seconds() -> None:
    still = profile(["only"]).model_dump(exclude_none=True)
    for measured in still["measurements"]:
        measured |= {"forward_seconds": [[0.0]], "backward_seconds": [[0.0]]}
    one = plan([(0, 1, "n0/0")])
    known: dict[str, Any] = {"profile": Profile.parse(still, "the profile"), "cluster": CLUSTER}
    svg = plan_canvas(one, **known, timeline=simulate(one, *known.values())).to_svg()
    assert "layer 0 · 0 s" in texts(svg)


def test_a_png_of_strange_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["$x_", "日本", "\\frac", "head"]
    known: dict[str, Any] = {"profile": profile(names), "cluster": CLUSTER}
    path = tmp_path / "new" / "plan.png"
    draw_plan(TWO_REPLICAS, path, **known, timeline=simulate(TWO_REPLICAS, *known.values()))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_png_of_a_thousand_replicas_is_not_larger_than_png_writers_allow() -> None:
    pytest.importorskip("matplotlib")
    tall = Canvas(width=100, height=90_000)
    assert int.from_bytes(tall.to_png()[20:24], "big") <= 20_000


def test_without_matplotlib_a_png_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"a \.png needs matplotlib: pip install 'hetpipe\[viz\]'"):
        draw_plan(TWO_REPLICAS, tmp_path / "plan.png")
    draw_plan(TWO_REPLICAS, tmp_path / "plan.svg")


def test_an_unknown_suffix_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown suffix '\.pdf'; known: \.svg, \.png, \.html"):
        draw_plan(TWO_REPLICAS, tmp_path / "plan.pdf")


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="it is for model 'net', the profile for 'other'"):
        plan_canvas(TWO_REPLICAS, profile=profile(NAMES, model="other"))


def test_long_texts_lose_their_beginning() -> None:
    assert fitting("layers.12.attention", 1000) == "layers.12.attention"
    cut = fitting("layers.12.attention", 70)
    assert cut[0] == "…"
    assert "layers.12.attention".endswith(cut[1:])
    assert text_width(cut) <= 70
    assert fitting("layers.12.attention", 20) == ""


def test_a_canvas_as_svg() -> None:
    canvas = Canvas(width=10, height=20.4, boxes=[Box(x=1, y=2.5, width=3, height=4, fill="#fff", tip="a<b")])
    canvas.words.append(Words(x=5, y=5, text="up", upright=True))
    upright = 'text-anchor="middle" fill="#1a1a1a" transform="rotate(-90 5 5)"'
    assert canvas.to_svg().splitlines()[2:] == [
        '<rect x="1" y="2.5" width="3" height="4" fill="#fff"><title>a&lt;b</title></rect>',
        f'<text x="5" y="8.96" font-size="11" {upright}>up</text>',
        "</svg>",
    ]
