"""The text jobs from the command to a folder that transformers loads, shortened, over unequal emulated devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import BertForSequenceClassification, T5ForConditionalGeneration

from hetpipe.build import build_data
from hetpipe.config import Job
from hetpipe.data import fetch
from hetpipe.weights_command import export_weights
from tests.commands import hetpipe

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, folder: Path, steps: int) -> tuple[Job, dict[str, Any], Path]:
    """Train a job of configs/jobs for some steps, measured less often; its summary, and the folder of its weights."""
    job, cluster = ROOT / "configs" / "jobs" / name, ROOT / "configs" / "clusters" / "four-emulated.yaml"
    saved = folder / "checkpoints"
    settings = [f"cluster={cluster}", f"train.steps={steps}", "train.epochs=", "profiler.microbatch_sizes=[8]",
                "profiler.repeats=1", f"checkpoint.folder={saved}"]  # fmt: skip
    options = [word for setting in settings for word in ("--set", setting)]
    ended = hetpipe("train", str(job), "--json", *options, folder=folder, timeout=200)
    assert ended.code == 0, ended.err
    export_weights(job, folder / "weights", settings=settings)
    return Job.read(job, settings), json.loads(ended.out), folder / "weights"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bert_learns_packages_and_transformers_classifies_alike(tmp_path: Path) -> None:
    job, summary, weights = run("bert-text.yaml", tmp_path, steps=60)
    assert summary["last_loss"] < 0.95 * summary["first_loss"]
    assert summary["test_accuracy"] > 0.2  # a guess: 0.125
    model, info = BertForSequenceClassification.from_pretrained(weights, output_loading_info=True)
    assert not any(info.values()), info
    test = build_data(job).test
    (words, mask), labels = fetch(test, torch.arange(len(test)))  # type: ignore[arg-type]
    with torch.no_grad():
        found = model.eval()(input_ids=words, attention_mask=mask).logits.argmax(-1)
    assert float((found == labels).float().mean()) == pytest.approx(summary["test_accuracy"], abs=0.005)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_t5_learns_documentation_and_transformers_predicts_alike(tmp_path: Path) -> None:
    job, summary, weights = run("t5-text.yaml", tmp_path, steps=25)
    assert summary["last_loss"] < 0.8 * summary["first_loss"]
    model, info = T5ForConditionalGeneration.from_pretrained(weights, output_loading_info=True)
    assert not any(info.values()), info
    test = build_data(job).test
    (source, mask, read), wanted = fetch(test, torch.arange(len(test)))  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model.eval()(
            input_ids=source, attention_mask=mask, decoder_input_ids=read, use_cache=False
        ).logits
    counted = wanted != -100
    assert float((logits.argmax(-1) == wanted)[counted].float().mean()) == pytest.approx(
        summary["test_accuracy"], abs=0.005
    )
    most = int(wanted[counted].mode().values)
    assert summary["test_accuracy"] > float((wanted[counted] == most).float().mean())
