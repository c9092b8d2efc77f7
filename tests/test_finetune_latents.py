"""`hetpipe finetune` from a pipeline of diffusers and a folder of latents to a LoRA file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.support.commands import Command
from tests.support.latents import FLOW, latents, pipeline

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers
CARDS = "3090:64MiB:2,1080ti:40MiB:4"


def test_from_a_pipeline_and_latents_to_a_lora_file_and_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    """A second run, with an epoch more, goes on."""
    monkeypatch.chdir(tmp_path)
    pipeline("Flux", tmp_path / "pipe", FLOW)
    latents("Flux", tmp_path / "latents", (5, 4, 3))
    first = run("finetune", "pipe", "latents", "--emulate", CARDS, "--eval", "0.2", "--json")
    assert first.code == 0, first.err
    said = json.loads(first.out)
    assert said["statement"]["data"] == "10 samples to train on, 2 to evaluate; of 3 shapes, of which a step has one"
    assert (said["statement"]["steps"], len(said["losses"])) == (3, 3)  # of 4, 3 and 3 samples of a shape, in steps of 4
    written = load_file(tmp_path / "finetuned" / "adapter" / "pytorch_lora_weights.safetensors")
    assert any("single_transformer_blocks.1" in name for name in written)
    job = yaml.safe_load((tmp_path / "finetuned" / "job.yaml").read_text())
    assert job["train"]["optimizer"]["lr"] == 1e-4
    assert (job["train"]["global_batch"], job["train"]["scheduler"]["T_max"]) == (4, 2)
    again = run("finetune", "pipe", "latents", "--emulate", CARDS, "--eval", "0.2", "--epochs", "2", "--json")
    assert again.code == 0, again.err
    assert "the run in finetuned resumes from step 3 and ends at step 6" in again.err
    assert len(json.loads(again.out)["losses"]) == 3


def test_what_does_not_go_together_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    (tmp_path / "latents").mkdir()
    (tmp_path / "latents" / "a.safetensors").touch()
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for arguments, message in (
        (("pipe", "latents", "--length", "3"), "--length 3 is for texts, and latents holds latents: leave it out"),
        (("pipe", "latents", "--method", "dpo"), "--method dpo is for texts"),
        (("pipe", "chats.jsonl"), "pipe is a pipeline of diffusers, and trains on a folder of latents"),
        (("gone", "latents"), "there is no folder 'gone', and no model on Hugging Face can have that name"),
    ):
        ended = run("finetune", *arguments)
        assert ended.code != 0
        assert message in " ".join(ended.err.split()), ended.err
