"""One rank fails: every process is gone within 10 s; the last thing printed is the first cause, with rank, stage and device."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Ended, agents, finish, hetpipe, processes, start
from tests.support.jobs import Folder, train

SECOND = "rank 1, replica 0 stage 1, device n0/1"  # where layer 3 of `failing` is
AGAIN = r"nothing is saved so far \(a job's checkpoint section says where and when\); start it again: hetpipe train job.yaml"
PROMPT = 60  # seconds: a few on an idle machine; a rank that is merely waited for is missed after 120
PIPELINE_AND_ONE = [{"cuts": [3, 3], "sizes": [3, 3, 2]}, {"cuts": [6], "sizes": [2, 2]}]
FAIL_AT = 4  # its forward at which it fails: in the second step (three micro-batches a step)


def failing_job(path: Path, how: str, **sections: Any) -> Folder:
    folder = Folder(path)
    model = {"target": "tests.support.user_parts:failing", "args": {"how": how, "step": FAIL_AT}}
    folder.ready(rows=PIPELINE_AND_ONE, **{"model": model, "train": train(steps=500), **sections})
    return folder


def gone(ended: Ended, seconds_since_failure: float) -> None:
    assert ended.leftover == []
    assert seconds_since_failure < PROMPT


def failed_at(folder: Folder) -> float:
    """When the failing layer wrote that it fails (its clock is ours)."""
    return float((folder.path / "failed_at").read_text())


def run_until_it_fails(folder: Folder) -> Ended:
    mark = str(folder.path)
    ended = finish(start(["-m", "hetpipe", "train", "job.yaml"], folder.path, mark), folder.path, mark)
    seconds = time.time() - failed_at(folder)
    print(f"all processes were gone {seconds:.1f} s after the failure")
    gone(ended, seconds)
    return ended


def test_a_rank_that_raises(tmp_path: Path) -> None:
    ended = run_until_it_fails(failing_job(tmp_path, "raise"))
    assert ended.code == 1
    message = "ArithmeticError: this layer divides by the number of its friends"
    assert re.fullmatch(rf"error: {SECOND}, in 1F\d of step 2: {message}; {AGAIN}", ended.last)
    line = ended.err.splitlines()[-2]  # the user's own
    assert "user_parts.py:" in line
    assert ': raise ArithmeticError("this layer divides' in line
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) < 20


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    ended = run_until_it_fails(failing_job(tmp_path, "kill"))
    assert ended.code == 1
    assert re.fullmatch(
        rf"error: {SECOND} was killed by SIGKILL \(the system kills processes like this when memory runs out\); "
        rf"last heard of at \d\d:\d\d:\d\d, in [^;]+; {AGAIN}",
        ended.last,
    )
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) < 20


def test_a_rank_whose_samples_do_not_come_is_named_and_not_those_that_wait_for_it(tmp_path: Path) -> None:
    """They came late from a server that is gone; what rank 0 saw was that nothing came of rank 1."""
    folder = Folder(tmp_path)
    data = {"target": "tests.support.user_parts:stuck", "args": {"call": 28}}  # in its second step
    folder.ready(rows=PIPELINE_AND_ONE, data=data, train=train(steps=500), checkpoint={"folder": "saved", "every_steps": 1})
    ended = hetpipe("train", "job.yaml", folder=tmp_path, step_seconds=8)
    assert (ended.code, ended.leftover) == (1, [])
    assert re.fullmatch(
        rf"error: rank 1 on host {socket.gethostname()} \(replica 0 stage 1, device n0/1\) holds up the others: it has been in "
        r"fetching samples of step 2 for \d+ s \(.*\); start it again: hetpipe train job.yaml; "
        r"it resumes from step 1, saved/step-00000001",
        ended.last,
    )


def test_an_emulated_device_out_of_memory(tmp_path: Path) -> None:
    """80 KiB are enough for the parameters and gradients, not for AdamW's state beside them."""
    folder = Folder(tmp_path)
    folder.ready((2,), [{"cuts": [4, 2], "sizes": [4, 4, 4]}], slowdown=1.0, memory="80 KiB", train=train(steps=500))
    mark = str(tmp_path)
    ended = finish(start(["-m", "hetpipe", "train", "job.yaml"], tmp_path, mark), tmp_path, mark)
    assert (ended.code, ended.leftover) == (1, [])
    place = "rank 0, replica 0 stage 0, device n0/0"
    assert ended.last.startswith(
        f"error: out of memory on {place}, in optimizer of step 1: optimizer state needs 55376 bytes more"
    )
    assert (
        "of 81920 bytes (the device type's memory in the cluster file). plan.json is not changed. If plan.file is" in ended.last
    )
    assert "left out, this plan fits: cpu (n0/0) runs layers 0–2 of 6, cpu (n0/1) runs layers 3–5 of 6: 12 of 12" in ended.last


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=pytest.mark.thorough)])
def test_under_torchrun_all_processes_of_both_agents_are_gone(tmp_path: Path, how: str) -> None:
    folder = failing_job(tmp_path, how)
    mark = str(tmp_path)
    started = agents([2, 1], ["train", "job.yaml"], tmp_path, mark)
    try:
        for agent in started:
            assert agent.wait(100) != 0
        deadline = time.monotonic() + PROMPT
        while processes(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        seconds = time.time() - failed_at(folder)
        print(f"all processes were gone {seconds:.1f} s after the failure")
        assert processes(mark) == []
        assert seconds < PROMPT
    finally:
        for agent in started:
            agent.kill()
            agent.wait()
    gone = rf"error: rank 1 on host {socket.gethostname()} \(replica 0 stage 1, device n0/1\) is gone; last heard of at "
    again = r"; nothing is saved so far \(.*\); start the same torchrun command again on every host$"
    for number in (0, 1):
        said = (tmp_path / f"agent{number}.err").read_text()
        if how == "kill":
            assert re.search(gone + rf"[^;]*, in [^;]+{again}", said, re.MULTILINE)
        elif number == 0:
            assert re.search(rf"^error: {SECOND}, in 1F\d of step 2: ArithmeticError: this layer .*{again}", said, re.MULTILINE)
        else:
            other = gone.replace("is gone; last heard of at ", r"failed in .*: ArithmeticError: this layer divides")
            assert re.search(f"^{other}.*{again}", said, re.MULTILINE)


def train_until_it_stands(folder: Folder, mark: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a run; return when its failing layer hangs, with all its processes."""
    process = start(["-m", "hetpipe", "train", "job.yaml"], folder.path, mark)
    deadline = time.monotonic() + 60
    while not (folder.path / "failed_at").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    found = processes(mark)
    assert len(found) >= 4, "the parent and three ranks"
    return process, found


def said(folder: Folder) -> str:
    return (folder.path / "command.err").read_text()


@pytest.mark.parametrize(
    ("how", "code"),
    [pytest.param(signal.SIGINT, 130, id="Ctrl-C"), pytest.param(signal.SIGKILL, -9, id="SIGKILL", marks=pytest.mark.thorough)],
)
def test_ending_the_command_ends_its_ranks(tmp_path: Path, how: signal.Signals, code: int) -> None:
    """Ctrl-C, which a terminal sends, is answered; a killed command says nothing, but leaves nothing behind either."""
    folder = failing_job(tmp_path, "hang")
    process, _ = train_until_it_stands(folder, str(tmp_path))
    process.send_signal(how)
    if how == signal.SIGINT:  # once: after this step, which does not end
        deadline = time.monotonic() + PROMPT
        while "SIGINT: stopping after this step" not in said(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert said(folder).splitlines()[-1] == "SIGINT: stopping after this step; once more ends it at once"
        process.send_signal(how)
    ended = finish(process, tmp_path, str(tmp_path), timeout=PROMPT)
    assert (ended.code, ended.leftover) == (code, [])
    assert ended.seconds < PROMPT
    assert "Traceback" not in ended.err


def test_ctrl_c_while_everything_is_imported(tmp_path: Path) -> None:
    """A terminal sends it to the command and to all that it started."""
    folder, mark = failing_job(tmp_path, "hang"), str(tmp_path)
    process = start(["-m", "hetpipe", "train", "job.yaml"], folder.path, mark)
    deadline = time.monotonic() + 60
    while len(found := processes(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == 2, "the command and the server of ranks"
    time.sleep(0.5)
    for pid in found:
        os.kill(pid, signal.SIGINT)
    ended = finish(process, tmp_path, mark, timeout=PROMPT)
    assert ended.code in (130, -signal.SIGINT), "a shell says 130 of both"
    assert ended.leftover == []
    assert "Traceback" not in ended.err
