"""Files that documents are read from and written to, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.files.formats import read_mapping
from hetpipe.files.messages import InputError
from hetpipe.files.units import human_seconds, three_digits
from hetpipe.files.writing import write_text
from tests.support.documents import plan_document, refused


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"cannot read .*nothing.yaml: No such file"):
            read_mapping(tmp_path / "nothing.yaml")

    @pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("a.yaml", "a: [1")])
    def test_broken(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=f"{name} is not valid {name[2:].upper()}"):
            read_mapping(tmp_path / name)

    def test_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InputError, match="it is not UTF-8 text"):
            read_mapping(tmp_path / "a.yaml")

    def test_yaml_runs_no_code(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("!!python/object/apply:os.system ['true']")
        with pytest.raises(InputError, match="not valid YAML"):
            read_mapping(tmp_path / "a.yaml")

    def test_another_kind_of_document(self) -> None:
        refused(Cluster, ["a"], "expected a mapping with the key 'format', found")
        refused(Cluster, plan_document(), "its format is 'hetpipe.plan/1', expected 'hetpipe.cluster/1'")

    def test_writing_is_atomic(self, tmp_path: Path) -> None:
        target = tmp_path / "new" / "file.json"
        write_text(target, "1")
        write_text(target, "2")
        assert target.read_text() == "2"
        assert [path.name for path in target.parent.iterdir()] == ["file.json"]


def test_file_sizes_are_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large.yaml").write_text("a: " + "x" * 5_000_000)
    with pytest.raises(InputError, match="it has 4.77 MiB, more than the limit of 4.00 MiB; a .json may have 256 MiB"):
        read_mapping(tmp_path / "large.yaml")
    monkeypatch.setattr("hetpipe.files.formats.MOST_FILE_BYTES", 1_000)
    (tmp_path / "large.JSON").write_text("1" * 2_000)
    with pytest.raises(InputError, match="large.JSON: it has 2000 bytes, more than the limit of 1000 bytes$"):
        read_mapping(tmp_path / "large.JSON")


@pytest.mark.parametrize("name", ["a\0b.json", "a\ud800.yaml", "x" * 5_000])
def test_names_that_no_file_has(name: str) -> None:
    with pytest.raises(InputError, match="^cannot read "):
        read_mapping(name)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_mapping(tmp_path / "a.json") == {"a": 1}


def test_what_is_infinite_or_no_number_is_written() -> None:
    assert (three_digits(float("inf")), three_digits(float("nan"))) == ("∞", "unknown")
    assert (human_seconds(float("inf")), human_seconds(float("nan"))) == ("∞", "unknown")
