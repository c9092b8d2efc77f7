"""What of a configuration of LLaMA-Factory or axolotl is refused, and what is named in the place of its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import AXOLOTL_LORA, AXOLOTL_QLORA, LORA, QLORA, changed, data_home, made, note, refused


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data of the configurations, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return data_home(tmp_path)


def test_devices_have_to_be_said() -> None:
    said = refused("llamafactory", LORA, devices=None)
    assert "A step had per_device_train_batch_size (2) × gradient_accumulation_steps (2) × that number of samples" in said
    assert "nvidia-smi -L" in said


def test_steps_have_to_be_said_where_records_do_not_tell() -> None:
    packed = changed(LORA, packing=True)
    assert "Give --steps N, the number that their log says as 'Total optimization steps'" in refused("llamafactory", packed)
    job = made("llamafactory", packed, steps=30).job
    assert (job["train"]["steps"], job["train"]["scheduler"]["T_max"]) == (30, 27)
    assert "epochs" not in job["train"]
    assert note(made("llamafactory", QLORA, steps=30), "max_steps") == "it says the length, not --steps 30"
    assert made("llamafactory", changed(packed, lr_scheduler_type="constant", warmup_ratio=0)).job["train"]["epochs"] == 3
    assert made("llamafactory", changed(LORA, num_train_epochs=0.5)).job["train"]["steps"] == 2


@pytest.mark.parametrize(
    ("trainer", "text", "key", "value", "told"),
    [
        ("llamafactory", LORA, "stage", "kto", "preference training (KTO)"),
        ("llamafactory", LORA, "stage", "ppo", "training on a reward (PPO)"),
        ("axolotl", AXOLOTL_LORA, "rl", "grpo", "training on a reward, or on preferences in another way"),
        ("axolotl", AXOLOTL_LORA, "process_reward_model", True, "the training of a reward model of single steps"),
    ],
)
def test_preferences_are_refused_with_what_would_be_taken_over(trainer: str, text: str, key: str, value: Any, told: str) -> None:
    said = refused(trainer, changed(text, **{key: value}), devices=None)
    assert said.startswith(f"config.yaml: {key} is {value!r}. That is {told}, of which convert makes no job")
    assert "it would take over " in said
    assert "learning_rate" in said.partition("it would take over ")[2]


@pytest.mark.parametrize(
    ("trainer", "text", "more", "told"),
    [
        ("llamafactory", LORA, {"stage": "sftt"}, "did you mean 'sft'?"),
        ("llamafactory", LORA, {"finetuning_type": "freeze"}, "adapters (lora) or all parameters (full)"),
        ("llamafactory", LORA, {"dataset": "talk"}, "has no data set 'talk'; did you mean 'talks'?"),
        ("llamafactory", LORA, {"dataset": "better"}, "better holds preferences"),
        ("llamafactory", LORA, {"dataset": "seen"}, "seen has images"),
        ("llamafactory", LORA, {"dataset_dir": "elsewhere"}, "there is no elsewhere/dataset_info.json"),
        ("llamafactory", LORA, {"quantization_bit": 3}, "Write 4 or 8"),
        ("llamafactory", LORA, {"do_train": False}, "This configuration does not train"),
        ("llamafactory", LORA, {"learning_rate": "fast"}, "learning_rate is 'fast'. Write a number"),
        ("llamafactory", LORA, {"model_name_or_path": None}, "Is this the configuration of a run of LLaMA-Factory?"),
        ("llamafactory", LORA, {"lora_target": ".*proj"}, "hetpipe takes names of layers"),
        ("axolotl", AXOLOTL_LORA, {"adapter": "llama-adapter"}, "kinds lora and qlora"),
        ("axolotl", AXOLOTL_LORA, {"lora_r": None}, "lora_r or lora_alpha is missing"),
        ("axolotl", AXOLOTL_LORA, {"learning_rate": None}, "learning_rate is missing"),
        ("axolotl", AXOLOTL_LORA, {"datasets": [{"path": "x", "type": "oasst"}]}, "datasets[0].type is 'oasst'"),
        (
            "axolotl",
            AXOLOTL_LORA,
            {"datasets": [{"path": "x.json", "type": "completion"}, {"path": "y.json", "type": "alpaca"}]},
            "some data are plain text, and others have answers: datasets[0] (text), datasets[1] (instructions)",
        ),
        (
            "axolotl",
            AXOLOTL_QLORA,
            {"datasets": [{"path": "a/b", "type": "alpaca"}, {"path": "a/c", "type": "alpaca", "split": "half"}]},
            "the data sets differ in split",
        ),
    ],
)
def test_what_cannot_be_a_job_is_refused(trainer: str, text: str, more: dict[str, Any], told: str) -> None:
    assert told in refused(trainer, changed(text, **more), steps=50)


def test_data_may_be_named_instead_of_theirs() -> None:
    """Where dataset_info.json is not there, or a kind of data is not known."""
    other = {"name": "chat", "args": {"file": "data/talks.jsonl", "length": 32}}
    job = made("llamafactory", changed(LORA, dataset_dir="elsewhere"), data=other).job
    assert (job["data"]["args"]["length"], job["data"]["args"]["tokenizer"]) == (32, "tiny")
    own = {"target": "mine:load", "args": {"samples": 4}}
    assert made("llamafactory", LORA, data=own, steps=9).job["data"] == own, "a function of one's own takes its own arguments"
    assert made("llamafactory", LORA, data={"name": "text"}, steps=9).job["data"]["args"]["context"] == 64
    assert "--data: args must be a mapping" in refused("llamafactory", LORA, data={"name": "text", "args": [1]})
    strange = changed(AXOLOTL_LORA, datasets=[{"path": "x", "type": "oasst"}])
    assert made("axolotl", strange, data=other).job["data"]["name"] == "chat"


def test_texts_become_windows() -> None:
    text = made(
        "axolotl", changed(AXOLOTL_LORA, datasets=[{"path": "t.jsonl", "type": "completion", "field": "body"}]), steps=9
    ).job
    assert text["data"] == {
        "name": "text",
        "args": {"files": "t.jsonl", "columns": {"text": "body"}, "context": 64, "tokenizer": "tiny", "test_fraction": 0.1},
    }
    job = made("llamafactory", changed(LORA, stage="pt", dataset="asks"), steps=9).job
    assert (job["data"]["name"], job["data"]["args"]["columns"]) == ("text", {"text": "ask"})
