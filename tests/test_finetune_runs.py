"""`hetpipe finetune` from a folder with a model and a file of chats to an adapter: on one machine, and under torchrun."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hetpipe.documents.job import Job
from tests.support.commands import Command, agents, finish, hetpipe
from tests.support.finetuning import CARDS, chats, small_model

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # what a terminal obeys
OPTIONS = ("--global-batch", "8", "--epochs", "2", "--lr", "1e-2")


def ready(folder: Path) -> None:
    small_model(folder / "tiny")
    chats(folder / "chats.jsonl")


def peft_loads(folder: Path) -> None:
    """The adapter changes what the model says."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "tiny")
    tokens = torch.arange(20)[None]
    before = base(input_ids=tokens).logits
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft asks for it
        adapted = PeftModel.from_pretrained(base, str(folder / "finetuned" / "adapter"))
    assert not torch.allclose(adapted(input_ids=tokens).logits, before, atol=1e-3)
    written = load_file(folder / "finetuned" / "adapter" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in written)


def test_from_a_folder_and_chats_to_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    monkeypatch.chdir(tmp_path)
    ready(tmp_path)
    only = ("--dry-run", "--json", "--write-job", "mine.yaml")
    looked = run("finetune", "tiny", "chats.jsonl", "--emulate", CARDS, *OPTIONS, *only)
    assert looked.code == 0, looked.err
    assert json.loads(looked.out)["statement"]["trained"] == 24_576
    assert not (tmp_path / "finetuned" / "adapter").exists()
    assert Job.read("mine.yaml") == Job.read("finetuned/job.yaml")
    ended = hetpipe("finetune", "tiny", "chats.jsonl", "--emulate", CARDS, *OPTIONS, folder=tmp_path, timeout=600)
    assert (ended.code, ended.leftover) == (0, []), ended.err
    for word in (
        "3090 on n0, emulated",
        "24,576 of them train",
        "180 chats to train on, 20 held out",
        "equal data parallel",
        "1080ti alone",
    ):
        assert word in ended.out
    assert CONTROL.search(ended.out + ended.err) is None
    losses = json.loads((tmp_path / "finetuned" / "run" / "summary.json").read_text())["losses"]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("tiny"), "finetuned/adapter")' in ended.out
    peft_loads(tmp_path)

    again = run("finetune", "tiny", "chats.jsonl", "--emulate", CARDS, *OPTIONS, "--json")
    assert again.code == 0, again.err
    found = json.loads(again.out)
    assert (found["steps"], found["losses"], found["folder"]) == (len(losses), [], "finetuned/adapter")
    assert found["statement"]["first_step"] == found["statement"]["steps"] == len(losses)
    assert [other["name"] for other in found["statement"]["instead"]] == ["equal data parallel", "3090 alone", "1080ti alone"]
    other = run("finetune", "tiny", "chats.jsonl", "--emulate", CARDS, *OPTIONS, "--lora", "r=4")
    assert other.code == 2
    assert "finetuned holds a run of another job" in other.err
    assert "adapter.r was 16, is 4" in other.err
    chats(tmp_path / "chats.jsonl", 190)
    mended = run("finetune", "tiny", "chats.jsonl", "--emulate", CARDS, *OPTIONS)
    assert mended.code == 2
    assert "finetuned holds a run over other data: there were 180 samples to train on, and there are 171" in mended.err
    begun = ("--adapter", "finetuned/adapter", "-o", "second", "--global-batch", "8", "--set", "train.steps=2", "--json")
    second = run("finetune", "tiny", "chats.jsonl", "--emulate", CARDS, *begun)
    assert second.code == 0, second.err
    assert json.loads(second.out)["losses"][0] < 1.01 * max(losses[-5:]), "it begins where that one ended"
    assert json.loads(second.out)["folder"] == "second/adapter"


@pytest.mark.thorough
def test_all_parameters_train_and_a_whole_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    ready(tmp_path)
    ended = run("finetune", "tiny", "chats.jsonl", "--emulate", CARDS, *OPTIONS, "--lora", "none", "-o", "full", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["statement"]["trained"] == found["statement"]["parameters"]
    assert found["last_loss"] < 0.8 * found["first_loss"]
    assert found["folder"] == "full/model"
    model = AutoModelForCausalLM.from_pretrained("full/model")
    assert sum(p.numel() for p in model.parameters()) == found["statement"]["parameters"]


@pytest.mark.thorough
@pytest.mark.slow
def test_two_agents_of_torchrun_train_the_same(tmp_path: Path) -> None:
    """Each is a machine with one emulated card; the main rank alone prints, and writes the job."""
    ready(tmp_path)
    first, second = CARDS.split(",")
    words = ["finetune", "tiny", "chats.jsonl", "--emulate", first, "--emulate", second, *OPTIONS]
    started = agents([1, 1], words, tmp_path, str(tmp_path))
    try:
        one, two = (finish(agent, tmp_path, str(tmp_path), f"agent{i}", timeout=600) for i, agent in enumerate(started))
    finally:
        for agent in started:
            agent.kill()
            agent.wait()
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert two.out == ""
    assert "equal data parallel" in one.out
    assert CONTROL.search(one.out + one.err) is None
    losses = json.loads((tmp_path / "finetuned" / "run" / "summary.json").read_text())["losses"]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert [node["devices"] for node in yaml.safe_load((tmp_path / "finetuned" / "cluster.yaml").read_text())["nodes"]] == [
        {"3090": 1},
        {"1080ti": 1},
    ]
    peft_loads(tmp_path)
