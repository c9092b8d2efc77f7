"""FastSpeed's users: every key of their args.json, its import lines, what is refused, and the command that converts it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.fastspeed import FastSpeed, Params, cnnCalculateParam, dict_samples
from hetpipe.fastspeed.arguments import Arguments
from hetpipe.fastspeed.changes import DROPPED
from hetpipe.fastspeed.convert import convert
from hetpipe.fastspeed.import_path import import_path
from hetpipe.fastspeed.module import one_layer, put_weights, read_checkpoint
from hetpipe.files.messages import InputError
from tests.support import fastspeed_parts as parts
from tests.support.commands import Command
from tests.support.fastspeed_parts import arguments, write
from tests.support.ranks import cluster_of


def parse(*args: Any, **strategy: Any) -> Arguments:
    return Arguments.parse(arguments(*args, **strategy), "args.json")


# ---- every key


def test_manual_shares_become_a_plan() -> None:
    found = convert(parse(manual_partition_list=[9, 6, 3], manual_batchsize_list=[3, 2, 1]))
    assert found.model == "tests.support.fastspeed_parts:Net"
    assert found.plan is not None
    assert [(r.microbatch_sizes, r.stages[0].layers, r.stages[0].device) for r in found.plan.replicas] == [
        ((3,), (0, 1), "n0/0"),
        ((2,), (0, 1), "n0/1"),
        ((1,), (0, 1), "n0/2"),
    ]
    assert found.job == {
        "format": "hetpipe.job/1",
        "model": {
            "target": "hetpipe.fastspeed:one_layer",
            "args": {"target": "tests.support.fastspeed_parts:Net", "arguments": [5, 8]},
            "batch_norm": "per_microbatch",
            "coupled_layers": "per_microbatch",
        },
        "data": {"target": "load_data:build"},
        "loss": {"name": "cross_entropy", "weight": "tokens"},
        "profiler": {"microbatch_sizes": [1, 2, 3]},
        "plan": {"file": "plan.json"},
        "train": {"global_batch": 6, "epochs": 1, "optimizer": {"name": "Adam", "lr": 0.01}},
        "log": {"folder": "runs/Net", "every_steps": 50},
    }


def test_autobalanced_is_left_to_the_partitioner() -> None:
    no_lists = {"manual_partition_list": None, "manual_batchsize_list": None}
    found = convert(parse(train={"gradient_accumulate_step": 20}, partition_type="autobalanced", **no_lists))
    assert found.plan is None
    assert found.job["plan"] == {"partitioner": "uneven-data-parallel"}
    assert found.job["profiler"] == {"microbatch_sizes": [10, 20, 40, 80, 100]}
    assert found.job["train"]["global_batch"] == 100 * 20
    assert found.job["log"]["every_steps"] == 50 // 20


def test_accumulation_is_micro_batches() -> None:
    found = convert(parse(train={"gradient_accumulate_step": 3}))
    assert found.plan is not None
    assert [r.microbatch_sizes for r in found.plan.replicas] == [(6, 6, 6), (2, 2, 2)]
    assert found.job["train"]["global_batch"] == found.plan.global_batch == 24


def test_checkpoints_logs_and_dicts() -> None:
    saves = {
        "saveModel": 1,
        "checkpoint_interval": 2,
        "checkpoint_folder": "./kept",
        "epochs": 5,
        "iter_log_interval": 0,
        "isLoadModel": 1,
        "loadModelPath": "./old.pth",
    }
    found = convert(
        parse(train=saves), data={"target": "load_data:build", "args": {"n": 3}}, input_names=["input_ids", "attention_mask"]
    )
    assert found.job["checkpoint"] == {"folder": "./kept", "every_steps": 2 * 2, "keep": 3}  # 16 samples, 8 a step
    assert "log" not in found.job
    assert found.job["model"]["args"] == {
        "target": "tests.support.fastspeed_parts:Net",
        "arguments": [5, 8],
        "input_names": ["input_ids", "attention_mask"],
        "weights": "./old.pth",
    }
    assert found.job["data"] == {
        "target": "hetpipe.fastspeed:dict_samples",
        "args": {"target": "load_data:build", "input_names": ["input_ids", "attention_mask"], "arguments": {"n": 3}},
    }
    named = convert(parse(), data={"name": "cifar10"}, input_names=["x"])
    assert named.job["data"] == {"name": "cifar10"}


def test_every_key_has_its_line_and_what_is_not_used_says_so() -> None:
    given = arguments(
        train={"isLoadModel": 0, "loadModelPath": "x", "saveModel": 1, "checkpoint_interval": 1, "checkpoint_folder": "f"},
        work_path="/home/",
    )
    for partition_type in ("manual", "autobalanced"):
        given["strategy"]["partition_type"] = partition_type
        found = convert(Arguments.parse(given, "args.json"))
        lines = {change.key: change for change in found.changes}
        told = {part for key in lines for part in key.replace(", ", " ").replace(".", " ").split()}
        assert {key for section in given.values() for key in section} <= told
        assert all(all(change) for change in found.changes)
        unused = {
            "manual": ("unbalanced_strategy", "test_batchsize_bytime"),
            "autobalanced": ("manual_partition_list", "manual_batchsize_list"),
        }[partition_type]
        assert all(lines[f"strategy.{key}"].job == DROPPED for key in unused)
        assert lines["data.total_datasize"].job == DROPPED
    found = convert(parse(train={"gradient_accumulate_step": 2}))
    lines = {change.key: change for change in found.changes}
    assert "manual mode ignores it; a batch is the sum of manual_batchsize_list, 8" in lines["train.batch_size"].why
    assert lines["(the gradient)"].fastspeed.startswith("2/2 times the true one")
    assert "as many again after loading" in lines["train.epochs"].fastspeed
    uneven = convert(parse(manual_partition_list=[12, 8]))
    assert "run out of data after 2, 4 iterations" in next(c for c in uneven.changes if c.key.endswith("partition_list")).why


def test_lists_that_leave_samples_out() -> None:
    """As in FastSpeed's own args.json of VGG-19: its sampler stops there; the job, which deals whole batches, need not."""
    given = parse(
        {"total_datasize": 50_000},
        {"batch_size": 24, "epochs": 2},
        manual_partition_list=[12_500, 12_500],
        manual_batchsize_list=[12, 12],
    )
    found = convert(given)
    (why,) = [change.why for change in found.changes if change.key == "strategy.manual_partition_list"]
    assert why == (
        "it sums to 25000 of 50000 samples, and FastSpeed's sampler ends with an AssertionError there; the job trains on all "
        "50000, each once an epoch, and every batch is dealt by the batch sizes"
    )
    assert found.plan is not None
    assert [r.samples for r in found.plan.replicas] == [12, 12]
    assert (given.left_out, parse().left_out) == (25_000, 0)
    assert parse({"total_datasize": 50}, partition_type="autobalanced").left_out == 0


def test_operations_and_parameters_of_a_model() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(8, 5)
    )
    model[1].eval()
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    operations, parameters = cnnCalculateParam(model=model, shape=(2, 3, 10, 12))
    assert operations == 2 * 2 * (8 * 8 * 10 * 3 * 3 * 3 + 8 * 5)
    assert parameters == (3 * 9 + 1) * 8 + 2 * 8 + (8 + 1) * 5
    assert [module.training for module in model] == [True, False, True, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    with pytest.raises(InputError, match=r"^cnnCalculateParam: Sequential does not take a batch of shape \(2, 4, 10, 12\): G"):
        cnnCalculateParam(model, (2, 4, 10, 12))
    with pytest.raises(InputError, match=r"does not take a batch of shape \(2, 'x'\)"):
        cnnCalculateParam(model, (2, "x"))  # type: ignore[arg-type]


# ---- the import path


@pytest.mark.parametrize(
    ("name", "lines", "path"),
    [
        ("AlexNet", ["from model import * "], "model:AlexNet"),
        ("AlexNet", ["from a.b import AlexNet"], "a.b:AlexNet"),
        ("Net", ["import os", "from a.b import AlexNet as Net", "from torch import *"], "a.b:AlexNet"),
        ("x.Net", ["import a.b as x"], "a.b:Net"),
        ("a.b.Net", ["import a.b"], "a.b:Net"),
        ("a.Net", ["import a.b"], "a:Net"),
        ("b.Net", ["from a import b"], "a.b:Net"),
        ("b.Net.make", ["from a import b; import sys"], "a.b:Net.make"),
        ("Net", ["from a import Net", "from b import Net"], "b:Net"),
        ("Net", ["", "# the model", "from __future__ import annotations", "from a import *"], "a:Net"),
        ("Net", ["from a import (\n  Net,\n)"], "a:Net"),
    ],
)
def test_import_paths(name: str, lines: list[str], path: str) -> None:
    assert import_path(name, lines) == path


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("Net", ["from a import Net; open('{seen}', 'w')"], "is not a plain import but runs code (Expr)"),
        ("Net", ["import os\nos.system('touch {seen}')"], "is not a plain import but runs code (Expr)"),
        ("Net", ["Net = __import__('os')"], "is not a plain import but runs code (Assign)"),
        ("Net", ["if True: from a import Net"], "is not a plain import but runs code (If)"),
        ("Net", ["def Net(): pass"], "is not a plain import but runs code (FunctionDef)"),
        ("Net", ["from . import Net"], "is relative, and there is no package it could be relative to"),
        ("Net", ["from model import"], "is not Python"),
        ("Net", ["%run setup"], "is not Python"),
        ("Net", ["import \0"], "is not Python"),
        ("Net", ["(" * 5000], "is not Python"),
        ("Net(open('{seen}', 'w'))", ["from a import Net"], "is not a name; write a class or a function"),
        ("Net", [], "strategy.runing_dependency imports nothing; add 'from package.module import Net'"),
        ("Alexnet", ["from a import AlexNet"], "is imported by no line of strategy.runing_dependency; did you mean 'AlexNet'?"),
        ("a", ["import a"], "is the module 'a', not a class; write 'a.Class'"),
        ("Net", ["from a import *", "from b import *"], "may come from any of the modules a, b"),
    ],
)
def test_what_is_no_plain_import_is_refused_and_not_run(name: str, lines: list[str], message: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with pytest.raises(InputError) as told:
        import_path(name.replace("{seen}", str(seen)), [line.replace("{seen}", str(seen)) for line in lines])
    assert message in str(told.value)
    assert not seen.exists()


# ---- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"epoch": 3}}, "train: unknown key 'epoch'; did you mean 'epochs'?"),
        ({"running_dependency": []}, "unknown key 'running_dependency'; did you mean 'runing_dependency'?"),
        ({"train": {"isloadModel": 1}}, "did you mean 'isLoadModel'?"),
        ({"train": {"epochs": 0}}, "train.epochs: Input should be greater than or equal to 1 (got 0)"),
        ({"train": {"optimizer": "SGD"}}, "train.optimizer: Input should be 'Adam' (got 'SGD')"),
        ({"train": {"criterion": "MSE"}}, "train.criterion: Input should be 'CrossEntropy'"),
        ({"model_type": "pipe"}, "strategy.model_type 'pipe' trains nothing in FastSpeed"),
        ({"partition_type": "even"}, "strategy.partition_type: Input should be 'manual' or 'autobalanced'"),
        ({"manual_batchsize_list": [6, 2, 1]}, "manual_partition_list has 2 entries, manual_batchsize_list has 3"),
        ({"manual_batchsize_list": [6, 0]}, "manual_batchsize_list.1: Input should be greater than or equal to 1"),
        ({"manual_batchsize_list": None}, "partition_type 'manual' needs strategy.manual_batchsize_list"),
        ({"data": {"total_datasize": 15}}, "sums to 16 samples, but data.total_datasize is only 15: let it sum to that"),
        ({"partition_type": "autobalanced", "train": {"batch_size": None}}, "'autobalanced' needs train.batch_size"),
        ({"partition_type": "autobalanced", "unbalanced_strategy": "space"}, "unbalanced_strategy: Input should be 'time'"),
        ({"train": {"isLoadModel": 1}}, "train.isLoadModel needs train.loadModelPath"),
        ({"train": {"saveModel": 1}}, "train.saveModel needs train.checkpoint_interval and train.checkpoint_folder"),
    ],
)
def test_wrong_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as told:
        parse(**change)
    assert message in str(told.value)


def test_params_and_other_refusals(tmp_path: Path) -> None:
    file = write(tmp_path / "args.json", arguments())
    params = Params(str(file))
    assert params.strategy["model_args"] == [5, 8]
    assert json.loads(json.dumps(vars(params)))["train"]["isLoadModel"] is False  # as FastSpeed's main.py prints it
    with pytest.raises(InputError, match="2 entries, but there are 3 devices"):
        convert(parse(), devices=["n0/0", "n0/1", "n1/0"])
    made = FastSpeed(params)
    with pytest.raises(InputError, match="the dataset has 3 samples"):
        made.unbalanced_datasplit(parts.points(3)[0], parts.Net())
    with pytest.raises(InputError, match="call unbalanced_datasplit before train"):
        made.train(None, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="returns dict, expected an nn.Module"):
        one_layer("builtins:dict")
    with pytest.raises(InputError, match="sample 1 has no 'ids'; it has input_ids, attention_mask"):
        dict_samples("tests.support.fastspeed_parts:dicts", ["ids"], {"samples": 4}).train[1]


def test_checkpoints_are_read_without_running_them(tmp_path: Path) -> None:
    """FastSpeed's files give the model's weights; one with code in it, one of another model and no file are refused."""
    torch.manual_seed(1)
    net, path = parts.Net(), tmp_path / "Net_DDP_Epoch4.pth"
    optimizer = torch.optim.Adam(net.parameters())
    torch.save({"epoch": 4, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    (layer,) = one_layer("tests.support.fastspeed_parts:Net", [5, 8], weights=str(path))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in layer.state_dict().items())
    whole: Any = torch.compile(parts.Net(), backend="eager")  # its names have a prefix, in the file or in the model
    put_weights(whole, read_checkpoint(str(path)), str(path))
    assert torch.equal(whole.first.weight, net.first.weight)
    put_weights(parts.Net(), {"model": whole.state_dict()}, "compiled.pth")
    with pytest.raises(InputError, match="holds the weights of another model"):
        one_layer("tests.support.fastspeed_parts:Net", [5, 9], weights=str(path))
    with pytest.raises(InputError, match="cannot read the checkpoint .*nowhere.pth: No such file"):
        read_checkpoint(str(tmp_path / "nowhere.pth"))
    torch.save({"model": net.state_dict()}, path)
    with pytest.raises(InputError, match="is no checkpoint of FastSpeed: it has no 'epoch', 'optimizer'"):
        read_checkpoint(str(path))
    torch.save({"epoch": Path("/"), "model": {}, "optimizer": {}}, path)  # any class but torch's own
    with pytest.raises(InputError, match="it holds more than tensors and plain values"):
        read_checkpoint(str(path))


# ---- the command


CONVERT = ("convert", "fastspeed")


def test_the_command_writes_a_job_that_can_be_read(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "args.json", arguments())
    cluster_of(1, 1).save(tmp_path / "two.json")
    data = "{target: tests.support.fastspeed_parts:points, args: {samples: 16}}"
    said = run(*CONVERT, "args.json", "-o", "jobs/a.yaml", "--data", data, "--cluster", "two.json")
    assert said.code == 0
    assert "train.batch_size" in said.out
    assert "the same: train.optimizer, train.learning_rate" in said.out
    assert "written: jobs/a.yaml, jobs/a.plan.json" in said.out
    first, second, *_ = (tmp_path / "jobs/a.yaml").read_text().splitlines()
    assert first == "# hetpipe train jobs/a.yaml"
    assert second == f"# By hetpipe convert fastspeed args.json -o jobs/a.yaml --data '{data}' --cluster two.json"
    job = Job.read("jobs/a.yaml")
    job.check_files()
    assert job.plan.file is not None
    assert Plan.load(job.plan.file).device_ids == ("n0/0", "n1/0")
    told = json.loads(run(*CONVERT, "args.json", "-o", "b.yaml", "--data", "mine:build", "--json").out)
    assert told["files"] == ["b.yaml", "b.plan.json"]
    assert told["model"] == "tests.support.fastspeed_parts:Net"
    line = {"key": "strategy.model_args", "fastspeed": "[5, 8]", "job": "model.args.arguments", "why": "the same"}
    assert line in told["changes"]
    assert Job.read("b.yaml").data.target == "mine:build"


def test_the_command_refuses_with_exit_2_and_runs_nothing(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("open('seen', 'w')\n")  # importing it would leave a trace
    lines = ["from model import *", "import os; os.mkdir('seen too')"]
    write(tmp_path / "args.json", arguments(runing_dependency=lines))
    said = run(*CONVERT, "args.json", "-o", "job.yaml")
    assert said.code == 2
    assert "os.mkdir('seen too')\" is not a plain import but runs code (Expr)" in said.err
    for options, message in (
        (["nowhere.json"], "cannot read nowhere.json: No such file"),
        (["args.json", "--data", "[1]"], "cannot read --data '[1]'; write 'module:function' or"),
        (["args.json", "--data", "{"], "cannot read --data '{'"),
        (["args.json", "--data", "{nam: x}"], "unknown key 'nam'; did you mean 'name'?"),
    ):
        write(tmp_path / "args.json", arguments())
        said = run(*CONVERT, *options, "-o", "job.yaml")
        assert said.code == 2
        assert message in said.err
    write(tmp_path / "args.json", arguments(runing_dependency=lines[:1]))
    assert run(*CONVERT, "args.json", "-o", "job.yaml").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["args.json", "job.plan.json", "job.yaml", "model.py"]
