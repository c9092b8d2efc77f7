"""Configurations of LLaMA-Factory and axolotl that train on preferences, as jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.chats import lines
from tests.support.commands import Command
from tests.support.configs import AXOLOTL_LORA, LORA, changed, keys, made, note, refused, trained_steps
from tests.test_preferences import records

DPO = changed(LORA, stage="dpo", dataset="better", pref_beta=0.2, lora_dropout=0.1, bf16=False)
PAIRS = [{"path": "better.jsonl", "type": "chatml.intel"}]
SIMPO = changed(AXOLOTL_LORA, rl="simpo", rl_beta=2.0, datasets=PAIRS)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data of the configurations, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    columns = {"prompt": "ask", "query": "more", "chosen": "good", "rejected": "bad"}
    turns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "better": {"file_name": "better.jsonl", "ranking": True, "columns": columns},
        "talks": {"file_name": "talks.jsonl", "ranking": True, "formatting": "sharegpt", "columns": turns},
        "judged": {"file_name": "judged.jsonl", "formatting": "sharegpt", "columns": {"kto_tag": "label"}},
        "plain": {"file_name": "plain.jsonl"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    pairs = records(16)
    named = [{"ask": each["prompt"], "more": "", "good": each["chosen"], "bad": each["rejected"]} for each in pairs]
    lines(tmp_path / "data/better.jsonl", named)
    lines(tmp_path / "better.jsonl", [{"system": "", "question": each.pop("prompt"), **each} for each in pairs])
    return tmp_path


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ({}, {"name": "dpo", "beta": 0.2}),
        ({"pref_loss": "simpo"}, {"name": "simpo", "beta": 0.2, "gamma": 0.5}),
        ({"pref_loss": "orpo", "pref_beta": None}, {"name": "orpo", "beta": 0.1}),
        ({"stage": "rm"}, {"name": "reward"}),
    ],
    ids=["dpo", "simpo", "orpo", "rm"],
)
def test_stages_of_llamafactory(keys: dict[str, Any], loss: dict[str, Any]) -> None:
    job = made("llamafactory", changed(DPO, **keys)).job
    assert job["loss"] == loss
    assert job["data"]["name"] == "preferences"
    assert job["data"]["args"] == {
        "file": "data/better.jsonl",
        "columns": {
            "instruction": "ask",
            "input": "more",
            "history": "",
            "system": "",
            "tools": "",
            "chosen": "good",
            "rejected": "bad",
        },
        "tokenizer": "tiny",
        "length": 64,
        "test_fraction": 0.0,
    }
    assert job["adapter"]["dropout"] == (0.1 if loss["name"] == "reward" else 0.0)
    assert job["adapter"].get("train_also") == (["head"] if loss["name"] == "reward" else None)


def test_what_a_stage_does_not_take_over() -> None:
    found = made("llamafactory", changed(DPO, pref_ftx=0.5, dpo_label_smoothing=0.0, ref_model="other", packing=True))
    assert {"pref_ftx", "ref_model"} <= set(keys(found, "no_counterpart"))
    assert "dpo_label_smoothing" not in keys(found, "no_counterpart")
    assert "pairs are padded" in note(found, "packing")
    talks = made("llamafactory", changed(DPO, dataset="talks"), steps=9).job["data"]["args"]["columns"]
    assert "messages" not in talks, "conversations is known"
    going_on = note(made("llamafactory", changed(DPO, adapter_name_or_path="before")), "adapter_name_or_path")
    assert going_on.endswith("The reference is the model with these adapters (theirs: without)")
    for changes, told in (
        ({"pref_loss": "ipo"}, "pref_loss is 'ipo'. hetpipe has sigmoid, simpo, orpo"),
        ({"dataset": "judged"}, "judged has kto_tag"),
        ({"dataset": "plain"}, "plain holds no preferences (ranking: true), but the stage is dpo"),
        ({"stage": "sft"}, "better holds preferences, on which the stages dpo and rm train, but the stage is sft"),
    ):
        assert told in refused("llamafactory", changed(DPO, **changes))


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ({"rl": "dpo", "rl_beta": None}, {"name": "dpo", "beta": 0.1}),
        ({}, {"name": "simpo", "beta": 2.0, "gamma": 0.5}),
        ({"rl": "orpo", "rl_beta": None, "orpo_alpha": 0.3}, {"name": "orpo", "beta": 0.3}),
        ({"rl": None, "rl_beta": None, "reward_model": True}, {"name": "reward"}),
    ],
    ids=["dpo", "simpo", "orpo", "reward"],
)
def test_kinds_of_axolotl(keys: dict[str, Any], loss: dict[str, Any]) -> None:
    job = made("axolotl", changed(SIMPO, **keys)).job
    assert job["loss"] == loss
    args = {"file": "better.jsonl", "tokenizer": "tiny", "length": 64, "too_long": "drop", "test_fraction": 0.1}
    assert job["data"] == {"name": "preferences", "args": args}
    assert job["adapter"]["dropout"] == 0.0
    assert job["adapter"].get("train_also") == (["head"] if loss["name"] == "reward" else None)


@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        ({"type": "llama3.icr"}, {"prompt": "input"}),
        ({"type": "bradley_terry.chat_template"}, {"prompt": "input"}),
        (
            {"type": "chat_template.default", "field_messages": "chat", "field_chosen": "good"},
            {"messages": "chat", "chosen": "good"},
        ),
        ({"type": "chat_template.argilla"}, None),
    ],
    ids=["icr", "bradley_terry", "chat_template", "argilla"],
)
def test_types_of_preferences(entry: dict[str, Any], columns: dict[str, str] | None) -> None:
    job = made("axolotl", changed(SIMPO, datasets=[{"path": "better.jsonl", **entry}])).job
    assert job["data"]["args"].get("columns") == columns


def test_what_axolotl_has_and_hetpipe_has_not() -> None:
    found = made("axolotl", changed(SIMPO, cpo_alpha=0.5, trl={"beta": 0.2}))
    assert {"cpo_alpha", "trl"} <= set(keys(found, "no_counterpart"))
    assert "unless cpo_alpha is 0" in note(found, "rl")
    assert "datasets[0].type is 'zephyr.nectar', but of preferences hetpipe reads chatml.argilla" in refused(
        "axolotl", changed(SIMPO, datasets=[{"path": "x.jsonl", "type": "zephyr.nectar"}])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "text"), [("llamafactory", DPO), pytest.param("axolotl", SIMPO, marks=pytest.mark.thorough)])
def test_a_converted_job_trains(run: Command, trainer: str, text: str) -> None:
    text = changed(text, num_train_epochs=1) if trainer == "llamafactory" else text
    assert trained_steps(run, trainer, text, num_hidden_layers=1) == 2
