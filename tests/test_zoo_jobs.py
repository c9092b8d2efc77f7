"""The text jobs, shortened: one from the command over unequal emulated devices to a folder that transformers loads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import BertForSequenceClassification

from bench.reference import train_reference
from hetpipe.building.build import build_data
from hetpipe.building.data import fetch
from hetpipe.cli.weights import export_weights_command
from hetpipe.documents.job import Job
from tests.support.commands import hetpipe

ROOT = Path(__file__).resolve().parent.parent
JOBS, CLUSTER = ROOT / "configs" / "jobs", ROOT / "configs" / "clusters" / "four-emulated.yaml"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bert_learns_packages_and_transformers_classifies_alike(tmp_path: Path) -> None:
    settings = [
        f"cluster={CLUSTER}",
        "train.steps=60",
        "train.epochs=",
        "profiler.microbatch_sizes=[8]",
        "profiler.repeats=1",
        "train.evaluate_samples=all",
        f"checkpoint.folder={tmp_path / 'checkpoints'}",
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    ended = hetpipe("train", str(JOBS / "bert-text.yaml"), "--json", *options, folder=tmp_path, timeout=200)
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)
    assert summary["last_loss"] < 0.95 * summary["first_loss"]
    assert summary["test_accuracy"] > 0.2  # a guess: 0.125
    export_weights_command(tmp_path / "weights", JOBS / "bert-text.yaml", settings=settings)
    loaded: Any = BertForSequenceClassification.from_pretrained(tmp_path / "weights", output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    test = build_data(Job.read(JOBS / "bert-text.yaml", settings)).test
    (words, mask), labels = fetch(test, torch.arange(len(test)))  # type: ignore[arg-type]
    with torch.no_grad():
        found = model.eval()(input_ids=words, attention_mask=mask).logits.argmax(-1)
    assert float((found == labels).float().mean()) == pytest.approx(summary["test_accuracy"], abs=0.005)


@pytest.mark.thorough
def test_t5_learns_documentation() -> None:
    job = Job.read(JOBS / "t5-text.yaml", [f"cluster={CLUSTER}", "train.steps=25", "train.epochs=", "train.evaluate_samples=all"])
    result = train_reference(job)
    assert result.losses[-1] < 0.8 * result.losses[0]
    test = build_data(job).test
    _, wanted = fetch(test, torch.arange(len(test)))  # type: ignore[arg-type]
    counted = wanted[wanted != -100]
    commonest = float((counted == counted.mode().values).float().mean())
    assert result.evaluation is not None
    assert result.evaluation.weight == len(counted)
    assert result.evaluation.metric is not None
    assert result.evaluation.metric > commonest
