"""The commands: what they print and write, and how they end. In this process where no rank is started."""

from __future__ import annotations

import io
import json
import os
import signal
import sys

import pytest
import yaml

import hetpipe
from hetpipe.cli.exits import ending_words
from hetpipe.cli.terminal import nothing_else
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError, exit_code
from hetpipe.files.screen import Screen
from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.planning.partition import PartitionError
from hetpipe.predict.simulator import simulate
from hetpipe.processes.ranks.report import RankFailure, Report
from hetpipe.processes.stopping import RunStopped
from hetpipe.show.tables import step_table
from hetpipe.show.words import percent
from hetpipe.study.make import make_study
from tests.support.commands import Command, finish, start
from tests.support.jobs import PLANNING, Folder, train


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
    assert json.loads(run(*options, "--schedule", "gpipe", "--partitioner", "chain").out)["schedule"] == "gpipe"
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
        found["pipeline_seconds"] + found["gradient_sync_seconds"] + found["optimizer_seconds"]
    )
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


@pytest.mark.parametrize("name", ["cluster", "profile", "plan", "job", "catalogue", "front", "cards"])
def test_schema(run: Command, name: str) -> None:
    found = json.loads(run("schema", name).out)
    assert found["properties"]["format"]["const"] == f"hetpipe.{name}/1"


def test_help_names_every_command(run: Command) -> None:
    found = run("--help")
    assert found.code == 0
    assert all(name in found.out for name in ("profile", "plan", "simulate", "show", "train", "schema"))


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
    assert "test_cli.py:" in line
    assert 'in broken: raise ZeroDivisionError("of us all")' in line
    assert line.endswith("(HETPIPE_LOG=debug shows the whole traceback)")
    assert message == "error: ZeroDivisionError: of us all"
    assert "Traceback" not in found.err
    monkeypatch.setenv("HETPIPE_LOG", "debug")
    assert "Traceback" in run("train", "job.yaml").err


def test_ctrl_c_ends_with_130_and_no_traceback(run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
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
    table = run("profile", "job.yaml", "-o", "measured.json", "--share", "shared.json")
    assert table.code == 0
    assert table.out.endswith("profile written to measured.json\nprofile written to shared.json\n")
    shared = Profile.load("shared.json")
    assert (shared.model, set(shared.provenance) <= {"torch", "repeats", "relative_spread"}) == ("mlp", True)
    assert [layer.name for layer in shared.layers] == [str(i) for i in range(6)]
    assert "block2" in table.out
    printed = run("profile", "job.yaml", "-o", "measured.json", "--json")
    assert Profile.parse(json.loads(printed.out), "printed") == Profile.load("measured.json")
    assert [m.device_type for m in Profile.load("measured.json").measurements] == ["cpu"]

    use = ("train", "job.yaml", "--set", "profile=measured.json")
    summary = json.loads(run(*use, "--json").out)
    assert (summary["steps"], len(summary["losses"])) == (3, 3)
    assert summary["losses"] == folder.read("log/summary.json")["losses"]
    shown = run(*use, "--plan", "log/plan.json", "--verbose", "--set", "log=")
    assert (shown.code, "test accuracy" in shown.out, "busy" in shown.out) == (0, True, True)
    assert "this job has no section 'log', so its log goes to runs/job" in shown.err
    assert "in runs/job: report.html, loss.svg, plan.json, profile.json, metrics.jsonl, trace.json, summary.json\n" in shown.out

    def wrong(code: int, message: str, *settings: str) -> None:
        said = run(*use, *(part for setting in settings for part in ("--set", setting)))
        assert (said.code, said.out) == (code, "")
        assert said.err.rpartition("error: ")[2].startswith(message)
        assert "Traceback" not in said.err

    wrong(2, "unknown model 'mlpp'; did you mean 'mlp'?", "model.name=mlpp")
    wrong(2, "data 'cifar10': cifar10: cannot read the folder nowhere: No such", "data={name: cifar10, args: {folder: nowhere}}")
    wrong(2, "cannot write into the folder job.yaml: Not a directory", "log.folder=job.yaml")
    folder.cluster(2, memory="1 KiB")
    wrong(3, "no plan fits the memory of the cluster: layer 1 ('block0') alone needs 36624 bytes on a 'cpu'")


def test_the_installed_command_finds_a_user_s_module_in_the_current_folder(folder: Folder) -> None:
    """A console script's sys.path begins with its own folder, not with the current one."""
    (folder.path / "mynet.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Linear(8, 4))\n")
    once = {"microbatch_sizes": [1], "repeats": 1, "cache": "cache"}
    folder.job(model={"target": "mynet:build"}, cluster=None, profile=None, plan=None, log=None, profiler=once)
    script = folder.path / "bin" / "hetpipe"
    script.parent.mkdir()
    script.write_text("from hetpipe.cli.commands import main\nif __name__ == '__main__':\n    main()\n")
    mark = str(folder.path)
    found = finish(start([str(script), "train", "job.yaml", "--json"], folder.path, mark), folder.path, mark)
    assert found.code == 0, found.err
    assert len(json.loads(found.out)["losses"]) == 7


def test_beside_json_nothing_is_written_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where a library writes to the file itself, as gloo does in torch 2.8."""
    for wanted in (True, False):
        with nothing_else(wanted):
            os.write(1, b"connected\n")
        os.write(1, b"{}\n")
        found = capfd.readouterr()
        assert (found.out, found.err) == (("{}\n", "connected\n") if wanted else ("connected\n{}\n", ""))


def test_a_plan_that_does_not_fit_is_told_by_device(run: Command, folder: Folder) -> None:
    """It needed 156,480 times the memory, and `simulate` did not say so."""
    folder.cluster(2, 2, memory="1 B")
    options = ("--plan", "plan.json", *PLANNING)
    found = run("simulate", *options)
    assert found.code == 0
    peaks = simulate(Plan.load("plan.json"), Profile.load("profile.json"), Cluster.load("cluster.yaml")).peak_bytes
    worst, *others = sorted(peaks, key=lambda device: -peaks[device])
    for device in (worst, *others):
        text = f"warning: the plan does not fit into memory: {device} cpu needs {human_bytes(peaks[device])}, and has 1 B\n"
        assert text in found.err
    assert f"The plan does not fit into the memory of 3 devices: {worst} cpu needs {human_bytes(peaks[worst])}" in found.out
    assert "1 of 4 devices is unused (1 × cpu)" in found.out
    told = json.loads(run("simulate", *options, "--json").out)
    assert told["does_not_fit"] == {device: {"needs_bytes": peak, "has_bytes": 1} for device, peak in peaks.items()}
    assert told["unused_devices"] == ["n1/1"]
    assert len(told["warnings"]) == 3
    drawn = run("show", "plan.json", *PLANNING, "-o", "plan.svg")
    assert drawn.err.count("warning: the plan does not fit into memory: ") == 3
    assert "does not fit" in drawn.out
    assert "does not fit" in (folder.path / "plan.svg").read_text()
    folder.cluster(2, 1)
    assert json.loads(run("simulate", *options, "--json").out)["does_not_fit"] == {}


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_predicted_step_keeps_to_the_terminal(folder: Folder, columns: int) -> None:
    """Devices with long names, and all causes of idle time."""
    names = {"n0": "rack-12-host-034", "n1": "rack-12-host-035"}
    text = (folder.path / "plan.json").read_text()
    cluster = (folder.path / "cluster.yaml").read_text().replace("cpu", "nvidia-a100-80gb")
    profile = (folder.path / "profile.json").read_text().replace('"cpu"', '"nvidia-a100-80gb"')
    for old, new in names.items():
        text, cluster = text.replace(f"{old}/", f"{new}/"), cluster.replace(old, new)
    for name, content in (("plan.json", text), ("cluster.yaml", cluster), ("profile.json", profile)):
        (folder.path / name).write_text(content)
    known, machines = Profile.load("profile.json"), Cluster.load("cluster.yaml")
    found = make_study(Plan.load("plan.json"), profile=known, cluster=machines, rules=())
    out = io.StringIO()
    Screen(file=out, width=columns).print(step_table(found.scene))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= columns for line in lines)
    rows = [line for line in lines if line.startswith((" r0 s0", " r0 s1", " r1 s0"))]
    whole = " ".join(" ".join(line.split()) for line in lines)
    for device in ("rack-12-host-034/0", "rack-12-host-034/1", "rack-12-host-035/0"):
        assert device in whole, "a paragraph for each stage, where a line has no room"
    if columns >= 80:
        assert len(rows) == 3
        assert all("rack-12-host-03" in row and "nvidia-a100-80gb" in row and " %" in row for row in rows), "one line a stage"


def test_show_takes_the_log_folder_of_a_run(run: Command, folder: Folder) -> None:
    """With its plan and its profile; of other folders it says which file to give."""
    log = folder.path / "log"
    log.mkdir()
    for name in ("plan.json", "profile.json"):
        (folder.path / name).rename(log / name)
    whole = run("show", "log", "--cluster", "cluster.yaml")
    assert whole == run("show", "log/plan.json", *(word.replace("profile.json", "log/profile.json") for word in PLANNING))
    assert "F forward" in whole.out
    (folder.path / "saved" / "step-10").mkdir(parents=True)
    (folder.path / "empty").mkdir()
    (folder.path / "plans").mkdir()
    (folder.path / "plans" / "mine.json").touch()
    for name, hint in (
        ("saved", "it holds checkpoints; the plan of a run is in the folder log.folder of its job"),
        ("empty", "give a plan, which 'hetpipe plan -o plan.json' writes, and every run into the folder log.folder of its job"),
        ("plans", "give one of its files, such as plans/mine.json"),
    ):
        assert run("show", name) == (2, "", f"error: {name} is a folder without plan.json: {hint}\n")


def test_nodes_without_a_link_are_told(run: Command, folder: Folder) -> None:
    """The link between nodes was taken without a word; measured ones, and nodes of one device, need none."""
    text = (folder.path / "cluster.yaml").read_text()
    cluster = yaml.safe_load(text)
    del cluster["nodes"][0]["link"]
    folder.write("cluster.yaml", cluster)
    said = "note: n0 has several devices and no 'link', so what joins nodes (1 GB/s) is taken for what joins its devices"
    for arguments in (
        ("plan", *PLANNING, "--global-batch", 12),
        ("plan", *PLANNING, "--global-batch", 12, "--pareto"),
        ("simulate", "--plan", "plan.json", *PLANNING),
        ("show", "plan.json", *PLANNING),
    ):
        found = run(*arguments)
        assert (found.code, found.err.count(said)) == (0, 1), arguments
    profile = folder.read("profile.json")
    profile["links"] = [{"between": ["n0", "n0"], "bandwidth": 1e9}]
    folder.write("profile.json", profile)
    assert "no 'link'" not in run("simulate", "--plan", "plan.json", *PLANNING).err
    alone = {**cluster, "nodes": [{**cluster["nodes"][0], "devices": {"cpu": 3}}]}
    assert Cluster.parse(alone, "x").borrowed_links == "", "there is nothing else that a link could be for"
    many = {**cluster, "nodes": [{"name": f"m{i}", "devices": {"cpu": 1 + i % 2}} for i in range(12)]}
    assert Cluster.parse(many, "x").borrowed_links.startswith("m1, m3, m5 and 3 more nodes have several devices and no 'link'")


def test_wrong_input_in_the_midst_of_a_run_says_where_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that cannot be read, a full disk."""
    monkeypatch.setattr(sys, "argv", ["hetpipe", "train", "job.yaml"])
    report = Report(rank=1, time=0.0, error="sample 61 of Ends cannot be read", code=2)
    again = "start it again: hetpipe train job.yaml; it resumes from step 3"
    failure = RankFailure("rank 1: …", report, "step 3")
    assert ending_words(failure, report, 2) == f"sample 61 of Ends cannot be read; when that is fixed, {again}"
    assert ending_words(RankFailure("rank 1: …", report), report, 2) == "sample 61 of Ends cannot be read"
