"""Mutations of a file, and what may come of them: it is read, or refused in words within seconds, and nothing else happens."""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings

from hetpipe.files.messages import clipped, exit_code
from tests.support.commands import Said
from tests.support.mutations import BINARY, DOCUMENT, Change, damaged, mutated
from tests.support.strategies import UNHURRIED

MANY = settings.get_current_profile_name() == "fuzz"
FUZZ = settings(**UNHURRIED, max_examples=5_000 if MANY else 30)
MARKS = [pytest.mark.slow, pytest.mark.timeout(7_200 if MANY else 300)]
SECONDS = 10.0  # of processor time


class TooLong(BaseException):
    """A command that took more."""


@contextmanager
def limited() -> Iterator[None]:
    """At most so many seconds of this process's time, however busy the machine."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def called(function: Callable[[], object]) -> Said:
    """What a command would say that does nothing but this."""
    try:
        function()
    except Exception as error:
        code = exit_code(error)
        return Said(code, "", clipped(f"error: {error}") if code != 1 else traceback.format_exc())
    return Said(0, "", "")


class Place:
    """A folder whose files are put back after each attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def attempt(self, file: Path, data: bytes, command: Callable[[], Said]) -> None:
        file.write_bytes(data)
        try:
            with limited():
                said = command()
            assert said.code in (0, 2, 3), said.err
            now = {found: found.read_bytes() for found in self.path.rglob("*") if found.is_file()}
            if said.code:
                lines = said.err.splitlines()
                assert "error: " in [line[:7] for line in lines[:4]], said.err  # after what it begins, and what it notes
                assert "Traceback" not in said.err
                assert len(lines) <= 10, said.err
                assert max(map(len, lines)) <= 1_007, said.err
                assert now == self.files | {file: data}, "a file was written though the command failed"
            assert not (self.path / "seen").exists(), "code of the file was run"
            assert all(now[found] == content for found, content in self.files.items() if found not in (file, self.out(found)))
        finally:
            self.restore()

    def restore(self) -> None:
        for found in self.path.rglob("*"):
            if found.is_file() and found not in self.files:
                found.unlink()
        for found, content in self.files.items():
            found.write_bytes(content)

    @staticmethod
    def out(file: Path) -> Path | None:
        """The file itself if commands may write it."""
        return file if file.name.startswith("out.") else None


def fuzz_document(place: Place, file: Path, read: Callable[[], object]) -> None:
    """100 changes of a document that `read` reads."""
    document = json.loads(file.read_text())
    read()

    @FUZZ
    @given(DOCUMENT)
    def fuzz(changes: list[Change]) -> None:
        place.attempt(file, mutated(document, changes, file.name), lambda: called(read))

    fuzz()


def fuzz_bytes(place: Place, file: Path, read: Callable[[], object]) -> None:
    """100 changes of the bytes of a file that `read` reads."""
    whole = file.read_bytes()
    read()

    @FUZZ
    @given(BINARY)
    def fuzz(changes: list[Change]) -> None:
        place.attempt(file, damaged(whole, changes), lambda: called(read))

    fuzz()
