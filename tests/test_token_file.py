"""Tokens in a file (hetpipe/language/kept): made once on a host, found again as they were or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from safetensors import SafetensorError

from hetpipe.language.documents import text
from hetpipe.language.kept import key, once, token_file
from hetpipe.language.reading import read
from hetpipe.language.reading.gathered import Gathered, gather
from hetpipe.processes import progress
from hetpipe.processes.progress import Activity
from tests.support.chats import CHATML, lines
from tests.support.token_files import LENGTH, RECORDS, chats, count_groups, everything, files, write_chats


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FIRST_SECONDS", "SOON_SECONDS"):  # how long it takes depends on the machine
        monkeypatch.setattr(progress, name, 600.0)
    write_chats(tmp_path)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_groups(monkeypatch)


@pytest.mark.parametrize("changes", [{}, {"pack": True}, {"mask": True, "sizes": [30, LENGTH]}, {"test_fraction": 0}])
def test_the_second_start_reads_what_the_first_has_made_and_says_the_same(
    changes: dict[str, Any], made: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    first, said = everything(chats(**changes)), capsys.readouterr().err
    assert made == [0]
    beginnings = (
        "note: of 60 records of chats.jsonl, ",
        "note: 30 of 60 records of chats.jsonl are 60 samples, ",
        "note: of chats.jsonl, nothing reads the keys (each in so many records) id (60)",
    )
    lines_said = said.splitlines()
    assert len(lines_said) == 3
    assert all(line.startswith(begin) for line, begin in zip(lines_said, beginnings, strict=True)), said
    assert everything(chats(**changes)) == first
    assert (capsys.readouterr().err, made, len(files())) == (said, [0], 1)


def test_one_file_serves_all_that_becomes_of_the_same_samples(made: list[int]) -> None:
    """`hetpipe finetune` reads them unpacked, and then as its job says."""
    for changes in ({}, {"pack": True}, {"mask": True}, {"sizes": [LENGTH]}, {"test_fraction": 0.5}):
        chats(**changes)
    assert (made, len(files())) == ([0], 1)


def in_words(change: Callable[[dict[str, Any]], object], file: str = "tokenizer.json") -> None:
    path = Path("words", file)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def same_size_and_time() -> None:
    """A letter more in one place and less in another."""
    path = Path("chats.jsonl")
    before, content = path.stat(), path.read_text()
    path.write_text(content.replace("Yes", "Yet", 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


CHANGES: dict[str, tuple[Callable[[], object], dict[str, Any]]] = {
    "a record, with size and time as before": (same_size_and_time, {}),
    "a record more": (lambda: lines(Path("chats.jsonl"), [*RECORDS, RECORDS[0]]), {}),
    "another name of the file, which notes say": (lambda: Path("chats.jsonl").rename("b.jsonl"), {"file": "b.jsonl"}),
    "two files": (lambda: lines(Path("b.jsonl"), RECORDS[:3]), {"file": ["chats.jsonl", "b.jsonl"]}),
    "a token more": (
        lambda: in_words(lambda c: c["added_tokens"].append({**c["added_tokens"][-1], "id": 600, "content": "<tool>"})),
        {},
    ),
    "how a token is cut": (lambda: in_words(lambda c: c["added_tokens"][3].update(rstrip=True)), {}),
    "the token that ends a text": (lambda: in_words(lambda c: c.update(eos_token="<|im_end|>"), "tokenizer_config.json"), {}),
    "the template": (lambda: Path("words/chat_template.jinja").write_text(CHATML), {}),
    "a template by name": (lambda: Path("t.jinja").write_text(CHATML), {"template": "t.jinja"}),
    "turns": (bool, {"turns": "last"}),
    "thinking": (bool, {"thinking": "off"}),
    "columns": (bool, {"columns": {"system": None}}),
    "length": (bool, {"length": 40}),
    "too_long": (bool, {"too_long": "drop"}),
    "limit": (bool, {"limit": 50}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_samples_or_notes_are_in_another_file(change: str, made: list[int]) -> None:
    chats()
    edit, changes = CHANGES[change]
    edit()
    found = everything(chats(**changes))
    assert len(files()) == 2
    for file in files():
        file.unlink()
    assert everything(chats(**changes)) == found
    assert made == [0, 0, 0]


def test_another_release_of_what_makes_tokens_finds_none(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    chats()
    monkeypatch.setattr(key, "made_by", lambda: ("python 3", "hetpipe 9"))
    chats()
    assert made == [0, 0]


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-7] + bytes([content[-7] ^ 1]) + content[-6:]


def other_header(content: bytes) -> bytes:
    return content.replace(b"I32", b"I64", 1)


@pytest.mark.parametrize("damage", [truncated, flipped, other_header, lambda _: b""])
def test_a_damaged_file_is_made_again(
    damage: Callable[[bytes], bytes], made: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(chats())
    (file,) = files()
    file.write_bytes(damage(file.read_bytes()))
    capsys.readouterr()
    assert everything(chats()) == before
    said = capsys.readouterr().err
    assert f"note: {file} is not as it was written, so its tokens are made again" in said
    assert (made, files()) == ([0, 0], [file])
    assert everything(chats()) == before
    assert len(made) == 2


def no_folder(_: pytest.MonkeyPatch) -> str:
    Path(".hetpipe").write_text("")
    return "cannot write into the folder .hetpipe/tokens: "


def no_room(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(once, "free_bytes", lambda _: 1024)
    return "1.00 KiB are free there, and "


def full_disk(patch: pytest.MonkeyPatch) -> str:
    def fails(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    patch.setattr(token_file, "save_file", fails)
    return "No space left on device"


@pytest.mark.parametrize("refuse", [no_folder, no_room, full_disk])
def test_where_no_file_can_be_written_each_start_makes_its_own(
    refuse: Callable[[pytest.MonkeyPatch], str],
    made: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        why = refuse(patch)
        found = everything(chats())
        said = capsys.readouterr().err
        assert said.count("note: tokens are not kept in .hetpipe/tokens (") == 1, said
        assert why in said
        monkeypatch.setenv("RANK", "1")
        for name, value in {"WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        assert everything(chats()) == found
        assert capsys.readouterr().err == ""  # one of a host says so
    assert (made, list(Path(".hetpipe").glob("tokens/*.writing"))) == ([0, 0], [])


def test_a_file_that_changes_while_it_is_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*arguments: Any, **more: Any) -> Gathered:
        lines(Path("chats.jsonl"), RECORDS[:50])
        return gather(*arguments, **more)

    monkeypatch.setattr(read, "gather", late)
    chats()
    assert files() == []


HOLDER = """
import sys
from hetpipe.language.kept import once
with once._held(sys.argv[1], once._acquired(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_others_wait_for_who_makes_it_and_not_for_one_that_was_killed(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    chats()
    (file,) = files()
    own = file.name.partition("-")[0]
    file.unlink()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, own], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waits, said = threading.Event(), list[str]()

        def say(_: Activity, text: str) -> None:
            said.append(text)
            waits.set()

        monkeypatch.setattr(Activity, "say", say)
        found = list[Any]()
        thread = threading.Thread(target=lambda: found.append(everything(chats())))
        thread.start()
        assert waits.wait(60)
        assert said[0].startswith(f"process {holder.pid} (rank 0) on host ")
        assert (found, made) == ([], [0])
        holder.send_signal(signal.SIGKILL)
        thread.join(60)
        assert len(found) == 1
        assert made == [0, 0]
    finally:
        holder.kill()
        holder.communicate()


BOTH = """
import sys
from hetpipe.language.conversations import chat
from hetpipe.language.reading import read
gather = read.gather
def counted(*arguments, **more):
    print("made", flush=True)
    return gather(*arguments, **more)
read.gather = counted
print("ready", flush=True)
sys.stdin.readline()
splits = chat("chats.jsonl", "words", 50)
print(splits.train.digests(), splits.test.digests(), flush=True)
"""


def test_of_ranks_that_start_together_one_makes_the_file() -> None:
    ranks = []
    for rank in range(3):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", BOTH],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                stderr=subprocess.PIPE,
                env=os.environ | {key: str(value) for key, value in place.items()},
            )
        )
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=100) for process in ranks]
    out = [line for own, _ in said for line in own.splitlines()]
    train, test = chats().train, chats().test
    assert out.count("made") == 1
    assert [line for line in out if line != "made"] == 3 * [f"{train.digests()} {test.digests()}"]  # type: ignore[union-attr, attr-defined]
    assert ["note: " in err for _, err in said] == [True, False, False]


def test_files_used_longest_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        chats(limit=40 + number)
        (newest,) = set(files()) - {file for file in files() if file.stat().st_mtime < 1e6}
        os.utime(newest, (number, number))
    old, middle, new = sorted(files(), key=lambda file: file.stat().st_mtime)
    chats(limit=40)  # used again
    monkeypatch.setattr(token_file, "MOST_BYTES", old.stat().st_size * 3.3)
    chats(limit=43)
    assert (old.exists(), middle.exists(), new.exists(), len(files())) == (True, False, True, 3)
    monkeypatch.setattr(token_file, "MOST_BYTES", 1)
    mapped = chats(limit=44)
    assert len(files()) == 1
    before = everything(mapped)
    files()[0].unlink()
    assert everything(mapped) == before  # who has mapped it keeps it


def test_texts_are_tokenized_once_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines(Path("texts.jsonl"), [{"text": f"the quick fox </s> {i}"} for i in range(40)])
    first: Any = text(8, "texts.jsonl", tokenizer="words").train
    said = capsys.readouterr().err
    assert "note: 40 of 40 texts hold special tokens" in said
    with monkeypatch.context() as patch:
        patch.setattr("hetpipe.language.documents._tokenized", lambda *_: pytest.fail("tokenized again"))
        second: Any = text(8, "texts.jsonl", tokenizer="words").train
        assert capsys.readouterr().err == said
    assert (torch.equal(first.text, second.text), first.digests()) == (True, second.digests())
    lines(Path("texts.jsonl"), [{"text": "another fox and the lazy dog"}] * 10)
    assert text(8, "texts.jsonl", tokenizer="words").train.digests() != first.digests()  # type: ignore[attr-defined]
