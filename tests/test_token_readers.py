"""Records that several processes read (hetpipe/language/reading/workers) are what one process finds, says and refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


from hetpipe.files.messages import InputError
from hetpipe.language.reading import read, workers
from hetpipe.processes import progress
from tests.support.chats import CHATML, chat_of, lines
from tests.support.token_files import RECORDS, chats, count_groups, everything, files, write_chats


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FIRST_SECONDS", "SOON_SECONDS"):  # how long it takes depends on the machine
        monkeypatch.setattr(progress, name, 600.0)
    write_chats(tmp_path)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_groups(monkeypatch)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes read, some records at a time."""
    monkeypatch.setattr(read, "how_many", lambda _: 2)
    monkeypatch.setattr(read, "TOGETHER", 7)


def alone_and_by_two(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **changes: Any) -> list[Any]:
    """What one process finds and says, or refuses, and what two do."""
    found = list[Any]()
    for count in (0, 2):
        patch.setattr(read, "how_many", lambda _, count=count: count)
        for file in files():
            file.unlink()
        try:
            result = everything(chats(**changes))
        except InputError as error:
            result = str(error)
        found.append((result, capsys.readouterr().err))
    return found


@pytest.mark.usefixtures("two")
def test_several_processes_find_and_say_and_refuse_what_one_does(
    made: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: list[Any] = [dict(record) for record in RECORDS]
    bad[5], bad[33] = {"messages": 5}, "no record"
    lines(Path("bad.jsonl"), bad)
    cases: Sequence[dict[str, Any]] = (
        {},
        {"pack": True},
        {"too_long": "refuse"},
        {"file": "bad.jsonl"},
        {"columns": {"prompt": "nope"}},
    )
    for changes in cases:
        made.clear()
        alone, by_two = alone_and_by_two(monkeypatch, capsys, **changes)
        assert by_two == alone, changes
        assert len(made) == 9, changes  # the others read in other processes
    assert "2 of 60 records cannot be used" in alone_and_by_two(monkeypatch, capsys, file="bad.jsonl")[1][0]


@pytest.mark.usefixtures("two")
def test_a_process_that_is_killed_costs_time_only(
    made: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "serve", os.abort)
    found = everything(chats())
    assert "note: chats.jsonl is read again in one process, because a process that reads has ended" in capsys.readouterr().err
    assert len(made) == 9
    files()[0].unlink()
    monkeypatch.setattr(read, "how_many", lambda _: 0)
    assert everything(chats()) == found


@pytest.mark.usefixtures("two")
def test_chats_that_one_process_would_give_the_template_otherwise_are_read_by_one(
    made: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first chat of a build decides which of its keys are not read: here a name, where it is empty."""
    monkeypatch.setattr(read, "TOGETHER", 14)
    template = CHATML.replace("{{ m.role }}", "{{ m.role }}{{ m.name }}", 1)
    Path("words/chat_template.jinja").write_text(template)
    records = [chat_of("Hello fox", f"Yes {i}.") for i in range(28)]
    for number, record in enumerate(records):
        record["messages"][0]["name"] = "fox" * (number >= 14)
    lines(Path("chats.jsonl"), records)
    alone, by_two = alone_and_by_two(monkeypatch, capsys)
    again = (
        "note: chats.jsonl is read again in one process, because "
        "the template takes chats of one form otherwise, by what is in them\n"
    )
    assert (by_two[0], by_two[1].replace(again, "")) == alone
    assert (again in by_two[1], len(made)) == (True, 4)


def test_few_bytes_are_read_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 8)
    assert [workers.how_many(mib * 2**20) for mib in (0, 1, 15, 16, 33, 10_000)] == [0, 0, 0, 2, 4, 8]
    monkeypatch.setattr(workers, "cores", lambda: 1)
    assert workers.how_many(2**30) == 0
