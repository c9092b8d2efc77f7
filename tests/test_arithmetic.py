"""The flags by which cards compute: set by a job, put back, compared between ranks."""

from __future__ import annotations

import pytest
import torch

from hetpipe.documents.job import Job
from hetpipe.processes.arithmetic import arithmetic, computing_by
from hetpipe.training.session import told_by
from tests.support.jobs import MLP, POINTS


def test_flags_are_set_and_put_back() -> None:
    before = arithmetic()
    with computing_by(tf32=True, cudnn_benchmark=True, cudnn_deterministic=True):
        assert arithmetic() == {
            "cuda.matmul.fp32_precision": "tf32",
            "cudnn.conv.fp32_precision": "tf32",
            "cudnn.benchmark": True,
            "cudnn.deterministic": True,
        }
        with computing_by(tf32=False):
            assert arithmetic()["cuda.matmul.fp32_precision"] == arithmetic()["cudnn.conv.fp32_precision"] == "ieee"
            assert torch.backends.cudnn.benchmark
    with computing_by():
        assert arithmetic() == before
    assert arithmetic() == before


def test_flags_of_torch_before_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        allow_tf32 = False

    matmul, cudnn = Old(), Old()
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    cudnn.benchmark, cudnn.deterministic = False, False  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    with computing_by(tf32=True):
        assert matmul.allow_tf32 is cudnn.allow_tf32 is True
        assert arithmetic()["cudnn.conv.fp32_precision"] == "tf32"
    assert [matmul.allow_tf32, cudnn.allow_tf32] == [False, False]


def test_ranks_tell_each_other_their_flags() -> None:
    job = Job.parse({"format": "hetpipe.job/1", "model": MLP, "data": POINTS, "train": {"global_batch": 4, "steps": 2}}, "a job")
    with computing_by(tf32=True):
        told = told_by(job)
    assert told["torch.backends.cuda.matmul.fp32_precision"] == "tf32"
    assert told != told_by(job)
