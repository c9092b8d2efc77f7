"""How many things are planned side by side."""

from __future__ import annotations

import os

import pytest

from hetpipe.processes.environment import cores


def test_the_processors_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 processors a job has been given 3, and the next 1; it counted all that the machine has."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for given in ({0, 1, 5}, {7}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, given=given: given, raising=False)
        assert cores() == len(given)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == 64
