"""The picture of a run's loss, in a file of its own and first in its report."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.job import Job
from hetpipe.show.page.report import report_page
from hetpipe.show.picture.canvas import NARROW, WIDE
from hetpipe.show.picture.loss import RunCurve, loss_canvas
from hetpipe.training.runlog import TrainResult, curve_of, write_report
from tests.support.jobs import Folder, train
from tests.support.plans_shown import demo
from tests.support.runs import trained
from tests.support.strategies import UNHURRIED


def curve(
    trained: list[tuple[int, float]], evaluated: list[tuple[int, float]] | None = None, best: int | None = None
) -> RunCurve:
    return RunCurve("a/model", "chat of <chats>.jsonl", "LoRA of rank 8", trained, evaluated or [], best)


@settings(max_examples=60, **UNHURRIED)
@given(st.data())
def test_every_point_is_inside_and_the_lowest_loss_is_lowest(data: st.DataObject) -> None:
    losses = data.draw(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=300))
    first = data.draw(st.integers(1, 10**6))
    points = list(enumerate(losses, first))
    width = data.draw(st.sampled_from([WIDE, NARROW]))
    canvas = loss_canvas(curve(points, points[:3], first), width)
    if not any(map(math.isfinite, losses)):
        assert canvas.height == 0
        return
    for line in (line for group in canvas.groups for line in group.lines):
        assert all(0 <= x <= width + 1e-6 and 0 <= y <= canvas.height + 1e-6 for x, y in line.points)
    raw = canvas.groups[1].lines[0].points
    known = [loss for loss in losses if math.isfinite(loss)]
    assert len(raw) == len(known)
    assert raw[known.index(min(known))][1] == max(y for _, y in raw)
    ElementTree.fromstring(canvas.to_svg())


def test_what_is_drawn_of_a_short_run_and_of_a_long_one() -> None:
    short = loss_canvas(curve([(1, 4.0), (2, 2.0), (3, 3.0)], [(2, 3.5), (3, 2.5)], 3))
    words = [each.text for each in short.words]
    assert {"loss", "steps", "of the steps", "of samples that do not train", "2", "3"} <= set(words)
    assert [group.label for group in short.groups[1:]] == ["loss of the steps: 4 to 3", "evaluations: 3.5 to 2.5"]
    assert [box.tip for box in short.boxes] == ["evaluation of step 2: 3.5", "evaluation of step 3: 2.5, the best"]
    long = loss_canvas(curve([(step, 1 / step) for step in range(1, 1001)]))
    raw, mean = long.groups[1].lines
    assert (len(raw.points), len(mean.points)) == (1000, 63)
    assert "of samples that do not train" not in [each.text for each in long.words]
    assert loss_canvas(curve([(1, math.nan)])).height == 0


def test_it_stands_first_in_the_report() -> None:
    page = report_page(demo(), curve([(1, 4.0), (2, 2.0)], [(2, 3.5)], 2))
    sections = [part.split('"')[0] for part in page.split('<section id="')[1:]]
    assert sections[:2] == ["run", "words"]
    for told in ("a/model: the run and its plan", "chat of &lt;chats&gt;.jsonl", "LoRA of rank 8", "that of step 2"):
        assert told in page
    text = re.sub("<[^>]*>", "", page)
    assert "4 (step 1) to 2 (step 2)" in text
    assert "a/model" not in report_page(demo())


def test_a_run_that_was_resumed_draws_all_of_it(tmp_path: Path) -> None:
    saving = {"folder": str(tmp_path / "saved"), "every_steps": 3}
    log = {"folder": str(tmp_path / "log"), "every_steps": 1}
    file = Folder(tmp_path).ready(checkpoint=saving, log=log, train=train(scheduler=None), evaluate={"every_steps": 2})
    first, second = trained(file, "train.steps=3"), trained(file)
    found = curve_of(Job.read(file), second, tmp_path / "log")
    assert [loss for _, loss in found.trained] == pytest.approx(first.losses + second.losses)
    assert [step for step, _ in found.trained] == list(range(1, 8))
    assert [step for step, _ in found.evaluated] == [2, 3, 4, 6, 7]
    assert (found.model, found.data, found.adapter) == ("mlp", "random_classification", "")
    ElementTree.parse(tmp_path / "log" / "loss.svg")
    assert '<section id="run"' in (tmp_path / "log" / "report.html").read_text()


def test_a_damaged_log_costs_the_report_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss"')
    shown = demo()
    assert shown.profile is not None
    assert shown.cluster is not None
    job = Job.read(Folder(tmp_path).job())
    write_report(
        tmp_path, shown.plan, shown.profile, shown.cluster, None, lambda: curve_of(job, TrainResult(plan=None), tmp_path)
    )
    assert f"no report in {tmp_path}: JSONDecodeError" in caplog.text
    assert not (tmp_path / "report.html").exists()
