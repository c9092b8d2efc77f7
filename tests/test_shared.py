"""Whether all ranks see one folder (`cannot_save`, which tests/test_own_loop.py runs, has a loop of one's own)."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from hetpipe.checkpoints.stores import shared
from hetpipe.checkpoints.stores.shared import appears
from hetpipe.documents.job import Job
from hetpipe.files.folders import LOCK_FILE
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.training.start import run_everywhere
from tests.support.jobs import Folder
from tests.support.saving import train_apart


def test_what_another_host_has_written_may_appear_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, looks, real = tmp_path / "shard", list[str](), os.listdir

    def listdir(folder: Path) -> list[str]:
        looks.append("empty" if file.exists() else "none")
        file.write_bytes(b"12" if file.exists() else b"")
        return real(folder)

    monkeypatch.setattr(shared, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(os, "listdir", listdir)
    assert appears(file, 2)
    assert looks == ["none", "empty"]
    monkeypatch.setattr(shared, "WAIT_SECONDS", 0.0)
    assert not appears(file, 3)
    assert not appears(tmp_path / "other")


def test_a_run_whose_hosts_share_no_folder_is_refused_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Folder(tmp_path).ready(checkpoint={"folder": "saved", "every_steps": 2}, log=None)
    settings = [f"cluster={tmp_path}/cluster.yaml", f"profile={tmp_path}/profile.json", f"plan.file={tmp_path}/plan.json"]
    with pytest.raises(RankFailure) as caught:
        run_everywhere(Job.read(file, settings), train_apart)
    assert caught.value.exit_code == 2
    assert re.search(
        r"saved \(checkpoint.folder\) is not one folder for all ranks, of which each writes its own part of a checkpoint; name a "
        rf"folder on a file system that all hosts share \(NFS, for example\), by the same absolute path on each:\n"
        rf"  rank 0 on host {socket.gethostname()} writes into {tmp_path}/0/saved\n"
        rf"  rank 1 on host {socket.gethostname()} does not see that in {tmp_path}/1/saved\n"
        rf"  rank 2 on host {socket.gethostname()} does not see that in {tmp_path}/2/saved$",
        str(caught.value),
    )
    assert not (tmp_path / "1" / "saved").exists()
    assert [path.name for path in (tmp_path / "0" / "saved").iterdir()] == [LOCK_FILE]
