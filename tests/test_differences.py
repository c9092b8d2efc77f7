"""Ranks that were not told the same, or have not the same versions, do not train side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hetpipe
from hetpipe.documents.job import Job
from hetpipe.processes.peers.differences import Told, differences, own_versions
from hetpipe.training import session
from hetpipe.training.session import told_by
from tests.support.jobs import Folder, train

VERSIONS = {"hetpipe": "0.1.0", "torch": "2.13.0+cpu", "Python": "3.11.9"}


def rank(host: str, values: dict[str, Any] | None = None, versions: dict[str, str] | None = None) -> Told:
    return Told(host, {**VERSIONS, **(versions or {})}, values or {})


def test_alike_is_alike() -> None:
    values = {"train.seed": 0, "model.args.sizes": [1, 2], "log": None}
    assert differences([rank("a", values), rank("b", dict(values))]) == ([], [])
    assert own_versions().keys() == VERSIONS.keys()
    assert own_versions()["hetpipe"] == hetpipe.__version__


def test_every_key_that_differs_is_told_with_all_values_and_hosts() -> None:
    base = {"train.optimizer.lr": 1e-3, "train.seed": 0, "log": None}
    ranks = [
        rank("a", base),
        rank("a", base),
        rank("b", base | {"train.optimizer.lr": 1e-1}),
        rank("c", {"train.optimizer.lr": 1e-3, "log": None, "model.args.width": 8, "train.seed": 0}),
    ]
    assert differences(ranks) == (
        [
            "train.optimizer.lr is 0.001 on ranks 0, 1, 3 (2 hosts, a first), 0.1 on rank 2 (host b)",
            "model.args.width is not given on ranks 0, 1, 2 (2 hosts, a first), 8 on rank 3 (host c)",
        ],
        [],
    )


@pytest.mark.parametrize(
    ("name", "version", "refused"),
    [("hetpipe", "0.1.1", True), ("torch", "2.12.0+cpu", True), ("torch", "2.13.1+cu130", False), ("Python", "3.12.4", False)],
)
def test_other_versions_are_refused_or_noted(name: str, version: str, refused: bool) -> None:
    text = f"{name} is {VERSIONS[name]} on rank 0 (host a), {version} on rank 1 (host b)"
    faults, notes = differences([rank("a"), rank("b", versions={name: version})])
    assert (faults, notes) == (([text], []) if refused else ([], [f"{text}; other versions may compute slightly other numbers"]))


def test_many_ranks_and_values_stay_one_line() -> None:
    ranks = [rank(f"h{i}", {"train.seed": i // 10}) for i in range(70)]
    (line,), _ = differences(ranks)
    assert line.startswith("train.seed is 0 on ranks 0, 1, 2, 3, 4, 5 and 4 more (10 hosts, h0 first), 1 on ranks 10, ")
    assert line.endswith("(10 hosts, h30 first), …")


def test_a_job_is_told_by_its_keys_and_by_what_is_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files may lie in other places on another host; the same place may hold another file there."""
    here, there = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    for folder in (here, there):
        folder.path.mkdir()
        folder.ready(log={"folder": "log"})
    monkeypatch.chdir(tmp_path)
    one, two = (told_by(Job.read(folder.path / "job.yaml")) for folder in (here, there))
    assert one == two
    assert (one["train.optimizer.lr"], one["log.folder"], one["checkpoint"]) == (0.01, "log", None)
    (tmp_path / "b/cluster.yaml").write_text("# of another hand\n" + (tmp_path / "b/cluster.yaml").read_text())
    assert told_by(Job.read(tmp_path / "b/job.yaml")) == one
    there.cluster(2, 1, memory="2 GiB")
    there.job(train=train(optimizer={"name": "AdamW", "lr": 0.1}), log={"folder": "other"}, plan={"partitioner": "even"})
    two = told_by(Job.read(tmp_path / "b/job.yaml"))
    told = [line.split(" is ")[0] for line in differences([rank("a", one), rank("b", two)])[0]]
    assert told == [
        "plan.partitioner",
        "train.optimizer.lr",
        "log.folder",
        "the content of cluster.yaml (cluster)",
        "the content of plan.json (plan.file)",
    ]


def test_a_session_compares_its_job_before_anything_else(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    job, told = Job.read("job.yaml"), list[Any]()

    class Met(Exception):
        pass

    def connect(**given: Any) -> None:
        told.append(given["told"])
        raise Met

    monkeypatch.setattr(session, "connect", connect)
    with pytest.raises(Met):
        session.open_session(job)
    assert told == [told_by(job)]
