"""What is going on, where there is no terminal: lines that can be followed."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from hetpipe.cli.terminal import ActivityBar, seen_table
from hetpipe.processes import progress
from hetpipe.processes.progress import Activity, Seen, duration, seen_text


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(progress, "OFTEN_SECONDS", 0.05)


def wait_for_line(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Until such a line comes: an earlier one may tell what was so before."""
    lines, deadline = list[str](), time.monotonic() + 60
    while not any(re.fullmatch(pattern, line) for line in lines) and time.monotonic() < deadline:
        time.sleep(0.01)
        lines += capsys.readouterr().err.splitlines()
    assert re.fullmatch(pattern, lines[-1])


def test_what_takes_long_gets_lines_and_what_is_short_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Activity("measuring fast", 4) as activity:
        activity.advance("layer 1 of 2 ([a]), 2 samples")  # no markup
        wait_for_line(r"measuring fast: 1 of 4, layer 1 of 2 \(\[a\]\), 2 samples; \d+ s so far, about \d+ s left", capsys)
    with Activity("planning") as activity:
        wait_for_line(r"planning; \d+ s so far", capsys)
        activity.say("rows")
        wait_for_line(r"planning: rows; \d+ s so far", capsys)
    capsys.readouterr()
    monkeypatch.setattr(progress, "FIRST_SECONDS", 600.0)
    with Activity("short", 2):
        pass
    with Activity("nobody asked", 2, lasting=True, shown=False) as activity:
        activity.advance()
    assert capsys.readouterr().err == ""
    with Activity("training", 2, done=1, lasting=True) as activity:
        activity.advance("loss 0.5")
    assert re.fullmatch(r"training: 2 of 2, loss 0.5; \d+ s so far\n", capsys.readouterr().err)


def test_a_line_is_one_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    progress.say("x " * 200 + "[bold]")
    assert capsys.readouterr().err.splitlines() == ["x " * 200 + "[bold]"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599.6, "1 h 0 min"), (90061, "25 h 1 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def seen(number: int, busy: float | None, peak_bytes: int | None, memory_bytes: int | None = 100 * 2**20) -> Seen:
    return Seen(f"box/{number} slow", f"r0 s{number}", "3–4", f"{number}F0 of step 7", busy, peak_bytes, memory_bytes)


def test_who_watches_gets_a_line_of_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    with Activity("training", 2, devices=lambda: [seen(0, 0.954, 30 * 2**20), seen(1, None, None)]):
        wait_for_line(r"  box/0 slow 95% busy, 30.0 MiB of 100 MiB", capsys)


def test_of_many_devices_those_that_stand_out_are_named() -> None:
    devices = [seen(i, 0.1 + 0.01 * i, (i == 7) * 2**20) for i in range(64)]
    assert seen_text(devices) == (
        "box/0 slow 10% busy, 0 B of 100 MiB; box/63 slow 73% busy, 0 B of 100 MiB; box/7 slow 17% busy, 1.00 MiB of 100 MiB"
    )
    assert seen_text([seen(i, None, None) for i in range(64)]) == ""
    assert seen_text([seen(2, None, 2**20, None)]) == "box/2 slow 1.00 MiB"


def test_short_activities_in_a_row_are_not_silent_for_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 600.0)
    monkeypatch.setattr(progress, "SOON_SECONDS", 0.0)
    progress.say("the job")
    monkeypatch.setattr(progress, "_said", time.monotonic() - 600)
    with Activity("at once"):
        wait_for_line(r"at once; \d+ s so far", capsys)


def test_a_terminal_shows_the_devices_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := io.StringIO())
    monkeypatch.setenv("COLUMNS", "100")
    activity = Activity("training", 2, lasting=True, shown=False, devices=lambda: [seen(0, 0.954, 30 * 2**20)])
    bar = ActivityBar(activity)
    bar.start()
    activity.advance("loss 0.5")
    bar.update()
    bar.stop()
    above, below = screen.getvalue().rstrip().splitlines()[-2:]
    assert re.search(r"r0 s0 +box/0 slow +3–4 +95% .* 30.0 MiB +of 100 MiB", above)
    assert re.search(r"training .* 1/2 .*loss 0.5", below)


def test_devices_in_a_table_of_any_width() -> None:
    for width in (80, 120):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(seen_table([seen(0, 0.954, 30 * 2**20), seen(1, None, None)]))
        text = console.export_text()
        assert all(len(line) <= width for line in text.splitlines())
        assert re.search(r"r0 s0 +box/0 slow +3–4 +95% .* 30.0 MiB +of 100 MiB +0F0 of", text)
        assert re.search(r"r0 s1 +box/1 slow +3–4 +1F0 of", text)


def test_an_activity_within_another_is_told_as_what_that_one_does() -> None:
    """Of a data function that reads for long, while the job starts: one line, not two."""
    with Activity("starting") as outer, Activity("reading x.jsonl", 40, inner=True) as inner:
        assert inner._log is None
        inner.advance("30 records")
        assert outer.line().startswith("starting: reading x.jsonl: 1 of 40, 30 records; ")
    with Activity("reading x.jsonl", inner=True) as alone:
        assert alone._log is not None
