"""SIGTERM and Ctrl-C end a run after its step, saved, with the line that resumes it; the resumed run is the uninterrupted one."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.cli import exits
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.processes.stopping import RunStopped, StopRequest, forget_signals, heed_signals, importing, stop_if_told
from hetpipe.training.start import run_everywhere, train_rank
from tests.support.commands import agents, finish, processes, start
from tests.support.jobs import Folder, train

ENDLESS = train(steps=1_000_000, scheduler=None)


def job(path: Path, **sections: Any) -> Folder:
    folder = Folder(path)
    saved = {"folder": str(path / "saved"), "every_steps": 1000, "keep": 2}
    content: dict[str, Any] = {"train": ENDLESS, "checkpoint": saved, **sections}
    folder.ready(**content)
    return folder


def wait_for_steps(folder: Folder, lines: int = 3) -> None:
    """The run has written so many lines of metrics."""
    metrics, deadline = folder.path / "log/metrics.jsonl", time.monotonic() + 100
    while (not metrics.exists() or metrics.read_text().count("\n") < lines) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metrics.read_text().count("\n") >= lines


def stopped_at(folder: Folder) -> int:
    (saved,) = list_checkpoints(folder.path / "saved")
    return int(json.loads((saved / "trainer.json").read_text())["step"])


def check_resumed(folder: Folder, step: int) -> None:
    """Three steps more give what as many steps in one go give, bit for bit."""
    for name in ("saved", "whole"):
        settings = [f"train.steps={step + 3}", f"checkpoint.folder={folder.path / name}"]
        run_everywhere(Job.read(folder.path / "job.yaml", settings), train_rank)
    ours, theirs = (tensors_of(list_checkpoints(folder.path / name)[-1]) for name in ("saved", "whole"))
    assert ours.keys() == theirs.keys() != set()
    assert all(tensor.equal(theirs[key]) for key, tensor in ours.items())


def tensors_of(saved: Path) -> dict[str, Tensor]:
    """Which replica wrote which is open."""
    return {key: tensor for file in saved.glob("*.safetensors") for key, tensor in load_file(file).items()}


def test_sigterm_ends_a_run_after_its_step_saved(tmp_path: Path) -> None:
    folder = job(tmp_path)
    process = start(["-m", "hetpipe", "train", "job.yaml"], tmp_path, str(tmp_path))
    wait_for_steps(folder)
    process.send_signal(signal.SIGTERM)
    ended = finish(process, tmp_path, str(tmp_path), timeout=60)
    assert (ended.code, ended.leftover) == (143, [])
    step = stopped_at(folder)
    assert ended.err.splitlines()[-1] == (
        f"stopped by SIGTERM after step {step}; start it again: hetpipe train job.yaml; it resumes from step {step}, "
        f"{folder.path}/saved/step-{step:08d}"
    )
    assert "SIGTERM: stopping after this step; once more ends it at once" in ended.err
    assert "Traceback" not in ended.err
    check_resumed(folder, step)


@pytest.mark.thorough
def test_ctrl_c_without_checkpoints_says_that_nothing_is_saved(tmp_path: Path) -> None:
    folder = job(tmp_path, checkpoint=None)
    process = start(["-m", "hetpipe", "train", "job.yaml"], tmp_path, str(tmp_path))
    wait_for_steps(folder)
    process.send_signal(signal.SIGINT)
    ended = finish(process, tmp_path, str(tmp_path), timeout=60)
    assert (ended.code, ended.leftover) == (130, [])
    assert re.fullmatch(
        r"stopped by SIGINT after step \d+; nothing is saved so far \(a job's checkpoint section says where and when\); "
        r"start it again: hetpipe train job.yaml",
        ended.err.splitlines()[-1],
    )
    assert "Traceback" not in ended.err


@pytest.mark.thorough
@pytest.mark.slow
def test_torchruns_agent_stops_the_run_of_all(tmp_path: Path) -> None:
    """SIGTERM to one of two agents, as a scheduler sends it to one host."""
    folder = job(tmp_path)
    mark = str(tmp_path)
    started = agents([2, 1], ["train", "job.yaml"], tmp_path, mark)
    try:
        wait_for_steps(folder)
        started[1].send_signal(signal.SIGTERM)
        for agent in started:
            agent.wait(60)
        deadline = time.monotonic() + 60
        while processes(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes(mark) == []
    finally:
        for agent in started:
            agent.kill()
            agent.wait()
    step = stopped_at(folder)
    for number in (0, 1):
        said = (tmp_path / f"agent{number}.err").read_text()
        assert said.count(f"stopped by SIGTERM after step {step}; start the same torchrun command again on every host; ") == 1


ONCE_PYTHON_IS_UP = "import runpy; print('up', flush=True); runpy.run_module('hetpipe', run_name='__main__', alter_sys=True)"


def test_before_the_first_step_nothing_is_lost_and_nothing_stays(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM at any time while a run starts, once Python itself has: no traceback, no process."""
    folder = job(tmp_path)
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(3):
        how, after = draw.choice([signal.SIGINT, signal.SIGTERM]), draw.uniform(0.1, 2.0)
        process = start(["-c", ONCE_PYTHON_IS_UP, "train", "job.yaml"], tmp_path, str(tmp_path))
        while process.poll() is None and not (tmp_path / "command.out").read_bytes():
            time.sleep(0.01)
        time.sleep(after)
        process.send_signal(how)
        print(f"{how.name} after {after:.3f} s")
        ended = finish(process, tmp_path, str(tmp_path), timeout=60)
        assert (ended.code in (128 + how, -how), ended.leftover) == (True, []), (how, after, ended)
        assert "Traceback" not in ended.err or "hetpipe/" not in ended.err, (how, after, ended.err)
        assert ended.code < 0 or "stopped by " in ended.last, (how, after, ended.err)
    assert not list_checkpoints(folder.path / "saved")


def _as_another_error(number: int) -> None:
    try:
        os.kill(os.getpid(), number)
        time.sleep(1)
    except BaseException as error:
        raise RuntimeError("Error calling __set_name__") from error


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, RunStopped), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_somebody_swallows_is_not_lost(number: int, kind: type[BaseException]) -> None:
    """A module that was being imported had `except Exception`, or a destructor ran: the run went on as if nothing was said."""
    heed_signals()
    stop_if_told()
    with contextlib.suppress(kind):
        os.kill(os.getpid(), number)
        time.sleep(1)
    with pytest.raises(kind):
        stop_if_told()
    with pytest.raises(kind), StopRequest():
        raise AssertionError
    assert not issubclass(kind, Exception)
    with pytest.raises(SystemExit) as ended:
        exits.main(lambda: pytest.fail("as if nothing was said"))
    assert ended.value.code == 128 + number
    stop_if_told()  # that was done
    with pytest.raises(SystemExit) as ended:
        exits.main(lambda: _as_another_error(number))
    assert ended.value.code == 128 + number


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, RunStopped), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_waits_for_imports(number: int, kind: type[BaseException]) -> None:
    """torch's modules in C++ aborted the process: "terminate called after throwing 'pybind11::error_already_set'"."""
    done = list[str]()

    def told() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        done.append("imported")

    heed_signals()
    with pytest.raises(kind), importing():
        told()
    assert done == ["imported"]
    with pytest.raises(kind), importing():
        pytest.fail("it has been told to stop")
    forget_signals()


@pytest.mark.parametrize(("error", "words"), [(InputError("no such file"), "no such file"), (SystemExit(2), "exit code 2")])
def test_ranks_of_other_hosts_are_told_of_one_that_ends_before_they_met(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    """They waited for it for an hour."""
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    left, codes = list[str](), list[int]()
    monkeypatch.setattr("hetpipe.processes.rendezvous.leave_word", left.append)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(exits, "end_server", lambda: None)

    def run() -> None:
        raise error

    with pytest.raises(SystemExit):
        exits.main(run)
    assert (left, codes) == ([words], [2])


def test_a_stop_while_a_rank_is_lost_says_so_instead_of_a_step() -> None:
    stop = pickle.loads(
        pickle.dumps(RunStopped(signal.SIGTERM, None, "step 3, saved/step-00000003", "rank 1 was killed by SIGKILL"))
    )
    assert str(stop.by(signal.SIGINT)) == "stopped by SIGINT; rank 1 was killed by SIGKILL"
    assert str(RunStopped(signal.SIGTERM)) == "stopped by SIGTERM before the first step"
