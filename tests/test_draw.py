import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, Prediction
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.files.units import human_seconds
from hetpipe.show.draw import draw_plan
from hetpipe.show.picture.canvas import NARROW, WIDE, Box, Canvas, text_width
from hetpipe.show.picture.curves import memory_canvas
from hetpipe.show.picture.gantt import gantt_canvas
from hetpipe.show.picture.partition import partition_canvas
from hetpipe.show.picture.theme import CAUSE_PATTERNS
from hetpipe.show.words import bound_line, headlines, unused_line
from hetpipe.study.make import make_study
from tests.support.drawn_plans import CLUSTER, SVG, TWO_REPLICAS, plan, profile, texts
from tests.support.plans_shown import demo

NAMES = ["embed", "body.0", "body.1", "head"]
PREDICTED = {
    "step_seconds": 0.05,
    "pipeline_seconds": 0.05,
    "gradient_sync_seconds": 0,
    "optimizer_seconds": 0,
    "samples_per_second": 120,
    "price_per_hour": 0,
    "price_per_million_samples": 0,
    "peak_bytes": {},
    "gap": 0.031,
    "lower_bound_seconds": 0.049,
    "proof": "fluid",
}


def canvas_of(drawn: Plan, width: float = WIDE, **known: Any) -> Canvas:
    return partition_canvas(make_study(drawn, **known).scene, width)


def test_every_device_layer_range_share_and_name_is_in_the_picture(tmp_path: Path) -> None:
    shown = make_study(TWO_REPLICAS, profile=profile(NAMES), cluster=CLUSTER)
    draw_plan(shown, tmp_path / "plan.svg")
    svg = (tmp_path / "plan.svg").read_text("utf-8")
    assert {"n0/0 fast · layers 0–2", "n0/2 slow · layer 3", "n0/1 fast · layers 0–3", "node n0"} <= set(texts(svg))
    assert {f"replica {r}: 3 of 6 samples, in micro-batches of 2 and 1" for r in (0, 1)} <= set(texts(svg))
    assert {"0 embed", "1 body.0", "2 body.1", "3 head", "fast, 4.00 GiB", "slow, 2.00 GiB"} <= set(texts(svg))
    titles = [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert "layer 0: embed, 9.00 ms a step" in titles
    assert "layer 3: head, 18.0 ms a step" in titles


def test_widths_are_proportional_to_the_seconds_of_a_step_and_heights_to_memory() -> None:
    scene = make_study(TWO_REPLICAS, profile=profile(NAMES), cluster=CLUSTER).scene
    canvas = partition_canvas(scene)
    frames = [
        next(box for box in group.boxes if box.edge in ("limit", "type0", "type1") and box.thickness >= 1.5)
        for group in canvas.groups
        if group.key
    ]
    stages = [stage for _, stage in scene.stages]
    scale = frames[0].width / stages[0].busy
    for frame, stage, group in zip(frames, stages, [group for group in canvas.groups if group.key], strict=True):
        assert frame.width == pytest.approx(stage.busy * scale)
        idle = [box for box in group.boxes if box.tip.startswith("idle")]
        assert sum(box.width for box in idle) == pytest.approx(stage.idle_total * scale)
        limit = next(box for box in group.boxes if box.fill == "panel")
        assert stage.memory is not None and stage.limit is not None  # noqa: PT018
        assert frame.height / limit.height == pytest.approx(stage.memory / stage.limit, abs=1e-6)


def test_widths_are_numbers_of_layers_where_no_times_are_known() -> None:
    canvas = canvas_of(TWO_REPLICAS)
    a, b, c = (next(box for box in group.boxes if box.edge == "unknown").width for group in canvas.groups if group.key)
    assert (b / a, c / a) == pytest.approx((1 / 3, 4 / 3))
    assert {"n0/2 · layer 3", "0", "3", "no prediction"} <= {words.text for words in canvas.words}


def test_the_title_has_the_prediction_and_the_bound() -> None:
    shown = [words.text for words in canvas_of(plan([(0, 4, "n0/0")], predicted=PREDICTED)).words]
    assert "predicted step 50.0 ms" in shown
    assert "proven: no plan of any kind takes less than 49.0 ms; this one takes 2.0 % longer" in shown
    assert "3 samples a step, 1f1b, planned by hand" in shown


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lower_bound_seconds": 0.05, "proof": "exhaustive"}, "proven: no plan of this kind is faster"),
        ({"lower_bound_seconds": 0.05}, "proven: no plan of any kind is faster"),
        (
            {"lower_bound_seconds": 0.0499999, "proof": "search-bound"},
            "proven: no plan of this kind takes less than 50.0 ms; this one takes less than 0.1 % longer",
        ),
        (
            {"lower_bound_seconds": 0.04, "proof": "search-bound"},
            (
                "proven: no plan of this kind takes less than 40.0 ms; this one takes 25 % longer; "
                "the proof ended with its effort or time, and --effort long or --time-limit goes on"
            ),
        ),
        ({"lower_bound_seconds": 0.02}, "proven: no plan of any kind takes less than 20.0 ms; this one takes 150 % longer"),
        ({"lower_bound_seconds": 0.0}, "proven: no plan of any kind takes less than 0 s"),
        ({"lower_bound_seconds": None, "proof": None, "gap": None}, ""),
    ],
)
def test_what_is_proven_is_one_sentence(changes: dict[str, object], text: str) -> None:
    scene = make_study(plan([(0, 4, "n0/0")], predicted=PREDICTED | changes)).scene
    assert bound_line(scene) == text


def test_so_wide_a_gap_says_nothing_about_a_plan_of_auto_alone() -> None:
    wide = plan([(0, 4, "n0/0")], predicted=PREDICTED | {"lower_bound_seconds": 0.02})
    lines = [bound_line(make_study(wide.model_copy(update={"partitioner": by})).scene) for by in ("auto", "even")]
    assert [line.endswith("150 % longer; so wide a gap says nothing about the plan") for line in lines] == [True, False]


def test_the_stage_that_computes_longest_limits_the_step_and_full_memory_is_tight() -> None:
    small = Cluster.parse(
        CLUSTER.model_dump(exclude_none=True) | {"device_types": {"fast": {"memory": 110}, "slow": {"memory": 10**9}}},
        "the cluster",
    )
    scene = make_study(TWO_REPLICAS, profile=profile(NAMES), cluster=small).scene
    (limiting,) = scene.limiting
    assert limiting[1].devices == ("n0/1",)
    facts = [words.text for words in partition_canvas(scene).words if "limits the step" in words.text]
    assert facts[-1] == "50 % of the work · 36.0 ms, 100 % busy · 104 of 110 B, 95 % · limits the step · memory tight"


def crowd(*lengths: int) -> tuple[Plan, dict[str, Any]]:
    """Unlike replicas of so many stages of a layer or more; the devices that they leave are unused."""
    layers = max(lengths)
    nodes = [{"name": f"n{i}", "devices": {"fast": 4, "slow": 4}} for i in range(-(-sum(lengths) // 8) + 1)]
    cluster = Cluster.parse({**CLUSTER.model_dump(exclude_none=True), "nodes": nodes}, "the cluster")
    ids = iter(device.id for device in cluster.devices)
    replicas = []
    for r, n in enumerate(lengths):
        ends = [round(layers * s / n) for s in range(n + 1)]
        stages = [{"layers": [lo, hi], "devices": [next(ids)]} for lo, hi in pairwise(ends)]
        replicas.append({"microbatch_sizes": [1] * (4 + r), "stages": stages})
    batch = sum(4 + r for r in range(len(lengths)))
    made = Plan.parse({"format": "hetpipe.plan/1", "model": "net", "global_batch": batch, "replicas": replicas}, "the plan")
    return made, {"profile": profile([f"l{i}" for i in range(layers)]), "cluster": cluster}


@pytest.mark.parametrize("lengths", [(64,), (12, 12, 40), (20,) * 3, (1,) * 64, (2,) * 32, (1, 3) * 16])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_sixty_four_devices_are_columns_that_one_can_look_at(lengths: tuple[int, ...], width: float) -> None:
    """They were as many bars below each other, some 85 pixels each."""
    drawn, known = crowd(*lengths)
    scene = make_study(drawn, **known).scene
    canvas = partition_canvas(scene, width)
    assert canvas.height < 1_600 * WIDE / width
    columns = {group.key: group for group in canvas.groups if group.key}
    assert set(columns) == {f"{lane.replicas[0]}.{stage.number}" for lane, stage in scene.stages}
    assert scene.seconds is not None
    high = max(sum(box.height for box in group.boxes if box.tip) for group in columns.values())
    for lane, stage in scene.stages:
        group = columns[f"{lane.replicas[0]}.{stage.number}"]
        body = next(box for box in group.boxes if box.tip.startswith("computes"))
        assert body.height / high == pytest.approx(stage.busy / scene.seconds, abs=1e-6)
        idle = [box for box in group.boxes if box.tip.startswith("idle")]
        assert sum(box.height for box in idle) / high == pytest.approx(stage.idle_total / scene.seconds, abs=1e-6)
    for group in canvas.groups:
        for box in group.boxes:
            assert box.x >= 0
            assert box.x + box.width <= width
            assert box.y + box.height <= canvas.height
        assert all(words.x + text_width(words.text, words.size) <= width + 12 for words in group.words if words.anchor == "start")
    ElementTree.fromstring(canvas.to_svg())


def test_columns_without_times_are_as_high_as_their_layers() -> None:
    drawn, _ = crowd(13)
    canvas = partition_canvas(make_study(drawn).scene)
    heights = {box.height for group in canvas.groups if group.key for box in group.boxes if box.tip == "1 layers"}
    assert len(heights) == 1


def test_every_bar_has_numbers() -> None:
    """Where tiles are too narrow, at every second, fifth or tenth layer."""
    names = [f"l{i}" for i in range(120)]
    replicas = plan([(0, 90, "n0/0"), (90, 120, "n0/2")])
    canvas = partition_canvas(make_study(replicas, profile=profile(names), cluster=CLUSTER).scene, NARROW)
    for group, own in zip([group for group in canvas.groups if group.key], (range(90), range(90, 120)), strict=True):
        numbers = [int(words.text) for words in group.words if words.text.isdecimal()]
        assert len(numbers) >= 3
        assert set(numbers) <= set(own)
        assert len({b - a for a, b in pairwise(sorted(numbers))}) == 1


def test_unused_devices_are_told_with_why() -> None:
    drawn, known = crowd(13)
    scene = make_study(drawn, **known).scene
    assert unused_line(scene) == "11 of 24 devices are unused (7 × slow, 4 × fast)"
    searched = make_study(drawn.model_copy(update={"predicted": Prediction.model_validate(PREDICTED)}), **known).scene
    assert unused_line(searched).endswith("(7 × slow, 4 × fast): no plan that was tried is faster with them")
    assert unused_line(searched) in headlines(searched)


def test_alike_replicas_are_drawn_once() -> None:
    alike = plan([(0, 4, "n0/0")], [(0, 4, "n0/1")])
    scene = make_study(alike, profile=profile(NAMES), cluster=CLUSTER).scene
    assert [lane.replicas for lane in scene.lanes] == [(0, 1)]
    shown = {words.text for words in partition_canvas(scene).words}
    assert "replicas 0–1, alike: 3 of 6 samples each, in micro-batches of 2 and 1" in shown
    assert "2 devices alike: n0/0 and n0/1, each fast (one is drawn) · layers 0–3" in shown
    assert "n0/0 and n0/1, each fast, limit the step: each of them computes for 100 % of it" in shown
    assert "node n0" in shown
    apart = Cluster.parse(
        CLUSTER.model_dump(exclude_none=True) | {"nodes": [{"name": f"n{i}", "devices": {"fast": 1}} for i in range(5)]},
        "the cluster",
    )
    five = plan(*([(0, 4, f"n{i}/0")] for i in range(5)))
    shown = {words.text for words in canvas_of(five, profile=profile(NAMES), cluster=apart).words}
    assert {"5 devices alike: n0/0, n1/0 and 3 more, each fast (one is drawn) · layers 0–3", "nodes n0, n1 and 3 more"} <= shown


def test_alike_devices_stand_in_the_order_of_the_cluster_as_those_of_the_equal_split() -> None:
    apart = Cluster.parse(
        CLUSTER.model_dump(exclude_none=True) | {"nodes": [{"name": name, "devices": {"fast": 1}} for name in ("b", "a")]},
        "the cluster",
    )
    turned = plan([(0, 4, "a/0")], [(0, 4, "b/0")])
    shown = {words.text for words in canvas_of(turned, profile=profile(NAMES), cluster=apart).words}
    assert "2 devices alike: b/0 and a/0, each fast (one is drawn) · layers 0–3" in shown
    assert "nodes b and a" in shown


def test_a_stage_has_the_numbers_of_its_first_and_last_layers_however_narrow_they_are() -> None:
    short = profile(NAMES).model_dump(exclude_none=True)
    for measured in short["measurements"]:
        measured["forward_seconds"] = [[1e-6, 1.0, 1.0, 1e-6]]
    known: dict[str, Any] = {"profile": Profile.parse(short, "the profile"), "cluster": CLUSTER}
    for width in (WIDE, NARROW):
        words = [words.text for words in canvas_of(plan([(0, 4, "n0/0")]), width, **known).words]
        assert {"0 embed", "3 head"} <= set(words)
        assert words.count("0 embed") == words.count("3 head") == 1


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_layer_has_its_number_beside_its_name(width: float) -> None:
    scene = demo().scene
    groups = [group for group in partition_canvas(scene, width).groups if group.key]
    for group, (_, stage) in zip(groups, scene.stages, strict=True):
        said = [words.text for words in group.words]
        assert not {tile.name for tile in stage.tiles} & set(said)
        for tile in (stage.tiles[0], stage.tiles[-1]):
            assert any(text.split(" ")[0] == str(tile.layer) for text in said)


def test_the_legend_says_what_stripes_and_patterns_are() -> None:
    note = "light and dark stripes are layers"
    assert note in [words.text for words in canvas_of(TWO_REPLICAS).words]
    known: dict[str, Any] = {"profile": profile(NAMES), "cluster": CLUSTER}
    said = [words.text for words in canvas_of(TWO_REPLICAS, **known).words]
    assert f"{note}; the pattern at a bar's left end tells its type of device, not idle time" in said
    assert any("bar: a step added up, no timeline" in text for text in said)
    assert any("devices of different types are not to one scale" in text for text in said)


def test_idle_time_looks_in_bars_as_in_the_legend_and_each_cause_otherwise() -> None:
    scene = demo().scene
    canvas = partition_canvas(scene)
    seen = {cause for cause, share in scene.idle_shares().items() if share >= 0.0005}
    assert len(seen) >= 2
    legend = [box for box in canvas.groups[0].boxes if box.pattern and box.fill == "rule"]
    bars = [box for box in canvas.boxes if box.tip.startswith("idle")]

    def look(box: Box) -> tuple[object, ...]:
        return box.fill, box.opacity, box.pattern, box.edge, box.thickness

    assert {look(box) for box in bars if box.tip.split(",")[1].split(":")[0].strip() in seen} == {look(box) for box in legend}
    assert len(set(CAUSE_PATTERNS.values())) == len(CAUSE_PATTERNS)
    for box in bars:
        cause = box.tip.split(",")[1].split(":")[0].strip()
        assert box.pattern == CAUSE_PATTERNS[cause]


def test_the_equal_split_stands_beneath_at_the_same_scale() -> None:
    one = plan([(0, 2, "n0/0"), (2, 4, "n0/1")])
    scene = make_study(one, profile=profile(NAMES), cluster=CLUSTER).scene
    assert scene.equal is not None
    assert scene.equal.plan.partitioner in ("even", "even-data-parallel")
    canvas = partition_canvas(scene)
    ghosts = [group for group in canvas.groups if group.label.startswith("equal split: ")]
    frames = [next(box for box in group.boxes if box.thickness >= 1.5) for group in canvas.groups if group.key]
    scale = frames[0].width / scene.stages[0][1].busy
    for ghost, (_, stage) in zip(ghosts, scene.equal.stages, strict=True):
        assert ghost.boxes[0].width == pytest.approx(stage.busy * scale)
    assert f"equal split {human_seconds(scene.equal.seconds or 0.0)}" in {words.text for words in canvas.words}


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_leaves_the_page(seed: int, width: float) -> None:
    count = 12 * (seed + 1)
    nodes = [{"name": "a-long-name", "devices": {"slow": 12}}]
    cluster = Cluster.parse(CLUSTER.model_dump(exclude_none=True) | {"nodes": nodes}, "the cluster")
    stages = [(i, i + 1, f"a-long-name/{i}") for i in range(11)] + [(11, count, "a-long-name/11")]
    shown = make_study(plan(stages), profile=profile([f"layer.{i}" for i in range(count)]), cluster=cluster)
    scene, predicted = shown.scene, shown.predicted
    assert predicted is not None
    both = {"measured": predicted, "predicted": predicted}
    for canvas in (partition_canvas(scene, width), gantt_canvas(scene, both, width), memory_canvas(scene, predicted, width)):
        assert canvas.width == width
        for w in canvas.words:
            wide = 0.0 if w.upright else text_width(w.text, w.size, bold=w.bold)
            left = w.x - {"start": 0, "middle": wide / 2, "end": wide}[w.anchor]
            assert left >= -1
            assert left + wide <= canvas.width + 1
            assert 0 <= w.y <= canvas.height
        for box in canvas.boxes:
            assert box.x >= 0
            assert box.x + box.width <= canvas.width + 1e-6
            assert box.y + box.height <= canvas.height


def test_a_timeline_is_drawn_measured_above_predicted() -> None:
    study = make_study(TWO_REPLICAS, profile=profile(NAMES), cluster=CLUSTER)
    scene, predicted = study.scene, study.predicted
    assert predicted is not None
    canvas = gantt_canvas(scene, {"measured": predicted, "predicted": predicted})
    tips = [box.tip for box in canvas.boxes if box.tip.startswith("backward")]
    assert len(tips) == 12  # three devices, two micro-batches, twice
    rows = [group.label.split(":")[0] for group in canvas.groups if group.label]
    assert rows[:2] == ["measured, stage 0 on n0/0", "predicted, stage 0 on n0/0"]


def test_names_cannot_break_out_of_the_picture() -> None:
    names = ["<script>alert(1)</script>", "&\x01\U0001f600", '"><b>', "日本語"]
    evil = plan([(0, 4, "n0/0")], model="<script>x</script>")
    svg = canvas_of(evil, profile=profile(names, model="<script>x</script>"), cluster=CLUSTER).to_svg()
    assert "<script" not in svg
    assert not re.search(r"(?:src|href)=|@import", svg)
    assert {"<script>x</script>: who computes what", "3 日本語"} <= set(texts(svg))


def test_one_layer_and_zero_seconds() -> None:
    still = profile(["only"]).model_dump(exclude_none=True)
    for measured in still["measurements"]:
        measured |= {"forward_seconds": [[0.0]], "backward_seconds": [[0.0]]}
    one = plan([(0, 1, "n0/0")])
    known: dict[str, Any] = {"profile": Profile.parse(still, "the profile"), "cluster": CLUSTER}
    study = make_study(one, **known)
    scene, predicted = study.scene, study.predicted
    assert predicted is not None
    assert "n0/0 fast · layer 0" in texts(partition_canvas(scene).to_svg())
    gantt_canvas(scene, {"predicted": predicted})
    memory_canvas(scene, predicted)


def test_an_unknown_suffix_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown suffix '\.pdf'; known: \.svg, \.png, \.html"):
        draw_plan(make_study(TWO_REPLICAS), tmp_path / "plan.pdf")


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="it is for model 'net', the profile for 'other'"):
        make_study(TWO_REPLICAS, profile=profile(NAMES, model="other"))


def test_a_tensor_parallel_stage_has_rows_of_its_own_in_time_and_memory() -> None:
    own = profile(NAMES)
    two = own.measurements[0].model_copy(update={"tensor_parallel": 2})
    group = Plan.parse(
        {
            "format": "hetpipe.plan/1",
            "model": "net",
            "global_batch": 3,
            "replicas": [{"microbatch_sizes": [2, 1], "stages": [{"layers": [0, 4], "devices": ["n0/0", "n0/1"]}]}],
        },
        "the plan",
    )
    known = own.model_copy(update={"measurements": (*own.measurements, two)})
    study = make_study(group, profile=known, cluster=CLUSTER)
    scene, predicted = study.scene, study.predicted
    assert predicted is not None
    drawn = gantt_canvas(scene, {"predicted": predicted})
    assert sum(box.tip.startswith("forward") for box in drawn.boxes) == 2
    assert any(part.strips for part in memory_canvas(scene, predicted).groups)
    assert "n0/0 + n0/1 fast · layers 0–3" in {words.text for words in partition_canvas(scene).words}
