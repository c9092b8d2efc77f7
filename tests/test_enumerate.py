"""What numba keeps on disk of the compiled loops."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hetpipe.partitioners import _compiled, _enumerate

SOURCE = """
from typing import NamedTuple

from hetpipe.partitioners._compiled import compiled


class {name}(NamedTuple):
    number: int


@compiled
def first(x):
    return x.number


@compiled
def second(x):
    return 2 * x


def both():
    return first({name}(3)), second(3)
"""


def loaded(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with two compiled functions, of which one is given a tuple of this name."""
    file = folder / "loops.py"
    file.write_text(SOURCE.format(name=name))
    spec = importlib.util.spec_from_file_location("loops", file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loops", found)
    monkeypatch.setattr(_compiled, "on_disk", [])
    spec.loader.exec_module(found)
    return found


def kept(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("__pycache__/*.nb?"))}


def names(files: dict[str, bytes]) -> set[str]:
    return {name.split("-")[0] for name in files}


class TestReady:
    @pytest.mark.parametrize("how", ["another version", "cut short", "data cut short"])
    def test_only_what_cannot_be_read_is_compiled_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        """A class that the kept functions are for is renamed; or a file is damaged."""
        assert loaded(tmp_path, "Old", monkeypatch).both() == (3, 6)
        before = kept(tmp_path)
        assert names(before) == {"loops.first", "loops.second"}
        if how != "another version":
            suffix = ".nbi" if how == "cut short" else ".nbc"
            file = next(tmp_path.glob(f"__pycache__/loops.first*{suffix}"))
            file.write_bytes(file.read_bytes()[:-20])
        now = loaded(tmp_path, "New" if how == "another version" else "Old", monkeypatch)
        monkeypatch.setattr(_enumerate, "_search_nothing", now.both)
        _enumerate.ready.__wrapped__()
        assert now.both() == (3, 6)
        after = kept(tmp_path)
        assert names(after) == names(before)
        if how != "another version":
            assert all(after[name] == content for name, content in before.items() if ".second-" in name)

    def test_another_fault_deletes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever raised an AttributeError, all that was compiled was deleted, and compiled again the next time."""
        module = loaded(tmp_path, "Old", monkeypatch)
        module.both()
        before = kept(tmp_path)

        def fault() -> None:
            raise AttributeError("a fault of ours")

        monkeypatch.setattr(_enumerate, "_search_nothing", fault)
        ours = list(Path(_enumerate.__file__).parent.glob("__pycache__/_enumerate.*.nb?"))
        with pytest.raises(AttributeError, match="a fault of ours"):
            _enumerate.ready.__wrapped__()
        assert kept(tmp_path) == before
        assert all(file.exists() for file in ours)
