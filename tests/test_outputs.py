"""What commands write and print: where a file cannot be written is said before the work; messages fit a screen."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hetpipe.documents.plan import Plan
from hetpipe.documents.sections.log import LOG_FILES
from hetpipe.files.folders import claimed
from hetpipe.files.messages import InputError
from hetpipe.files.writing import append_line, write_text
from hetpipe.planning.planner import make_plan
from tests.support.commands import Command, environment
from tests.support.jobs import PLANNING, Folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", *PLANNING, "--global-batch", "12", "-o"),
        ("plan", *PLANNING, "--global-batch", "12", "--pareto", "--csv"),
        ("simulate", "--plan", "plan.json", *PLANNING, "--trace"),
        ("profile", "job.yaml", "-o"),
        ("export", "plan.json", "--to", "torchrun", "-o"),
        ("import", "sailor", ".", "--model", "x", "-o"),
        ("import", "sailor", ".", "--model", "x", "--cluster-output"),
        ("convert", "fastspeed", "plan.json", "-o"),
        ("convert", "llamafactory", "plan.json", "-o"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1]}",
)
def test_an_output_that_cannot_be_written_is_said_before_the_work(
    run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def work(*_: object, **__: object) -> None:
        pytest.fail("it worked first")

    places = (
        "planning.planner.make_plan",
        "cli.front.make_front",
        "predict.simulator.simulate",
        "training.start.profile_everywhere",
        "exchange.export.export",
        "exchange.importers.import_published",
        "cli.convert.fastspeed.convert",
        "cli.convert.trainers.convert",
    )
    modules = [import_module(f"hetpipe.{place.rpartition('.')[0]}") for place in places]  # all before any is changed
    for module, place in zip(modules, places, strict=True):
        monkeypatch.setattr(module, place.rpartition(".")[2], work)
    (folder.path / "there").mkdir()
    before = sorted(folder.path.rglob("*"))
    for name in (".", "there", "job.yaml/x", "x" * 300, "/dev/null"):
        found = run(*arguments, name)
        assert (found.code, found.out) == (2, "")
        assert found.err.startswith("error: cannot write ")
        assert sorted(folder.path.rglob("*")) == before


@pytest.mark.parametrize("name", [*LOG_FILES, ".lock", ".run.json"])
def test_a_folder_in_place_of_a_file_of_the_log(run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those that a run writes at its end, too, are known before anything starts."""
    monkeypatch.setattr("hetpipe.training.start.start_ranks", lambda *_: pytest.fail("ranks were started"))
    (folder.path / "log" / name).mkdir(parents=True)
    if name in LOG_FILES:
        found = run("train", "job.yaml")
        assert (found.code, found.out) == (2, "")
        assert found.err == f"error: cannot write {folder.path}/log/{name}: it is a folder; name a file in it\n"
    else:
        with pytest.raises(InputError, match=f"cannot write log/{name}: it is a folder"), claimed({"log.folder": "log"}):
            pytest.fail("claimed")


def test_a_file_in_place_of_the_log_folder(run: Command, folder: Folder) -> None:
    folder.job(log={"folder": "plan.json/log"})
    found = run("train", "job.yaml")
    assert (found.code, found.err) == (2, "error: cannot write into the folder plan.json/log: Not a directory\n")


FULL = "No space left on device, .* are free there; free some, or name another folder"


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To those who know of disks only, as an OSError."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(InputError, match=f"^cannot write {tmp_path}/metrics.jsonl: {FULL}$"):
        append_line(tmp_path / "metrics.jsonl", "{}")
    (tmp_path / "part").touch()
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: (os.open("/dev/full", os.O_WRONLY), str(tmp_path / "part")))
    monkeypatch.setattr("hetpipe.files.writing.check_output", lambda _: None)
    with pytest.raises(OSError, match=f"^cannot write {tmp_path}/summary.json: {FULL}$") as caught:
        write_text(tmp_path / "summary.json", "{}")
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), InputError), "ranks tell it each other"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def ended(folder: Folder, *arguments: str, closed: tuple[int, ...] = (), out: Any = subprocess.DEVNULL) -> tuple[int, str]:
    """A command with these streams closed: its exit code, and what it wrote to standard error."""

    def close() -> None:
        for number in closed:
            os.close(number)

    command = [sys.executable, "-m", "hetpipe", *arguments]
    done = subprocess.run(
        command,
        cwd=folder.path,
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=close,
        env=environment(str(folder.path)),
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("closed", [(2,), (1,), (0, 1, 2)])
def test_closed_streams_are_no_fault(folder: Folder, closed: tuple[int, ...]) -> None:
    """`2>&-` ended every command with 1."""
    assert ended(folder, "show", "plan.json", "-o", "plan.svg", closed=closed)[0] == 0
    assert (folder.path / "plan.svg").read_text().startswith("<svg")
    assert ended(folder, "show", "nowhere.json", closed=closed)[0] == 2


def test_closed_streams_are_open_in_ranks_too(folder: Folder) -> None:
    """Else a socket between ranks is what a library prints into."""
    code = (
        "import os, subprocess, sys; from hetpipe.cli.exits import _open_streams; _open_streams(); "
        "sys.exit(subprocess.call([sys.executable, '-c', 'import os; [os.fstat(i) for i in range(3)]']))"
    )
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: os.closerange(0, 3), check=False)
    assert done.returncode == 0


def test_results_that_nobody_can_read(folder: Folder) -> None:
    with open("/dev/full", "w") as full:
        code, said = ended(folder, "show", "plan.json", out=full)
        assert (code, said) == (1, "error: cannot write to standard output: No space left on device\n")
    for arguments in (("show", "plan.json"), ("show", "plan.json", "--json"), ("export", "plan.json", "--to", "torchrun")):
        reading, writing = os.pipe()
        os.close(reading)
        assert ended(folder, *arguments, out=writing) == (128 + signal.SIGPIPE, "")
        os.close(writing)


def test_a_current_folder_that_is_gone(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    found = run("plan", *PLANNING, "--global-batch", 12)
    assert (found.code, found.out) == (2, "")
    assert found.err == "error: the current folder has been deleted. Change into one that exists (cd)\n"


def test_a_picture_of_a_plan_is_drawn_by_show(run: Command, folder: Folder) -> None:
    """`plan -o plan.svg` wrote JSON into it."""
    found = run("plan", *PLANNING, "--global-batch", 12, "-o", "plan.svg")
    assert found.code == 2
    assert found.err == "error: cannot write plan.svg: a plan is written as .json. To draw it, use 'hetpipe show'\n"
    assert not (folder.path / "plan.svg").exists()


@pytest.mark.parametrize("partitioner", ["auto", "exhaustive"])
def test_ctrl_c_while_planning_writes_the_plan_in_hand(
    run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch, partitioner: str
) -> None:
    """Enumeration has none after no time."""

    def interrupted(*arguments: Any, **options: Any) -> Plan:
        signal.raise_signal(signal.SIGINT)
        return make_plan(*arguments, **options)

    monkeypatch.setattr("hetpipe.planning.planner.make_plan", interrupted)
    found = run("plan", *PLANNING, "--global-batch", 12, "--partitioner", partitioner, "-o", "found.json")
    assert found.code == 130
    assert (folder.path / "found.json").exists() == (partitioner == "auto")
    if partitioner == "auto":
        assert "note: the search was stopped. This is the best plan that it had found\n" in found.err
        assert "12 samples a step" in found.out
        assert Plan.load("found.json").global_batch == 12


@pytest.mark.parametrize("section", ["log", "checkpoint"])
def test_a_folder_of_a_job_that_cannot_be_written_is_said_before_ranks_start(
    run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setattr("hetpipe.training.start.start_ranks", lambda *_: pytest.fail("ranks were started"))
    found = run("train", "job.yaml", "--set", f"{section}.folder=job.yaml/x")
    assert (found.code, found.err) == (2, "error: cannot write into the folder job.yaml/x: Not a directory\n")
    for name in ('"a\\0b"', '"a\\ud800b"', '""', "x" * 2_000):
        found = run("train", "job.yaml", "--set", f"{section}.folder={name}")
        assert (found.code, found.out) == (2, "")
        assert len(found.err) < 500


def test_numbers_of_plan_are_finite_and_positive(run: Command, folder: Folder) -> None:
    for option, value, message in (
        ("--global-batch", "1" + "0" * 30, "1048576"),
        ("--deadline-seconds-per-step", "nan", "greater than or equal to 0"),
        ("--deadline-seconds-per-step", "1e400", "deadline_seconds_per_step must be a positive number, got inf"),
        ("--max-price-per-hour", "nan", "greater than or equal to 0"),
        ("--time-limit", "-1", "time_limit_seconds must be a positive number, got -1.0"),
        ("--time-limit", "nan", "time_limit_seconds must be a positive number, got nan"),
    ):
        found = run("plan", *PLANNING, "--global-batch", "12", option, value)
        assert (found.code, found.out) == (2, "")
        assert message in found.err


def test_a_message_has_ten_lines_whoever_wrote_it(run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InputError("first\n" + "x" * 10**6 + "\ny" * 10**5)

    monkeypatch.setattr("hetpipe.training.start.run_everywhere", refuse)
    found = run("train", "job.yaml")
    begun, unsaved, *lines = found.err.splitlines()
    assert found.code == 2
    assert begun.startswith("job.yaml: ")
    assert unsaved.startswith(
        "this job has no section 'checkpoint', so nothing will be saved. To save, write checkpoint: {folder: "
    )
    assert (len(lines), lines[0], lines[-1]) == (10, "error: first", "… and 99993 more lines")
    assert len(lines[1]) == 1_000
