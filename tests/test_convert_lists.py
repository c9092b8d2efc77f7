"""What `hetpipe convert` says of each key of a configuration: where it stands in the job, and what that means."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe.exchange.configs import Converted
from tests.support.configs import (
    AXOLOTL_FULL,
    AXOLOTL_LORA,
    AXOLOTL_QLORA,
    FULL,
    LORA,
    QLORA,
    changed,
    data_home,
    keys,
    made,
    note,
    refused,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data of the configurations, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return data_home(tmp_path)


def test_values_with_which_the_job_does_the_same_are_no_lack() -> None:
    """`quantization_method: bnb` was listed as off."""
    same = {"quantization_method": "bnb", "double_quantization": True, "metric_for_best_model": "eval_loss", "do_eval": True}
    found = made("llamafactory", changed(QLORA, **same, average_tokens_across_devices=True, flash_attn="auto"))
    assert note(found, "quantization_method") == "the same, if adapter.base is nf4 (bitsandbytes)"
    assert note(found, "double_quantization") == "the same, scales of nf4 are quantised, too (adapter.base)"
    assert note(found, "metric_for_best_model") == "the best evaluation is the one with the least loss, there and here"
    assert note(found, "do_eval") == "data that are held out are evaluated, there and here"
    assert note(found, "flash_attn") == "chosen by itself, there and here"
    assert not {*same, "average_tokens_across_devices", "flash_attn"} & {*keys(found, "no_counterpart")}
    other = made("llamafactory", changed(QLORA, double_quantization=False, quantization_method="hqq"))
    assert {"double_quantization", "quantization_method"} <= {*keys(other, "no_counterpart")}
    found = made(
        "axolotl", changed(AXOLOTL_LORA, auto_resume_from_checkpoints=True, chat_template="tokenizer_default", tokens=None)
    )
    assert note(found, "auto_resume_from_checkpoints") == "a run resumes by itself from its newest checkpoint"
    assert note(found, "chat_template") == "the tokenizer's own chat template, there and here"
    assert note(found, "tokens") == "not said, there and here"
    assert note(found, "strict") == "off, there and here"
    mixed = made("axolotl", changed(AXOLOTL_LORA, shuffle_merged_datasets=False, auto_resume_from_checkpoints=False))
    assert {"shuffle_merged_datasets", "auto_resume_from_checkpoints"} <= {*keys(mixed, "no_counterpart")}


def line(found: Converted, key: str) -> tuple[str, str]:
    """What the job says for a key, and what that means."""
    return next((line.job, line.note) for lines in found.lists.values() for line in lines if line.key == key)


def test_a_key_that_another_one_overrules_is_not_shown_with_its_value() -> None:
    """`packing: false` beside `neat_packing: true` read as a contradiction."""
    found = made("llamafactory", QLORA)
    assert not {"packing", "bf16", "num_train_epochs"} & {*keys(found, "defaults")}
    said = made("llamafactory", changed(QLORA, packing=False, bf16=False, num_train_epochs=2))
    assert line(said, "packing") == ("–", "neat_packing says it")
    assert line(said, "bf16") == ("–", "fp16 says it")
    assert line(said, "num_train_epochs") == ("–", "max_steps says it")
    assert "save_steps" not in keys(made("llamafactory", FULL), "defaults")
    assert "save_strategy" not in keys(made("axolotl", AXOLOTL_LORA), "defaults")
    assert "gradient_accumulation_steps" not in keys(made("axolotl", AXOLOTL_FULL, steps=40), "defaults")


def test_data_that_are_evaluated_are_listed_where_they_stand() -> None:
    other = [{"path": "held.jsonl", "ds_type": "json", "type": "alpaca"}]
    found = made("axolotl", changed(AXOLOTL_LORA, test_datasets=other, val_set_size=0.0))
    assert line(found, "val_set_size") == ("data.args.test_fraction: 0.0", "")
    assert line(found, "test_datasets[0].path")[0] == "evaluate.data.args.file: held.jsonl"
    assert line(found, "test_datasets[0].ds_type")[0] == "evaluate.data.args.file: held.jsonl"
    assert line(found, "datasets[0].path")[0] == "data.args.file: asks.jsonl"
    config = changed(LORA, eval_dataset="asks")
    assert line(made("llamafactory", config), "eval_dataset[asks].file_name")[0] == "–", "it does not evaluate"
    found = made("llamafactory", changed(config, eval_strategy="epoch"))
    assert line(found, "eval_dataset[asks].file_name")[0] == "evaluate.data.args.file: data/asks.jsonl"


def test_what_differs_is_told_in_the_row_of_its_key() -> None:
    assert line(made("llamafactory", LORA), "bf16")[0] == "train.precision: bf16, adapter.base: bf16"
    assert line(made("llamafactory", changed(QLORA, fp16=None, bf16=True)), "bf16")[0] == "train.precision: bf16"
    found = made(
        "axolotl", changed(AXOLOTL_QLORA, eval_sample_packing=False, val_set_size=0.1, num_epochs=3, max_steps=None), steps=90
    )
    assert "evaluation packs as training does" in note(found, "eval_sample_packing")
    assert "spread evenly over the data (theirs: drawn at random)" in note(found, "val_set_size")
    assert note(found, "datasets[0].roles_to_train") == "the same: only answers of the assistant are learned"
    assert note(found, "num_epochs") == "--steps says the length: their 3 epochs are 90 steps (train.steps)"
    best = note(
        made("llamafactory", changed(LORA, val_size=0.1, eval_strategy="epoch", load_best_model_at_end=False)),
        "load_best_model_at_end",
    )
    assert best.startswith("the job exports the checkpoint of the best evaluation")
    code = note(made("llamafactory", changed(LORA, trust_remote_code=True)), "trust_remote_code")
    assert "runs only if the job says so" in code
    assert "model.args.trust_remote_code: true" in code
    assert (
        note(made("llamafactory", changed(LORA, enable_thinking=False)), "enable_thinking")
        == "answers are learned without their thoughts"
    )


def test_without_a_log_the_error_says_what_counts_the_steps() -> None:
    assert refused("llamafactory", changed(LORA, packing=True)).endswith(
        "Without a log, rows and steps are in the table that this prints: hetpipe finetune tiny data/talks.jsonl --length 64 "
        "--global-batch 8 --epochs 3 --set data.args.test_fraction=0.0 --dry-run. Or leave out packing: samples of chats in "
        "files are counted here"
    )
