"""The commands: what they print and write, and how they end. In this process where no rank is started."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import hetpipe
from hetpipe.files.messages import InputError, exit_code
from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.planning.partition import PartitionError
from hetpipe.processes.launch import RankFailure, Report
from hetpipe.processes.stopping import RunStopped
from hetpipe.show.words import percent
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile
from tests.commands import Command, finish, start
from tests.jobs import Folder, train


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A current folder with job.yaml, cluster.yaml, plan.json and profile.json of a job that works."""
    monkeypatch.chdir(tmp_path)
    made = Folder(tmp_path)
    made.ready()
    return made


PLANNING = ("--profile", "profile.json", "--cluster", "cluster.yaml")


def test_plan_prints_a_table_or_json_and_writes_the_same(run: Command, folder: Folder) -> None:
    shown = run("plan", *PLANNING, "--global-batch", 12, "-o", "new.json")
    assert shown.code == 0
    assert all(line.startswith("planning") for line in shown.err.splitlines())
    assert "n0/0" in shown.out
    printed = run("plan", *PLANNING, "--global-batch", 12, "--json")
    assert printed.code == 0
    plan = Plan.parse(json.loads(printed.out), "printed")
    assert plan == Plan.load("new.json")
    assert plan.global_batch == 12
    assert plan.predicted is not None
    assert plan.predicted.lower_bound_seconds is not None


def test_plan_takes_a_partitioner_a_schedule_and_a_price(run: Command, folder: Folder) -> None:
    options = ("plan", *PLANNING, "--global-batch", 12, "--json")
    even = json.loads(run(*options, "--partitioner", "even").out)
    assert even["partitioner"] == "even"
    assert (
        json.loads(run(*options, "--schedule", "gpipe", "--partitioner", "chain").out)["schedule"] == "gpipe"
    )
    one = json.loads(run(*options, "--max-price-per-hour", 1.5).out)
    assert one["predicted"]["price_per_hour"] <= 1.5
    assert "recompute" not in run("plan", *PLANNING, "--global-batch", 12, "--no-recompute").out.lower()


def test_the_version_and_a_short_help(run: Command) -> None:
    assert run("--version") == (0, f"hetpipe {hetpipe.__version__}\n", "")
    for command in ((), ("plan",), ("train",)):
        assert run(*command, "-h").code == 0
    assert "--show-completion" in run("-h").out


def test_simulate_prints_a_gantt_or_json_and_writes_a_trace(run: Command, folder: Folder) -> None:
    options = ("simulate", "--plan", "plan.json", *PLANNING)
    shown = run(*options, "--trace", "trace.json")
    assert shown.code == 0
    assert folder.read("trace.json")["traceEvents"]
    found = json.loads(run(*options, "--json").out)
    step, pipeline = (human_seconds(found[name]) for name in ("step_seconds", "pipeline_seconds"))
    assert f"step                {step} (pipeline {pipeline}, " in shown.out
    for device, peak in found["peak_bytes"].items():
        (row,) = [line for line in shown.out.splitlines() if f" {device} cpu " in line and line.startswith(" r")]
        assert f" {percent(1 - found['bubble_fraction'][device])} " in row
        idle = sum(found["idle_seconds"][device].values())
        assert idle / found["step_seconds"] == pytest.approx(found["bubble_fraction"][device], abs=1e-9)
        assert f"{human_bytes(peak)} of 1.00 GiB" in row
    assert found["step_seconds"] == pytest.approx(
        found["pipeline_seconds"] + found["gradient_sync_seconds"] + found["optimizer_seconds"])  # fmt: skip
    assert set(found["peak_bytes"]) == set(found["bubble_fraction"]) == {"n0/0", "n0/1", "n1/0"}


def test_show_prints_a_plan_and_draws_it(run: Command, folder: Folder) -> None:
    plain = run("show", "plan.json")
    assert plain.code == 0
    assert "n0/1" in plain.out
    assert "block2" in run("show", "plan.json", *PLANNING).out
    assert Plan.parse(json.loads(run("show", "plan.json", "--json").out), "printed") == Plan.load("plan.json")
    drawn = run("show", "plan.json", *PLANNING, "-o", "plan.svg")
    assert (drawn.code, drawn.err) == (0, "picture written to plan.svg\n")
    assert "<svg" in (folder.path / "plan.svg").read_text()


@pytest.mark.parametrize("name", ["cluster", "profile", "plan", "job", "catalogue", "front"])
def test_schema(run: Command, name: str) -> None:
    found = json.loads(run("schema", name).out)
    assert found["properties"]["format"]["const"] == f"hetpipe.{name}/1"


def test_help_names_every_command(run: Command) -> None:
    found = run("--help")
    assert found.code == 0
    assert all(name in found.out for name in ("profile", "plan", "simulate", "show", "train", "schema"))


def change(document: Any, **keys: Any) -> Any:
    return {**document, **keys}


def wrong_key(folder: Folder) -> None:
    folder.job(trian={})


def wrong_key_inside(folder: Folder) -> None:
    folder.job(train=train(optimiser={"name": "SGD"}))


def other_cluster(folder: Folder) -> None:
    folder.cluster(3)


def uncovered(folder: Folder) -> None:
    plan = folder.read("plan.json")
    plan["replicas"][0]["stages"][1]["layers"] = [5, 6]
    folder.write("plan.json", plan)


def other_batch(folder: Folder) -> None:
    folder.job(train=train(global_batch=16))


def wrong_sum(folder: Folder) -> None:
    folder.write("plan.json", change(folder.read("plan.json"), global_batch=13))


def type_not_measured(folder: Folder) -> None:
    cluster = yaml.safe_load((folder.path / "cluster.yaml").read_text())
    cluster["device_types"]["gpu"] = {"memory": "1 GiB"}
    cluster["nodes"].append({"name": "n2", "devices": {"gpu": 1}})
    folder.write("cluster.yaml", cluster)


def no_links(folder: Folder) -> None:
    cluster = yaml.safe_load((folder.path / "cluster.yaml").read_text())
    del cluster["link"]
    folder.write("cluster.yaml", cluster)


def cluster_is_a_list(folder: Folder) -> None:
    folder.write("cluster.yaml", [1, 2])


def empty_profile(folder: Folder) -> None:
    (folder.path / "profile.json").write_text("")


def no_plan(folder: Folder) -> None:
    (folder.path / "plan.json").unlink()


def unknown_type_in_cluster(folder: Folder) -> None:
    cluster = yaml.safe_load((folder.path / "cluster.yaml").read_text())
    cluster["nodes"][0]["devices"] = {"cpuu": 2}
    folder.write("cluster.yaml", cluster)


def other_model(folder: Folder) -> None:
    folder.plan(model="gpt")


WRONG = [
    (wrong_key, "top level: unknown key 'trian'; did you mean 'train'?"),
    (wrong_key_inside, "train: unknown key 'optimiser'; did you mean 'optimizer'?"),
    (
        other_cluster,
        "it was made for another cluster: the cluster has no device 'n1/0'; did you mean 'n0/0'?",
    ),
    (uncovered, "stage 1 has layers [5, 6), expected a range that starts at 4 and is not empty"),
    (other_batch, "its global batch is 12, but 16 is asked for (train.global_batch or --global-batch)"),
    (wrong_sum, "the micro-batches of all replicas sum to 12 samples, but global_batch is 13"),
    (type_not_measured, "the profile of 'mlp' has no measurement of device type 'gpu'"),
    (cluster_is_a_list, "cluster.yaml: expected a mapping with the key 'format', found a list"),
    (empty_profile, "profile.json is not valid JSON"),
    (no_plan, "cannot read plan.json: No such file or directory"),
    (unknown_type_in_cluster, "node 'n0': unknown device type 'cpuu'; did you mean 'cpu'?"),
    (other_model, "it is for model 'gpt', the profile for 'mlp'"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG, ids=[spoil.__name__ for spoil, _ in WRONG])
def test_train_with_wrong_files_ends_with_2_before_any_rank_starts(
    run: Command,
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Folder], None],
    message: str,
) -> None:
    spoil(folder)
    monkeypatch.setattr("hetpipe.training.start.start_ranks", lambda *_: pytest.fail("ranks were started"))
    found = run("train", "job.yaml")
    assert (found.code, found.out) == (2, "")
    assert message in found.err
    assert found.err.startswith("error: ")
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "nowhere.yaml"), "cannot read nowhere.yaml: No such file or directory"),
        (("train", "."), "cannot read .: Is a directory"),
        (("profile", "plan.json"), "plan.json: "),
        (("train", "job.yaml", "--set", "train.steps"), "write key=value, for example train.steps=50"),
        (("train", "job.yaml", "--plan", "other.json"), "cannot read other.json: No such file or directory"),
        (("train", "cluster.yaml"), "its format is 'hetpipe.cluster/1', expected 'hetpipe.job/1'"),
        (
            ("plan", *PLANNING, "--global-batch", "12", "--partitioner", "evn"),
            "unknown partitioner 'evn'; did you mean 'even'?",
        ),
        (("plan", *PLANNING, "--global-batch", "12", "--csv", "x.csv"), "--csv and --plans are for fronts: plan over all"),
        (
            ("plan", "--profile", "job.yaml", "--cluster", "cluster.yaml", "--global-batch", "1"),
            "expected 'hetpipe.profile/1'",
        ),
        (("simulate", "--plan", "profile.json", *PLANNING), "expected 'hetpipe.plan/1'"),
        (("show", "nowhere.json"), "cannot read nowhere.json: No such file or directory"),
        (("show", "plan.json", "-o", "plan.jpeg"), "plan.jpeg"),
        (("profile", "job.yaml", "-o", "job.yaml/profile.json"), "cannot write profile.json into the folder job.yaml: Not"),
        (
            ("plan", *PLANNING, "--global-batch", "12", "-o", "job.yaml/x/plan.json"),
            "cannot write plan.json into the folder job.yaml/x: Not a directory",
        ),
        (
            ("schema", "plans"),
            "unknown format 'plans'; did you mean 'plan'? known: cluster, profile, plan, job",
        ),
    ],
)
def test_wrong_arguments_end_with_2(
    run: Command, folder: Folder, arguments: tuple[str, ...], message: str
) -> None:
    found = run(*arguments)
    assert (found.code, found.out) == (2, "")
    assert message in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", *PLANNING), "--global-batch"),
        (("plan", *PLANNING, "--global-batch", "0"), "--global-batch"),
        (("plan", *PLANNING, "--global-batch", "12", "--schedule", "zb"), "zb"),
        (("trian", "job.yaml"), "No such command 'trian'"),
        (("train",), "Missing argument"),
    ],
)
def test_wrong_usage_ends_with_2(
    run: Command, folder: Folder, arguments: tuple[str, ...], message: str
) -> None:
    found = run(*arguments)
    assert (found.code, found.out) == (2, "")
    assert message in found.err


def test_several_nodes_of_gpus_need_torchrun(
    run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine, local rank 0 of each node would get the same GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = run("train", "job.yaml")
    assert found.code == 2
    assert (
        "real devices on the nodes ['n0', 'n1'], and this is one machine: start the command under torchrun"
        in found.err
    )


def test_a_plan_for_another_cluster_or_without_links_cannot_be_simulated(
    run: Command, folder: Folder
) -> None:
    no_links(folder)
    found = run("simulate", "--plan", "plan.json", *PLANNING)
    assert found.code == 2
    assert "no link is known inside node 'n0'" in found.err
    folder.cluster(3)
    found = run("simulate", "--plan", "plan.json", *PLANNING)
    assert found.code == 2
    assert "the cluster has no device 'n1/0'" in found.err


def test_no_plan_that_fits_ends_with_3(run: Command, folder: Folder) -> None:
    folder.cluster(2, 1, memory="1 KiB")
    found = run("plan", *PLANNING, "--global-batch", 12)
    assert (found.code, found.out) == (3, "")
    assert "error: " in found.err
    assert "Traceback" not in found.err
    price = run("plan", *PLANNING, "--global-batch", 12, "--max-price-per-hour", 0.1)
    assert price.code == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x"), 2),
        (PartitionError("x"), 3),
        (OSError("disk full"), 1),
        (RankFailure("x", None), 1),
        (RankFailure("x", Report(rank=0, time=0.0, error="x", code=2)), 2),
        (RankFailure("x", Report(rank=0, time=0.0, error="x", code=3)), 3),
        (RankFailure("x", Report(rank=0, time=0.0, error="x")), 1),
        (RunStopped(signal.SIGTERM, 17), 143),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_anything_else_ends_with_1_the_line_that_raised_it_and_the_message(
    run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of us all")

    monkeypatch.setattr("hetpipe.training.start.run_everywhere", broken)
    found = run("train", "job.yaml")
    assert found.code == 1
    line, message = found.err.splitlines()[-2:]
    assert 'test_cli.py:' in line
    assert 'in broken: raise ZeroDivisionError("of us all")' in line
    assert line.endswith("(HETPIPE_LOG=debug shows the whole traceback)")
    assert message == "error: ZeroDivisionError: of us all"
    assert "Traceback" not in found.err
    monkeypatch.setenv("HETPIPE_LOG", "debug")
    assert "Traceback" in run("train", "job.yaml").err


def test_ctrl_c_ends_with_130_and_no_traceback(
    run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetpipe.training.start.run_everywhere", interrupted)
    found = run("train", "job.yaml")
    assert found.code == 130
    assert "Traceback" not in found.err


def test_profile_then_train_as_a_new_user_types_them(run: Command, folder: Folder) -> None:
    """With real ranks: measure, train by a plan of what was measured, then go wrong in the ways that only ranks can see."""
    folder.cluster(2, slowdown=1.5)
    measuring = {"microbatch_sizes": [2], "repeats": 1, "cache": "cache"}
    folder.job(profile=None, plan=None, profiler=measuring, train=train(steps=3))
    table = run("profile", "job.yaml", "-o", "measured.json")
    assert table.code == 0
    assert table.out.endswith("profile written to measured.json\n")
    assert "block2" in table.out
    printed = run("profile", "job.yaml", "-o", "measured.json", "--json")
    assert Profile.parse(json.loads(printed.out), "printed") == Profile.load("measured.json")
    assert [m.device_type for m in Profile.load("measured.json").measurements] == ["cpu"]

    use = ("train", "job.yaml", "--set", "profile=measured.json")
    summary = json.loads(run(*use, "--json").out)
    assert (summary["steps"], len(summary["losses"])) == (3, 3)
    assert summary["losses"] == folder.read("log/summary.json")["losses"]
    shown = run(*use, "--plan", "log/plan.json")
    assert (shown.code, "test accuracy" in shown.out, "busy" in shown.out) == (0, True, True)
    assert f"metrics.jsonl, trace.json and summary.json are in {folder.path}/log\n" in shown.out

    def wrong(code: int, message: str, *settings: str) -> None:
        said = run(*use, *(part for setting in settings for part in ("--set", setting)))
        assert (said.code, said.out) == (code, "")
        assert said.err.rpartition("error: ")[2].startswith(message)
        assert "Traceback" not in said.err

    wrong(2, "unknown model 'mlpp'; did you mean 'mlp'?", "model.name=mlpp")
    wrong(
        2,
        "data 'cifar10': cifar10: cannot read the folder nowhere: No such",
        "data={name: cifar10, args: {folder: nowhere}}",
    )
    wrong(2, "cannot write into the folder job.yaml: Not a directory", "log.folder=job.yaml")
    folder.cluster(2, memory="1 KiB")
    wrong(3, "no plan fits the memory of the cluster: layer 1 ('block0') alone needs 35.89 KiB on a 'cpu'")


def test_the_installed_command_finds_a_user_s_module_in_the_current_folder(folder: Folder) -> None:
    """A console script's sys.path begins with its own folder, not with the current one."""
    (folder.path / "mynet.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Linear(8, 4))\n"
    )
    once = {"microbatch_sizes": [1], "repeats": 1, "cache": "cache"}
    folder.job(
        model={"target": "mynet:build"}, cluster=None, profile=None, plan=None, log=None, profiler=once
    )
    script = folder.path / "bin" / "hetpipe"
    script.parent.mkdir()
    script.write_text("from hetpipe.cli.commands import main\nif __name__ == '__main__':\n    main()\n")
    mark = str(folder.path)
    found = finish(start([str(script), "train", "job.yaml", "--json"], folder.path, mark), folder.path, mark)
    assert found.code == 0, found.err
    assert len(json.loads(found.out)["losses"]) == 7
