"""What other ranks do, shown while one waits for them."""

from __future__ import annotations

import re
import time

import pytest

from hetpipe.measuring.measure import _gathered
from hetpipe.processes import progress
from hetpipe.processes.peers import others
from hetpipe.processes.peers.beats import Beat
from hetpipe.processes.peers.others import showing_others
from hetpipe.processes.progress import Activity
from hetpipe.processes.world import World


def test_while_the_main_rank_waits_for_measurements_it_says_who_still_measures_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(progress, "OFTEN_SECONDS", 0.02)
    monkeypatch.setattr(others, "LOOK_SECONDS", 0.02)
    told = ["measuring slow: 3 of 20, layer 1 of 4"]
    monkeypatch.setattr(
        others,
        "others",
        lambda: {
            3: Beat(rank=3, count=1, time=0.0, host="b", place="", doing=told[0]),
            4: Beat(rank=4, count=1, time=0.0, host="b", place="", doing="", waits=True),
        },
    )
    seen = ""

    class Waiting(World):
        def gather(self, value: object) -> list[object]:
            nonlocal seen
            for text in ("measuring slow: 3 of 20, layer 1 of 4", "measuring slow: 4 of 20, layer 2 of 4"):
                told[0] = text
                line = rf"waiting for the measurements of other ranks: rank 3 on host b: {text}; \d+ s so far\n"
                deadline = time.monotonic() + 60
                while not re.search(line, seen) and time.monotonic() < deadline:
                    time.sleep(0.01)
                    seen += capsys.readouterr().err
                assert re.search(line, seen), seen
            return [value]

    world = Waiting(rank=0, size=5, device_id="n0/0", rank_of={}, ranks=(0, 1), control=None)
    assert _gathered(world, 5) == [5]


def test_who_leaves_speaking_to_another_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "others", lambda: pytest.fail("it looked"))
    with Activity("measuring", shown=False) as activity, showing_others(activity):
        assert activity.text == ""
