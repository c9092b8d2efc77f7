"""`hetpipe finetune --tensor-parallel`: what stands in the job, and the hint where whole layers do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hetpipe.documents.job import Job
from hetpipe.finetune.draft import ModelFacts, filled
from tests.support.commands import Command
from tests.support.finetuning import chats, small_model
from tests.test_finetune import drafted, facts


def box(folder: Path, memory: str, count: int = 2) -> None:
    """So many equal devices that are CPU processes, with a model and chats beside them."""
    small_model(folder / "tiny")
    chats(folder / "chats.jsonl", 40)
    nodes = [{"name": "n0", "devices": {"cpu": count}}]
    content = {"format": "hetpipe.cluster/1", "device_types": {"cpu": {"memory": memory}}, "nodes": nodes}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(content))


def test_the_job_says_what_is_measured() -> None:
    drafts = drafted(), drafted(tensor_parallel=(4, 2, 4))
    plain, split = (filled(job, ModelFacts(4096), facts(*[40] * 30)) for job in drafts)
    assert "profiler" not in plain
    assert Job.parse(split, "the job").profiler.tensor_parallel == (2, 4)
    assert {key for key in split if split[key] != plain.get(key)} == {"profiler"}


def test_both_widths_are_measured_and_weighed(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    box(tmp_path, "1 GiB")
    words = ("finetune", "tiny", "chats.jsonl", "--cluster", "cluster.yaml", "--global-batch", "8", "--tensor-parallel", "2")
    ended = run(*words, "--set", "train.steps=2", "--set", "profiler.microbatch_sizes=[1,4]", "--json")
    assert ended.code == 0, ended.err
    assert len(json.loads(ended.out)["losses"]) == 2
    profile = json.loads((tmp_path / "finetuned" / "run" / "profile.json").read_text())
    assert sorted(m.get("tensor_parallel", 1) for m in profile["measurements"]) == [1, 2]


def test_where_whole_layers_do_not_fit_the_option_is_named(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    box(tmp_path, "100 KiB")
    words = ("finetune", "tiny", "chats.jsonl", "--cluster", "cluster.yaml", "--global-batch", "8", "--lora", "none", "--dry-run")
    ended = run(*words)
    assert ended.code == 3, ended.err
    told = " ".join(ended.err.split())
    assert "2 devices of one type in a node could also split each between them." in told
    assert "write profiler: {tensor_parallel: [2]} in the job (hetpipe finetune --tensor-parallel 2)" in told
