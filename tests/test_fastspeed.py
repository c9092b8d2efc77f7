"""FastSpeed's users: their args.json becomes a job, their Python calls work, and the gradients are the true ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.config import Job
from hetpipe.datasets import DataError
from hetpipe.fastspeed import FastSpeed, Params, dict_samples
from hetpipe.fastspeed.arguments import Arguments
from hetpipe.fastspeed.changes import DROPPED
from hetpipe.fastspeed.convert import convert
from hetpipe.fastspeed.import_path import import_path
from hetpipe.fastspeed.module import one_layer, read_checkpoint
from hetpipe.formats import InputError
from hetpipe.plan import Plan
from tests import fastspeed_parts as parts
from tests.commands import ROOT, Command
from tests.fastspeed_parts import Compared, Surface
from tests.ranks import cluster_of, run_ranks

TRAIN = {"epochs": 1, "batch_size": 100, "iter_log_interval": 50, "epoch_log_interval": 1, "gradient_accumulate_step": 1,
         "criterion": "CrossEntropy", "optimizer": "Adam", "learning_rate": 0.01}  # fmt: skip
STRATEGY = {"model_type": "ddp", "partition_type": "manual", "manual_partition_list": [12, 4], "manual_batchsize_list": [6, 2],
            "unbalanced_strategy": "time", "test_batchsize_bytime": 10, "model_name": "Net", "model_args": [5, 8],
            "runing_dependency": ["from tests.fastspeed_parts import * "]}  # fmt: skip


def arguments(
    data: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **strategy: Any
) -> dict[str, Any]:
    """An args.json; total_datasize is the sum of the manual partition; None leaves a key out."""
    whole = STRATEGY | strategy
    total = sum(whole["manual_partition_list"] or ()) or 16
    sections = {
        "data": {"total_datasize": total, "train_loader_pin_memory": 0, "train_loader_num_workers": 0}
        | (data or {}),
        "train": TRAIN | (train or {}),
        "strategy": whole,
    }
    return {name: {k: v for k, v in section.items() if v is not None} for name, section in sections.items()}


def parse(*args: Any, **strategy: Any) -> Arguments:
    return Arguments.parse(arguments(*args, **strategy), "args.json")


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


# ---- every key


def test_manual_shares_become_a_plan() -> None:
    found = convert(parse(manual_partition_list=[9, 6, 3], manual_batchsize_list=[3, 2, 1]))
    assert found.model == "tests.fastspeed_parts:Net"
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
            "args": {"target": "tests.fastspeed_parts:Net", "arguments": [5, 8]},
            "batch_norm": "per_microbatch",
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
    saves = {"saveModel": 1, "checkpoint_interval": 2, "checkpoint_folder": "./kept", "epochs": 5, "iter_log_interval": 0,
             "isLoadModel": 1, "loadModelPath": "./old.pth"}  # fmt: skip
    found = convert(
        parse(train=saves),
        data={"target": "load_data:build", "args": {"n": 3}},
        input_names=["input_ids", "attention_mask"],
    )
    assert found.job["checkpoint"] == {
        "folder": "./kept",
        "every_steps": 2 * 2,
        "keep": 3,
    }  # 16 samples, 8 a step
    assert "log" not in found.job
    assert found.job["model"]["args"] == {
        "target": "tests.fastspeed_parts:Net",
        "arguments": [5, 8],
        "input_names": ["input_ids", "attention_mask"],
        "weights": "./old.pth",
    }
    assert found.job["data"] == {
        "target": "hetpipe.fastspeed:dict_samples",
        "args": {
            "target": "load_data:build",
            "input_names": ["input_ids", "attention_mask"],
            "arguments": {"n": 3},
        },
    }
    named = convert(parse(), data={"name": "cifar10"}, input_names=["x"])
    assert named.job["data"] == {"name": "cifar10"}


def test_every_key_has_its_line_and_what_is_not_used_says_so() -> None:
    given = arguments(train={"isLoadModel": 0, "loadModelPath": "x", "saveModel": 1, "checkpoint_interval": 1,
                             "checkpoint_folder": "f"}, work_path="/home/")  # fmt: skip
    for partition_type in ("manual", "autobalanced"):
        given["strategy"]["partition_type"] = partition_type
        found = convert(Arguments.parse(given, "args.json"))
        lines = {change.key: change for change in found.changes}
        told = {part for key in lines for part in key.replace(", ", " ").replace(".", " ").split()}
        assert {key for section in given.values() for key in section} <= told
        assert all(all(change) for change in found.changes)
        unused = {"manual": ("unbalanced_strategy", "test_batchsize_bytime"),
                  "autobalanced": ("manual_partition_list", "manual_batchsize_list")}[partition_type]  # fmt: skip
        assert all(lines[f"strategy.{key}"].job == DROPPED for key in unused)
        assert lines["data.total_datasize"].job == DROPPED
    found = convert(parse(train={"gradient_accumulate_step": 2}))
    lines = {change.key: change for change in found.changes}
    assert (
        "manual mode ignores it; a batch is the sum of manual_batchsize_list, 8"
        in lines["train.batch_size"].why
    )
    assert lines["(the gradient)"].fastspeed.startswith("2/2 times the true one")
    assert "as many again after loading" in lines["train.epochs"].fastspeed
    uneven = convert(parse(manual_partition_list=[12, 8]))
    assert (
        "run out of data after 2, 4 iterations"
        in next(c for c in uneven.changes if c.key.endswith("partition_list")).why
    )


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
        (
            "Alexnet",
            ["from a import AlexNet"],
            "is imported by no line of strategy.runing_dependency; did you mean 'AlexNet'?",
        ),
        ("a", ["import a"], "is the module 'a', not a class; write 'a.Class'"),
        ("Net", ["from a import *", "from b import *"], "may come from any of the modules a, b"),
    ],
)
def test_what_is_no_plain_import_is_refused_and_not_run(
    name: str, lines: list[str], message: str, tmp_path: Path
) -> None:
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
        (
            {"manual_batchsize_list": [6, 2, 1]},
            "manual_partition_list has 2 entries, manual_batchsize_list has 3",
        ),
        (
            {"manual_batchsize_list": [6, 0]},
            "manual_batchsize_list.1: Input should be greater than or equal to 1",
        ),
        ({"manual_batchsize_list": None}, "partition_type 'manual' needs strategy.manual_batchsize_list"),
        ({"data": {"total_datasize": 17}}, "sums to 16 samples, but data.total_datasize is 17"),
        (
            {"partition_type": "autobalanced", "train": {"batch_size": None}},
            "'autobalanced' needs train.batch_size",
        ),
        (
            {"partition_type": "autobalanced", "unbalanced_strategy": "space"},
            "unbalanced_strategy: Input should be 'time'",
        ),
        ({"train": {"isLoadModel": 1}}, "train.isLoadModel needs train.loadModelPath"),
        (
            {"train": {"saveModel": 1}},
            "train.saveModel needs train.checkpoint_interval and train.checkpoint_folder",
        ),
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
    assert (
        json.loads(json.dumps(vars(params)))["train"]["isLoadModel"] is False
    )  # as FastSpeed's main.py prints it
    with pytest.raises(InputError, match="2 entries, but there are 3 devices"):
        convert(parse(), devices=["n0/0", "n0/1", "n1/0"])
    made = FastSpeed(params, None, torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the dataset has 3 samples"):
        made.unbalanced_datasplit(parts.points(3)[0], parts.Net())
    with pytest.raises(InputError, match="call unbalanced_datasplit before train"):
        made.train(None, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="returns dict, expected an nn.Module"):
        one_layer("builtins:dict")
    with pytest.raises(DataError, match="sample 1 has no 'ids'; it has input_ids, attention_mask"):
        dict_samples("tests.fastspeed_parts:dicts", ["ids"], {"samples": 4}).train[1]


def test_checkpoints_are_read_without_running_them(tmp_path: Path) -> None:
    """FastSpeed's files give the model's weights; one with code in it, one of another model and no file are refused."""
    torch.manual_seed(1)
    net, path = parts.Net(), tmp_path / "Net_DDP_Epoch4.pth"
    optimizer = torch.optim.Adam(net.parameters())
    torch.save({"epoch": 4, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    (layer,) = one_layer("tests.fastspeed_parts:Net", [5, 8], weights=str(path))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in layer.state_dict().items())
    with pytest.raises(InputError, match="holds the weights of another model"):
        one_layer("tests.fastspeed_parts:Net", [5, 9], weights=str(path))
    with pytest.raises(InputError, match="cannot read the checkpoint .*nowhere.pth: No such file"):
        read_checkpoint(str(tmp_path / "nowhere.pth"))
    torch.save({"model": net.state_dict()}, path)
    with pytest.raises(InputError, match="is no checkpoint of FastSpeed: it has no 'epoch', 'optimizer'"):
        read_checkpoint(str(path))
    torch.save({"epoch": Path("/"), "model": {}, "optimizer": {}}, path)  # any class but torch's own
    with pytest.raises(InputError, match="it is no file of tensors and plain values alone"):
        read_checkpoint(str(path))


# ---- the command


CONVERT = ("convert", "fastspeed")


def test_the_command_writes_a_job_that_can_be_read(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "args.json", arguments())
    cluster_of(1, 1).save(tmp_path / "two.json")
    data = "{target: tests.fastspeed_parts:points, args: {samples: 16}}"
    said = run(*CONVERT, "args.json", "-o", "jobs/a.yaml", "--data", data, "--cluster", "two.json")
    assert said.code == 0
    assert "train.batch_size" in said.out
    assert "the same: train.optimizer, train.learning_rate" in said.out
    assert "written: jobs/a.yaml, jobs/a.plan.json" in said.out
    first, second, *_ = (tmp_path / "jobs/a.yaml").read_text().splitlines()
    assert first == "# hetpipe train jobs/a.yaml"
    assert (
        second
        == f"# By hetpipe convert fastspeed args.json -o jobs/a.yaml --data '{data}' --cluster two.json"
    )
    job = Job.read("jobs/a.yaml")
    job.check_files()
    assert job.plan.file is not None
    assert Plan.load(job.plan.file).device_ids == ("n0/0", "n1/0")
    told = json.loads(run(*CONVERT, "args.json", "-o", "b.yaml", "--data", "mine:build", "--json").out)
    assert told["files"] == ["b.yaml", "b.plan.json"]
    assert told["model"] == "tests.fastspeed_parts:Net"
    line = {
        "key": "strategy.model_args",
        "fastspeed": "[5, 8]",
        "job": "model.args.arguments",
        "why": "the same",
    }
    assert line in told["changes"]
    assert Job.read("b.yaml").data.target == "mine:build"


def test_the_command_refuses_with_exit_2_and_runs_nothing(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "args.json",
        "job.plan.json",
        "job.yaml",
        "model.py",
    ]


# ---- the gradient: the cases in which FastSpeed's is wrong

CASES = {  # partition, batch sizes, accumulation; samples of the surface's steps and of the job's
    "a half": ([12, 4], [6, 2], 1, [8, 8], [8, 8]),
    "a last, partial batch": ([13, 5], [6, 2], 1, [8, 8, 2], [8, 8, 2]),
    "a rank without data": ([12, 8], [6, 2], 1, [8, 8, 2, 2], [8, 8, 4]),
    "accumulation": ([24, 8], [6, 2], 2, [16, 16], [16, 16]),
    "accumulation with a remainder": ([20, 7], [6, 2], 2, [16, 11], [16, 11]),
}


def fastspeed_ratios(partition: list[int], batches: list[int], accumulate: int) -> list[float]:
    """FastSpeed's own rule, on one device: each rank's mean gradient times b_r / B, averaged over the ranks (a rank that has run
    out of data adds nothing), added up over the accumulation; along the true gradient of the same samples."""
    net = parts.Net().double()
    order = torch.randperm(sum(partition), generator=torch.Generator().manual_seed(0)).tolist()
    inputs, labels = parts.points(sum(partition))[0].tensors

    def gradient(samples: list[int]) -> torch.Tensor:
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs[samples]), labels[samples]).backward()
        return parts.gradients(net)

    iterations = max(-(-part // batch) for part, batch in zip(partition, batches, strict=True))
    ratios = []
    for first in range(0, iterations, accumulate):
        found, used = torch.zeros(()), list[int]()
        for at in range(first, min(first + accumulate, iterations)):
            for r, batch in enumerate(batches):
                own = order[sum(partition[:r]) :][: partition[r]][at * batch : (at + 1) * batch]
                found = found + gradient(own) * (batch / sum(batches) / len(batches)) if own else found
                used += own
        true = gradient(used)
        ratios.append(float(found @ true / (true @ true)))
    return ratios


def test_fastspeed_s_own_rule_is_wrong_in_these_cases() -> None:
    torch.manual_seed(0)
    found = {name: fastspeed_ratios(*case[:3]) for name, case in CASES.items()}
    assert found["a half"] == pytest.approx([0.5, 0.5])
    assert found["a last, partial batch"][:2] == pytest.approx([0.5, 0.5])
    assert found["a last, partial batch"][2] != pytest.approx(0.5, abs=0.01)
    assert found["a rank without data"] == pytest.approx([0.5, 0.5, 0.125, 0.125])
    assert found["accumulation"] == pytest.approx([1.0, 1.0])  # 2 steps added up, 2 ranks averaged
    assert found["accumulation with a remainder"][1] != pytest.approx(1.0, abs=0.01)


def check(steps: list[Compared], samples: list[int]) -> None:
    assert [step.samples for step in steps] == samples
    for step in steps:
        assert step.ratio == pytest.approx(1.0, abs=1e-10)
        assert step.difference < 1e-10
        assert step.loss_difference < 1e-10


def test_gradients_are_true_where_fastspeed_s_are_not(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster_of(2).save(tmp_path / "cluster.json")
    given = {}
    for name, (partition, batches, accumulate, *_) in CASES.items():
        content = arguments(train={"gradient_accumulate_step": accumulate, "epochs": 2},
                            manual_partition_list=partition, manual_batchsize_list=batches)  # fmt: skip
        folder = name.replace(" ", "-")
        source = write(tmp_path / folder / "args.json", content)
        data = f"{{target: tests.fastspeed_parts:points, args: {{samples: {sum(partition)}}}}}"
        job = tmp_path / folder / "job.yaml"
        assert run(*CONVERT, source, "-o", job, "--data", data, "--cluster", "cluster.json").code == 0
        given[name] = (str(source), str(job))
    found = run_ranks(parts.both, cluster_of(2), given)
    for rank, results in enumerate(found):
        for name, (partition, batches, _, of_surface, of_job) in CASES.items():
            own, steps = results[name]
            print(
                f"{name}: ratios {[f'{s.ratio:.6f}' for s in own.steps]} and {[f'{s.ratio:.6f}' for s in steps]}"
            )
            check(own.steps, of_surface * 2)
            check(steps, of_job)
            assert (own.shares, own.partition) == (batches, partition)
            assert own.parameters == {"Total": 6 * 8 + 8 + 8 * 5 + 5, "Trainable": 6 * 8 + 8 + 8 * 5 + 5}
            assert len(own.epoch_losses) == 2
            assert own.epoch_losses[1] < own.epoch_losses[0]
            assert own.throughputs == pytest.approx(
                (2 * partition[rank] / own.seconds, 2 * sum(partition) / own.seconds)
            )
    for name in CASES:
        first, second = (results[name][0] for results in found)
        assert first.epoch_losses == second.epoch_losses
        assert all(torch.equal(value, second.state[key]) for key, value in first.state.items())


def test_the_rest_of_the_surface(tmp_path: Path) -> None:
    """Dicts, a model that returns its loss over tokens, measured shares, and a run in two halves like the whole one."""
    saving = {"saveModel": 1, "checkpoint_interval": 1, "checkpoint_folder": "kept", "epoch_log_interval": 2}
    loading = {**saving, "isLoadModel": 1, "loadModelPath": "kept/Net_DDP_Epoch1.pth"}
    uneven = {"manual_partition_list": [9, 4], "manual_batchsize_list": [3, 2]}
    rows = {
        "dict": (arguments(**uneven), "dict"),
        "loss": (arguments(train={"gradient_accumulate_step": 2}, **uneven), "loss"),
        "measured": (
            arguments(train={"batch_size": 8}, partition_type="autobalanced", test_batchsize_bytime=4),
            "plain",
        ),
        "whole": (arguments(train={"epochs": 4, **saving, "checkpoint_folder": "whole"}), "plain"),
        "half": (arguments(train={"epochs": 2, **saving}), "plain"),
        "other half": (arguments(train={"epochs": 2, **loading}), "plain"),
        "too many": (arguments(manual_partition_list=[8, 4, 4], manual_batchsize_list=[2, 1, 1]), "plain"),
    }
    files = {
        name: (str(write(tmp_path / f"{name}.json", content)), kind) for name, (content, kind) in rows.items()
    }
    for results in run_ranks(parts.surfaces, cluster_of(2), str(tmp_path), files):
        check(results["dict"].steps, [5, 5, 3])
        check(results["loss"].steps, [10, 3])
        measured: Surface = results["measured"]
        assert sum(measured.shares) == 8
        assert sum(measured.partition) == 16
        assert all(step.ratio == pytest.approx(1.0, abs=1e-10) for step in measured.steps)
        whole, half = results["whole"], results["other half"]
        assert len(whole.epoch_losses) == 2  # one for every two epochs
        assert len(half.epoch_losses) == 1
        assert half.epoch_losses[0] == pytest.approx(whole.epoch_losses[1], abs=1e-12)
        assert all(torch.allclose(v, whole.state[k], rtol=0, atol=1e-12) for k, v in half.state.items())
        told = "strategy.manual_batchsize_list has 3 entries, but there are 2 devices (n0/0, n0/1)"
        assert results["too many"].startswith(told)
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == [
        f"Net_DDP_Epoch{n}.pth" for n in range(4)
    ]


# ---- the jobs of configs/fastspeed

FOLDERS = sorted(path.parent for path in ROOT.glob("configs/fastspeed/*/args.json"))
SHORT = (
    "train.epochs=",
    "train.steps=2",
    "train.evaluate_samples=40",
    "profiler.repeats=1",
    "checkpoint=",
    "log=",
)
CIFAR10 = ROOT.parent / "shared" / "data" / "cifar-10-batches-bin"


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_jobs_of_configs_are_what_their_command_makes_and_train(
    folder: Path, run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = (folder / "job.yaml").read_text()
    trains, makes, *_ = text.splitlines()
    assert trains == f"# hetpipe train {(folder / 'job.yaml').relative_to(ROOT)}"
    command = shlex.split(makes.removeprefix("# By hetpipe "))
    command[command.index("-o") + 1] = str(tmp_path / "job.yaml")
    assert run(*command).code == 0
    assert (tmp_path / "job.yaml").read_text().splitlines()[2:] == text.splitlines()[2:]
    plan = folder / "job.plan.json"
    assert (tmp_path / "job.plan.json").exists() == plan.exists()
    if plan.exists():
        assert Plan.load(tmp_path / "job.plan.json") == Plan.load(plan)
    cifar10 = Job.read(folder / "job.yaml").data.name == "cifar10"
    if cifar10 and not CIFAR10.is_dir():
        pytest.skip(f"the piece of CIFAR-10 is not there: {CIFAR10}")
    settings = [*SHORT, f"profiler.cache={tmp_path}", *([f"data.args.folder={CIFAR10}"] if cifar10 else [])]
    said = run(
        "train", str(folder / "job.yaml"), "--json", *(part for s in settings for part in ("--set", s))
    )
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert set(result["utilisation"]) == {"n0/0", "n0/1"}
    assert len(result["losses"]) == 2
    assert all(0 < loss < 10 for loss in result["losses"])
    assert 0 <= result["test_accuracy"] <= 1


def test_without_cifar10_the_job_says_what_it_looks_for(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    said = run("train", "configs/fastspeed/alexnet/job.yaml", "--set", "data.args.folder=nowhere")
    assert said.code == 2
    assert (
        "cifar10: cannot read the folder nowhere: No such file or directory; expected there: data_batch_1.bin"
        in said.err
    )
