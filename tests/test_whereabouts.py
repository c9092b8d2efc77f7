"""What a rank says that it does, in messages and with its signs of life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hetpipe.processes.progress import Activity
from hetpipe.processes.whereabouts import describe_with, during, needed, now, waiting, whereabouts
from hetpipe.runtime.recorder import Recorder
from hetpipe.runtime.stages.transfers import Outgoing, Side


@pytest.fixture(autouse=True)
def _nothing_said() -> Iterator[None]:
    describe_with("")
    yield
    describe_with("")


def test_what_is_shown_to_people_is_said_where_nothing_else_is() -> None:
    assert now()[:2] == ("", False)
    with Activity("measuring slow", 20, shown=False) as activity:
        activity.advance("layer 1 of 4")
        assert now()[:2] == ("measuring slow: 1 of 20, layer 1 of 4", False)
        with Activity("planning", shown=False):
            assert now().text == "planning"
        describe_with("replica 0 stage 1", lambda: "1F3 of step 7")
        assert whereabouts(2) == "rank 2, replica 0 stage 1, in 1F3 of step 7"
    describe_with("device n0/0", needed=False)
    assert (now().text, needed()) == ("", False)


def test_a_task_comes_before_all_else_and_what_an_error_ended_stays_said() -> None:
    describe_with("replica 0 stage 1", lambda: "the sum of losses of step 6", lambda: True)
    assert now()[:2] == ("the sum of losses of step 6", True)
    with during("fetching samples of step 7"):
        assert now()[:2] == ("fetching samples of step 7", False)
    assert now()[:2] == ("the sum of losses of step 6", True)
    with pytest.raises(OSError, match="gone"), during("fetching samples of step 8"):
        raise OSError("the server is gone")
    assert whereabouts(2) == "rank 2, replica 0 stage 1, in fetching samples of step 8"
    describe_with("replica 0 stage 1", lambda: "F0")
    assert now()[:2] == ("F0", False)


def test_how_long_it_has_been_seen_to_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("hetpipe.processes.whereabouts._seen", (None, 0.0))
    assert now() == ("", False, 0.0), "the first look: nothing is known of the time before"
    with during("fetching samples of step 7"):
        assert now().seconds == 0.0
        clock[0] += 30.0
        assert now().seconds == 30.0
        with waiting():
            assert now() == ("fetching samples of step 7", True, 0.0)
            clock[0] += 5.0
            assert now().seconds == 5.0
        assert now() == ("fetching samples of step 7", False, 0.0)
    with waiting(), during("writing its part of a checkpoint, for which the others wait"):
        assert not now().waits
    assert not now().waits


def test_a_stage_waits_for_others_between_its_actions_and_until_what_it_sent_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, seen = Recorder(torch.device("cpu")), list[bool]()
    recorder.note("the sum of losses")
    seen.append(recorder.waits)
    recorder.begin("1F0", "F", 0, 1)
    seen.append(recorder.waits)
    recorder.note("what follows the gradients", waits=False)
    seen.append(recorder.waits)
    assert seen == [True, False, False]

    class Work:
        def wait(self) -> None:
            seen.append(now().waits)

    monkeypatch.setattr("torch.distributed.isend", lambda *_, **__: Work())
    sent = Outgoing(Side((1,)), None)  # type: ignore[arg-type]  # a group that nobody asks
    sent.send([torch.zeros(1)])
    sent.settle(1)
    assert seen[3:] == [True]
    assert not now().waits
