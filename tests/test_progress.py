"""What is going on, where there is no terminal: lines that can be followed."""

from __future__ import annotations

import re
import time

import pytest

from hetpipe.processes import progress
from hetpipe.processes.progress import Activity, duration


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(progress, "OFTEN_SECONDS", 0.05)


def wait_for_line(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Until such a line comes: an earlier one may tell what was so before."""
    lines, deadline = list[str](), time.monotonic() + 20
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
