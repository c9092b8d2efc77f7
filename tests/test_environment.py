"""What the environment says of a process, and the nonsense that it may hold."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hetpipe.files.messages import InputError
from hetpipe.processes.environment import Place, check_environment, long_timeout, own_rank, place, started_ranks, step_timeout
from hetpipe.processes.world import connect
from tests.support.commands import Command
from tests.support.jobs import Folder

NO_SECONDS = ["abc", "", "0", "-1", "nan", "inf", "-inf", "1e400", "10m", "1,5", "0.5", "1e10"]
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
NO_PLACE = [
    *[
        ({name: value}, f"the environment variable {name} is {value!r}: expected a whole number from ")
        for name in TORCHRUN
        if name != "MASTER_ADDR"
        for value in ("abc", "", "-1", "1.5", "9" * 30, "²")
    ],
    ({"WORLD_SIZE": "0"}, "the environment variable WORLD_SIZE is '0': expected a whole number from 1 to"),
    ({"RANK": "5", "WORLD_SIZE": "2"}, "the environment variable RANK is 5, but WORLD_SIZE is 2: ranks go from 0 to 1"),
    ({"LOCAL_RANK": "2"}, "the environment variable LOCAL_RANK is 2, but there are 2 ranks on this host"),
    ({"WORLD_SIZE": None}, "RANK is '3', but WORLD_SIZE is not set: start the ranks with torchrun, which sets both, or unset"),
    ({"MASTER_ADDR": None}, "RANK is 3, but MASTER_ADDR is not set: start the ranks with torchrun"),
    ({"MASTER_PORT": None}, "RANK is '3', but MASTER_PORT is not set: start the ranks with torchrun"),
]


def under(monkeypatch: pytest.MonkeyPatch, **variables: str | None) -> None:
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_torchrun_says_who_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, **dict.fromkeys(TORCHRUN))
    assert (place(), started_ranks(), own_rank()) == (Place(), 1, 0)
    under(monkeypatch, **TORCHRUN)
    check_environment()
    assert (place(), started_ranks(), own_rank()) == (Place(rank=3, size=4, local_rank=1, local_size=2, agent=1), 4, 3)
    under(monkeypatch, LOCAL_RANK=None, LOCAL_WORLD_SIZE=None, GROUP_RANK=None)
    assert place() == Place(rank=3, size=4, local_rank=3, local_size=4)


def test_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, HETPIPE_TIMEOUT_SECONDS=None, HETPIPE_LONG_TIMEOUT_SECONDS=None)
    assert (step_timeout(), long_timeout()) == (timedelta(minutes=2), timedelta(hours=1))
    under(monkeypatch, HETPIPE_TIMEOUT_SECONDS="7e3", HETPIPE_LONG_TIMEOUT_SECONDS=" 20 ")
    assert (step_timeout(), long_timeout()) == (timedelta(seconds=7000), timedelta(seconds=7000))


@pytest.mark.parametrize(("changes", "message"), NO_PLACE, ids=[str(changes)[:40] for changes, _ in NO_PLACE])
def test_a_launcher_that_says_no_place(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], message: str) -> None:
    under(monkeypatch, **{**TORCHRUN, **changes})
    for ask in (check_environment, lambda: connect(use_cuda=False)):
        with pytest.raises(InputError) as caught:
            ask()
        assert message in str(caught.value)
    assert own_rank() in (0, 3)


@pytest.mark.parametrize("value", NO_SECONDS)
@pytest.mark.parametrize("name", ["HETPIPE_TIMEOUT_SECONDS", "HETPIPE_LONG_TIMEOUT_SECONDS"])
def test_seconds_that_are_none(run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    found = run("train", "job.yaml")
    assert (found.code, found.out) == (2, "")
    assert f"error: the environment variable {name} is {value!r}: write seconds, a number from 1 to 1000000000" in found.err


@pytest.mark.parametrize("command", ["train", "profile"])
@pytest.mark.parametrize(("changes", "message"), NO_PLACE[::6] + NO_PLACE[-6:])
def test_commands_say_it_first(
    folder: Folder, run: Command, monkeypatch: pytest.MonkeyPatch, command: str, changes: dict[str, str | None], message: str
) -> None:
    under(monkeypatch, **{**TORCHRUN, **changes})
    monkeypatch.setattr("hetpipe.cli.exits.os._exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    found = run(command, "job.yaml")
    assert (found.code, found.out) == (2, "")
    assert message in found.err
    assert "Traceback" not in found.err
