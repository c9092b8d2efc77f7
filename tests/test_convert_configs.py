"""Configurations of LLaMA-Factory and axolotl: the jobs that they become, where each of their keys goes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given as drawn
from hypothesis import strategies as st

from hetpipe.documents.job import Job
from hetpipe.exchange.configs import TRAINERS
from hetpipe.exchange.configs.table import load_table
from hetpipe.files.messages import InputError
from tests.support.commands import Command
from tests.support.configs import (
    AXOLOTL_FULL,
    AXOLOTL_LORA,
    AXOLOTL_QLORA,
    CONFIGS,
    FULL,
    INFO,
    LORA,
    QLORA,
    changed,
    data_home,
    keys,
    made,
    note,
    refused,
    trained_steps,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data of the configurations, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return data_home(tmp_path)


# ---- the jobs


def test_a_lora_of_llamafactory() -> None:
    """24 chats in batches of 2 × 2 × 2 are 3 steps an epoch; of 9 steps a tenth, rounded up, is the warm-up."""
    found = made("llamafactory", LORA)
    assert found.job == {
        "format": "hetpipe.job/1",
        "model": {"name": "causal_lm", "args": {"weights": "tiny"}},
        "adapter": {"kind": "lora", "r": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"], "base": "bf16"},
        "data": {
            "name": "chat",
            "args": {
                "file": "data/talks.jsonl",
                "columns": {"system": "", "tools": ""},
                "tokenizer": "tiny",
                "length": 64,
                "pack": False,
                "test_fraction": 0.0,
            },
        },
        "loss": {"name": "cross_entropy", "weight": "tokens", "fused": "auto"},
        "train": {
            "global_batch": 8,
            "epochs": 3,
            "optimizer": {"name": "AdamW", "lr": 1e-3, "weight_decay": 0.0},
            "clip_norm": 1.0,
            "seed": 42,
            "scheduler": {"name": "CosineAnnealingLR", "T_max": 8, "warmup_steps": 1},
            "precision": "bf16",
        },
        "checkpoint": {"folder": "saves/lora/checkpoints", "every_steps": 20},
        "log": {"folder": "saves/lora/run", "every_steps": 1},
        "export": {"folder": "saves/lora/adapter"},
    }
    assert keys(found, "planned") == ["ddp_timeout"]
    assert keys(found, "no_counterpart") == ["template", "preprocessing_num_workers", "plot_loss"]
    assert keys(found, "unknown") == []
    assert {"lora_alpha", "weight_decay", "max_grad_norm", "seed", "packing", "optim"} <= set(keys(found, "defaults"))


def test_a_qlora_of_llamafactory_over_two_data_sets() -> None:
    job = made("llamafactory", QLORA).job
    assert job["adapter"] == {
        "kind": "lora",
        "r": 8,
        "alpha": 16,
        "dropout": 0.0,
        "targets": "all-linear",
        "rank_stabilized": True,
        "train_also": ["embed", "head"],
        "base": "nf4",
    }
    columns = {"instruction": "ask", "output": "reply", "system": "rules", "input": "", "history": "", "tools": ""}
    args = job["data"]["args"]
    assert (job["data"]["name"], args["file"]) == ("chat", ["data/talks.jsonl", "data/asks.jsonl"])
    assert (args["columns"], args["pack"], args["turns"], args["length"]) == (columns, True, "last", 2048)
    assert job["train"]["scheduler"] == {"name": "LinearLR", "warmup_steps": 20}
    assert (job["train"]["steps"], job["train"]["precision"], job["train"]["optimizer"]["lr"]) == (400, "fp16", 5e-5)
    assert job["evaluate"] == {"every_steps": 50}
    assert job["log"]["to"] == ["jsonl", {"name": "wandb", "args": {"name": "mine"}}]


def test_all_parameters_of_llamafactory() -> None:
    """Its default is 3 epochs of a linear schedule: of the 3 records that max_samples leaves, a step each."""
    found = made("llamafactory", FULL)
    job = found.job
    assert "adapter" not in job
    assert job["data"]["name"] == "instructions"
    assert job["data"]["args"]["limit"] == 3
    assert job["train"]["optimizer"] == {"name": "AdamW", "lr": 1e-5, "weight_decay": 0.03, "betas": [0.9, 0.95]}
    assert job["train"]["scheduler"] == {"name": "PolynomialLR", "total_iters": 3, "power": 1.0}
    assert job["train"]["clip_norm"] == 1e-3
    assert job["checkpoint"] == {"folder": "saves/full/checkpoints", "every_steps": 1, "keep": 2}
    assert job["export"] == {"folder": "saves/full/model"}
    assert keys(found, "planned") == ["deepspeed", "gradient_checkpointing"]
    assert "biases and norms" in note(found, "weight_decay")


def test_a_lora_of_axolotl() -> None:
    found = made("axolotl", AXOLOTL_LORA)
    job = found.job
    assert job["adapter"] == {"kind": "lora", "r": 4, "alpha": 8, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}
    assert job["data"] == {
        "name": "instructions",
        "args": {
            "file": "asks.jsonl",
            "tokenizer": "tiny",
            "length": 64,
            "pack": False,
            "too_long": "drop",
            "test_fraction": 0.1,
        },
    }
    assert job["train"] == {
        "global_batch": 8,
        "epochs": 1,
        "optimizer": {"name": "AdamW", "lr": 2e-3, "weight_decay": 0.0},
        "clip_norm": 1.0,
        "seed": 42,
        "scheduler": {"name": "CosineAnnealingLR", "T_max": 1, "warmup_steps": 2},  # one step becomes two there
    }
    assert job["evaluate"] == {"every_steps": 1}
    assert job["checkpoint"]["every_steps"] == 3
    assert keys(found, "no_counterpart") == ["dataset_prepared_path", "pad_to_sequence_len", "flash_attention", "special_tokens"]
    assert "best evaluation" in note(found, "evals_per_epoch")


def test_a_qlora_of_axolotl_on_chats_of_the_hub() -> None:
    found = made("axolotl", AXOLOTL_QLORA)
    job = found.job
    assert job["adapter"] == {"kind": "lora", "r": 32, "alpha": 16, "dropout": 0.0, "targets": "all-linear", "base": "nf4"}
    assert job["data"]["name"] == "chat"
    args = job["data"]["args"]
    assert (args["file"], args["split"], args["columns"]) == ("org/chats", "train[:20%]", {"user": "customer"})
    assert job["train"]["scheduler"] == {"name": "CosineAnnealingLR", "T_max": 88, "warmup_steps": 2}  # int(3 % of 90)
    assert (job["train"]["steps"], job["train"]["precision"]) == (90, "auto")
    assert job["log"]["to"] == ["jsonl", {"name": "wandb", "args": {"project": "mine"}}, "tensorboard"]
    assert "datasets[0].roles" in keys(found, "taken")
    plain = changed(AXOLOTL_QLORA, datasets=[{"path": "org/chats", "type": "chat_template", "field_messages": "conversations"}])
    assert note(made("axolotl", plain), "datasets[0].field_messages") == "hetpipe finds it without being told"


def test_all_parameters_of_axolotl() -> None:
    """batch_size is that of a device; two devices share a sample; a part of the run is a number of steps."""
    found = made("axolotl", AXOLOTL_FULL, devices=4, steps=40)
    job = found.job
    assert (job["train"]["global_batch"], job["train"]["steps"]) == (16, 40)
    assert job["train"]["scheduler"] == {"name": "CosineAnnealingLR", "T_max": 38, "eta_min": 2e-6, "warmup_steps": 2}
    assert job["evaluate"] == {"every_steps": 10, "data": {"args": {"split": "test"}}}
    assert keys(found, "planned") == ["fsdp", "fsdp_config"]
    assert "--devices is 3" in refused("axolotl", AXOLOTL_FULL, devices=3, steps=40)


# ---- every key in one list


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_of_the_table_is_known_to_the_code(trainer: str) -> None:
    """A key that is taken over is read: as it is (`kind`), or by its name in a file of this folder."""
    folder = Path(__file__).parents[1] / "hetpipe/exchange/configs"
    code, table = "".join(path.read_text() for path in folder.glob("*.py")), load_table(trainer)
    names = (table.epochs, table.optimizer, table.scheduler, table.held_out)
    inner = [key for key, known in table.taken.items() if known.kind is None and key not in names and "[]" not in key]
    assert [
        key for key in inner if f'"{key}"' not in code and key not in ("do_train", "use_wandb", "use_mlflow", "use_tensorboard")
    ] == []
    assert {known.to.partition(".")[0] for known in table.taken.values()} <= set(Job.model_fields)


@drawn(st.data())
def test_every_key_stands_in_exactly_one_list(data: st.DataObject) -> None:
    trainer = data.draw(st.sampled_from([*TRAINERS]))
    base = yaml.safe_load(data.draw(st.sampled_from(CONFIGS[trainer])))
    table = load_table(trainer)
    unknown = data.draw(
        st.dictionaries(st.from_regex(r"[a-z_]{3,12}", fullmatch=True), st.integers(-9, 9) | st.booleans(), max_size=3)
    )
    unknown = {key: value for key, value in unknown.items() if key not in table.known}
    others = [key for group in (*table.planned, *table.without) for key in group.keys if "[]" not in key]
    added = data.draw(st.dictionaries(st.sampled_from(others), st.none() | st.booleans() | st.text(max_size=5), max_size=4))
    preferences = {"rl", "reward_model", "process_reward_model"}
    config = {**{key: value for key, value in added.items() if key not in preferences}, **base, **unknown}
    found = made(trainer, yaml.safe_dump(config), steps=50)
    listed = [line.key for name in ("taken", "planned", "no_counterpart", "unknown") for line in getattr(found, name)]
    assert sorted(key for key in listed if "[" not in key) == sorted(config)
    assert set(keys(found, "unknown")) == set(unknown)
    assert not set(keys(found, "defaults")) & {key for key, value in config.items() if value is not None}
    Job.parse(found.job, "test")


@drawn(st.data())
def test_any_value_becomes_a_job_or_an_error_that_names_its_key(data: st.DataObject) -> None:
    trainer = data.draw(st.sampled_from([*TRAINERS]))
    base = yaml.safe_load(data.draw(st.sampled_from(CONFIGS[trainer])))
    taken = [key for key in load_table(trainer).taken if "[]" not in key]
    values = st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats(-2, 2) | st.text(max_size=4)
    key, value = (
        data.draw(st.sampled_from(taken)),
        data.draw(values | st.lists(values, max_size=2) | st.dictionaries(st.text(), values)),
    )
    try:
        found = made(trainer, yaml.safe_dump({**base, key: value}), steps=50)
    except InputError as error:
        said, listed = str(error), [key]
    else:
        said, listed = "config.yaml", [line.key for lines in found.lists.values() for line in lines]
    assert "config.yaml" in said or "dataset_info.json" in said
    assert key in listed


@drawn(st.data())
def test_any_value_of_a_data_set_becomes_a_job_or_an_error(data: st.DataObject) -> None:
    values = st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=4)
    value = data.draw(values | st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=3), values, max_size=2))
    trainer = data.draw(st.sampled_from([*TRAINERS]))
    inner = [key.removeprefix("dataset[].") for key in load_table(trainer).known if "[]" in key]
    key = data.draw(st.sampled_from(inner))
    if trainer == "axolotl":
        base = yaml.safe_load(AXOLOTL_QLORA)
        text = changed(AXOLOTL_QLORA, datasets=[{**base["datasets"][0], key: value}])
    else:
        text = changed(LORA, dataset=data.draw(st.sampled_from(["talks", "asks"])))
        Path("data/dataset_info.json").write_text(json.dumps({name: {**entry, key: value} for name, entry in INFO.items()}))
    try:
        found = made(trainer, text, steps=50)
    except InputError as error:
        said, listed = str(error), [key]
    else:
        said, listed = "config.yaml", [line.key.rpartition("].")[2] for lines in found.lists.values() for line in lines]
    assert "config.yaml" in said or "dataset_info.json" in said
    assert key in listed


def test_float32_is_told_where_half_precision_is_not_said() -> None:
    found = made("llamafactory", changed(LORA, bf16=None))
    assert "precision" not in found.job["train"]
    assert next(line for line in found.defaults if line.key == "bf16").note.startswith("products are computed in float32")


def test_an_unknown_key_is_told_with_the_one_that_is_meant() -> None:
    found = made("llamafactory", changed(LORA, learning_rat=1, lora_plus=None))
    assert keys(found, "unknown") == ["learning_rat", "lora_plus"]
    assert note(found, "learning_rat") == "LLaMA-Factory may know it, hetpipe does not; did you mean learning_rate?"


@pytest.mark.parametrize(
    ("trainer", "text", "more", "key", "told"),
    [
        ("llamafactory", LORA, {"optim": "adafactor"}, "optim", "no such optimizer here, so the job has AdamW"),
        ("llamafactory", LORA, {"lr_scheduler_type": "inverse_sqrt"}, "lr_scheduler_type", "the rate stays what it is"),
        ("llamafactory", LORA, {"additional_target": "embed_tokens,gate"}, "additional_target", "not gate"),
        ("llamafactory", LORA, {"val_size": 100}, "val_size", "it counts samples"),
        ("llamafactory", LORA, {"report_to": "swanlab"}, "report_to", "no curves for swanlab"),
        ("llamafactory", LORA, {"use_dft_loss": True}, "use_dft_loss", "The job trains without it"),
        ("llamafactory", QLORA, {"max_samples": 5}, "max_samples", "the records of each data set"),
        ("llamafactory", LORA, {"save_strategy": "no"}, "save_strategy", "always saves"),
        ("axolotl", AXOLOTL_LORA, {"neftune_noise_alpha": 5}, "neftune_noise_alpha", "The job trains without it"),
        ("axolotl", AXOLOTL_LORA, {"lr_scheduler": "rex"}, "lr_scheduler", "the rate stays what it is"),
        ("axolotl", AXOLOTL_LORA, {"chat_template_jinja": "{% x %}"}, "chat_template_jinja", "write the template into a file"),
    ],
)
def test_a_value_without_a_counterpart(trainer: str, text: str, more: dict[str, Any], key: str, told: str) -> None:
    found = made(trainer, changed(text, **more))
    assert key in keys(found, "no_counterpart")
    assert told in note(found, key)


# ---- the command


def test_the_command_writes_a_job_and_lists_every_key(run: Command) -> None:
    Path("run.yaml").write_text(LORA)
    said = run("convert", "llamafactory", "run.yaml", "--devices", "2", "-o", "jobs/a.yaml")
    assert said.code == 0
    for part in ("taken over (", "decided by the plan (1)", "no counterpart (3)", "their defaults", "written: jobs/a.yaml"):
        assert part in said.out
    first, second, *_ = Path("jobs/a.yaml").read_text().splitlines()
    assert first == "# hetpipe train jobs/a.yaml"
    assert second == "# By hetpipe convert llamafactory run.yaml -o jobs/a.yaml --devices 2"
    told = json.loads(run("convert", "llamafactory", "run.yaml", "--devices", "2", "--json").out)
    assert [*told] == ["files", "taken", "planned", "no_counterpart", "unknown", "defaults"]
    assert told["files"] == ["job.yaml"]
    line = {"key": "lora_rank", "there": "4", "job": "adapter.r: 4", "note": ""}
    assert line in told["taken"]
    missing = run("convert", "axolotl", "run.yaml")
    assert (missing.code, missing.out) == (2, "")
    assert missing.err.startswith(
        "error: run.yaml: base_model is missing: the model. Is this the configuration of a run of axolotl?"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "text"),
    [("llamafactory", changed(LORA, bf16=False)), pytest.param("axolotl", AXOLOTL_LORA, marks=pytest.mark.thorough)],
)
def test_a_converted_job_trains(run: Command, trainer: str, text: str) -> None:
    assert trained_steps(run, trainer, text) == {"llamafactory": 9, "axolotl": 3}[trainer]
