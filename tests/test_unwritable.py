"""A checkpoint that cannot be written, or read: told with its folder, and nothing of it is left. (`cannot_save`, which
tests/test_own_loop.py runs, has one rank of several that cannot.)"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.checkpoint import CheckpointError
from hetpipe.checkpoints.stores import folder, tensor_files
from hetpipe.files.messages import InputError
from hetpipe.processes.stopping import RunStopped
from tests.support.jobs import STATE
from tests.test_checkpoint import ALONE, net
from tests.test_resume import ADAM, loaded, saved_by


@pytest.mark.parametrize("where", ["tensors", "state"])
def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = saved_by(tmp_path, ADAM)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"tensors": (folder.PendingFolder, "create"), "state": (folder, "write_text")}[where], full)
    whole = net()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path, 4, whole, ADAM(whole.parameters()), STATE, ALONE, keep=1)
    assert str(caught.value).startswith(f"cannot write the checkpoint {tmp_path}/step-00000004: it needs ")
    assert str(caught.value).endswith(" are free there; OSError: [Errno 28] No space left on device")
    assert list(tmp_path.iterdir()) == [before]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RunStopped])
def test_who_is_told_to_stop_while_writing_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    before = saved_by(tmp_path, ADAM)

    def stopped(*_: object, **__: object) -> None:
        raise kind(15)

    monkeypatch.setattr(folder.PendingFolder, "create", stopped)
    whole = net()
    with pytest.raises(kind):
        checkpoint.save(tmp_path, 4, whole, ADAM(whole.parameters()), STATE, ALONE, keep=1)
    assert list(tmp_path.iterdir()) == [before]


def test_a_folder_that_cannot_be_made_and_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    whole = net()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "file", 4, whole, ADAM(whole.parameters()), STATE, ALONE, keep=1)
    assert str(caught.value).startswith(f"cannot write the checkpoint {tmp_path}/file/step-00000004: it needs ")
    assert f"Not a directory: '{tmp_path}/file/step-00000004.partial'" in str(caught.value)

    saved = saved_by(tmp_path, ADAM)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tensor_files, "read_into", broken)
    with pytest.raises(InputError) as refused:
        loaded(saved, ADAM)
    assert str(refused.value) == (
        f"cannot read checkpoint {saved}: OSError: [Errno 5] Input/output error; remove it to resume from the one before"
    )


def test_a_checkpoint_that_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, remove, whole = saved_by(tmp_path, ADAM), shutil.rmtree, net()

    def refuse(path: Path, **options: Any) -> None:
        if path == before:
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(path, **options)

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path, 4, whole, ADAM(whole.parameters()), STATE, ALONE, keep=1)
    assert str(caught.value) == (
        f"the checkpoint {tmp_path}/step-00000004 is written, but {before}, older than the 1 that are kept, cannot be removed: "
        "[Errno 13] Permission denied"
    )
