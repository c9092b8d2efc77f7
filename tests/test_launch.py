"""Starting ranks, and telling what went wrong first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from importlib.machinery import ModuleSpec
from multiprocessing import Pipe
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from hetpipe.processes.pulse import PeerLostError
from hetpipe.processes.ranks import forkserver, launch
from hetpipe.processes.ranks.forkserver import Forkserver
from hetpipe.processes.ranks.launch import _store, end_server, rank_environment, start_ranks, start_server
from hetpipe.processes.ranks.report import RankFailure, report_of, with_cause
from hetpipe.processes.stopping import RunError
from tests.support.programs import (
    be_deaf,
    environment_of_rank,
    freeze,
    give_what_cannot_be_sent,
    held_back,
    kill_the_server,
    large_result,
    misbehave,
    stumble_in_training,
    wait_for_pids,
)
from tests.support.ranks import cluster_of, run_ranks


def alive(folder: Path) -> list[int]:
    """The ranks whose processes still run."""
    found = []
    for file in folder.glob("*.pid"):
        stat = Path(f"/proc/{file.read_text()}/stat")
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(file.stem))
        except OSError:
            continue
    return found


def failure_of(folder: Path, program: Any, *arguments: Any, ranks: int, wait: float = 60.0) -> RankFailure:
    """The failure that a program comes to, after which none of its processes is left. All within `wait` seconds of its start."""
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        program(*arguments)
    while alive(folder) and time.monotonic() - began < wait:
        time.sleep(0.05)
    assert len(list(folder.glob("*.pid"))) == ranks
    assert alive(folder) == []
    assert time.monotonic() - began < wait
    return caught.value


def test_results_come_in_rank_order_with_torchruns_environment() -> None:
    cluster = cluster_of(2, 1)
    assert start_ranks(environment_of_rank, ("x",), cluster.devices) == [
        # rank, of, local rank, agent, ranks of the agent
        (0, 3, 0, 0, 2, "x"),
        (1, 3, 1, 0, 2, "x"),
        (2, 3, 0, 1, 1, "x"),
    ]
    assert rank_environment(cluster.devices, 2, 1234)["MASTER_PORT"] == "1234"


def test_the_server_of_ranks_never_begins_cuda_by_counting_gpus_and_ranks_count_them_as_ever() -> None:
    """What tests/test_gpu.py shows on a card: CUDA that has begun in the server cannot be used in what is forked from it."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    assert start_ranks(os.getenv, (name,), cluster_of(1).devices) == [os.environ.get(name)]
    assert launch._server is not None
    held = Path(f"/proc/{launch._server._process.pid}/environ").read_bytes().split(b"\0")
    assert f"{name}=1".encode() in held


def test_the_server_of_ranks_is_spared_ctrl_c_and_this_process_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = signal.pthread_sigmask(signal.SIG_BLOCK, []), list[set[int]]()

    def fail(*_: object, **__: object) -> None:
        seen.append({*signal.pthread_sigmask(signal.SIG_BLOCK, [])})
        raise OSError("no more processes")

    end_server()
    monkeypatch.setattr("subprocess.Popen", fail)
    with pytest.raises(OSError, match="no more processes"):
        start_server()
    assert seen == [{*before, signal.SIGINT}]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    monkeypatch.setenv("RANK", "0")
    start_server()  # torchrun has started the ranks
    assert len(seen) == 1


def test_the_server_of_ranks_ends_at_once_while_it_imports_and_leaves_nothing(tmp_path: Path) -> None:
    """Also where the process that started it is killed. (torch makes an empty folder for its compiler, and leaves it.)"""
    code = (
        "import os, signal, sys; from hetpipe.processes.ranks import launch; "
        "launch.start_server(); launch.end_server(); launch.start_server(); "
        "print(launch._server._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    surroundings = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, env=surroundings)
    assert run.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while Path(f"/proc/{int(run.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(run.stdout)}").exists()
    left = [path for path in tmp_path.rglob("*") if not path.name.startswith("torchinductor_")]
    assert left == []


def test_what_starts_ranks_is_spared_their_imports() -> None:
    late = {"hetpipe.training.trainer", "torch.distributed.pipelining", "numba"}
    code = f"import sys, hetpipe.training.start; print(*{late} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True).stdout == b"\n"


def test_the_store_of_the_ranks_listens_on_this_machine_only() -> None:
    before = {*_listening()}
    store = _store()
    (found,) = {*_listening()} - before
    assert found == ("0100007F", store.port)  # 127.0.0.1, as /proc writes it


def _listening() -> list[tuple[str, int]]:
    """(address, port) on which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return [(row[1].split(":")[0], int(row[1].split(":")[1], 16)) for row in listening]


def test_ranks_that_were_started_are_ended_if_a_later_one_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = Forkserver.fork, list[int]()

    def fails(server: Forkserver, *given: Any) -> int:
        if len(started) == 2:
            wait_for_pids(str(tmp_path), 2)
            raise OSError("no more processes")
        started.append(fork(server, *given))
        return started[-1]

    monkeypatch.setattr(Forkserver, "fork", fails)
    with pytest.raises(OSError, match="no more processes"):
        start_ranks(misbehave, (str(tmp_path), "raise"), cluster_of(3).devices)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert alive(tmp_path) == []


def test_ctrl_c_while_a_rank_is_started_ends_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's answer, which nobody had waited for, was then read as the end of a process: "invalid wait status: -1"."""
    read, heard = Forkserver._read, list[int]()

    def interrupted(server: Forkserver) -> tuple[int, int]:
        heard.append(0)
        if len(heard) == 3:
            wait_for_pids(str(tmp_path), 3)
            raise KeyboardInterrupt
        return read(server)

    end_server()
    monkeypatch.setattr(Forkserver, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_ranks(misbehave, (str(tmp_path), "raise"), cluster_of(3).devices)
    deadline = time.monotonic() + 60
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(tmp_path) == []
    assert start_ranks(large_result, (), cluster_of(1).devices)  # by another server


def test_the_server_of_ranks_is_missed(tmp_path: Path) -> None:
    """Killed, it takes its ranks with it. What they have saved is still known."""
    end_server()
    failure = failure_of(tmp_path, run_ranks, kill_the_server, cluster_of(3), str(tmp_path), ranks=3)
    assert str(failure) == "the process that holds the ranks was killed, and they with it"
    assert failure.resume == "step 40, saved/step-00000040"


def test_a_server_that_hangs_up_counts_as_gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed closes its socket a moment before it can be waited for, in which another start took it for alive."""
    monkeypatch.setattr(forkserver, "_START", "import os, sys, time; os.close(int(sys.argv[2])); time.sleep(600)")
    server, (_, pipe) = Forkserver([]), Pipe(duplex=False)
    with pytest.raises(ChildProcessError, match="the server of ranks .* is gone"):
        server.fork(os._exit, (0,), pipe)
    assert not server.is_alive
    server.end()


def test_a_program_of_the_module_that_is_run_is_found_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m bench.demo.run` trains by a function of its own, which ranks looked for in their own `__main__`."""
    run = ModuleType("__main__")
    run.__spec__ = ModuleSpec("tests.test_launch", None)
    program = FunctionType(large_result.__code__, large_result.__globals__)
    program.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", run)
    assert len(start_ranks(program, (), cluster_of(1).devices)) == 1


def test_ranks_need_not_look_for_garbage_in_what_the_server_has_imported() -> None:
    """A look at all of it took each rank a third of a second, and a copy of the memory that it shares with the others."""
    frozen, looked_at = start_ranks(held_back, (), cluster_of(1).devices)[0]
    assert frozen > 10 * looked_at


def test_a_large_result_outlives_its_rank() -> None:
    found = start_ranks(large_result, (), cluster_of(2).devices)
    assert [float(t.mean()) for t in found] == [0.0, 1.0]
    assert all(t.shape == (1 << 18,) for t in found)


@pytest.mark.parametrize(
    ("how", "message", "code"),
    [
        ("raise", "rank 1, device n0/1: KeyError: 'no such thing'", 1),
        ("input", "rank 1, device n0/1: line 3 of the file is not a number", 2),
        ("wrapped", "rank 1, device n0/1: OutOfMemoryError: out of memory on rank 1", 1),
        ("kill", "rank 1, device n0/1 was killed by SIGKILL (the system kills processes like this when memory runs out)", None),
        ("exit", "rank 1, device n0/1 ended with exit code 7 and no message", None),
    ],
)
def test_the_first_cause_is_told_and_all_are_ended(tmp_path: Path, how: str, message: str, code: int | None) -> None:
    """The other ranks hang."""
    failure = failure_of(tmp_path, start_ranks, misbehave, (str(tmp_path), how), cluster_of(3).devices, ranks=3)
    assert str(failure) == message
    assert (failure.report.code if failure.report is not None else None) == code


def test_ranks_that_do_not_heed_sigterm_are_ended(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, start_ranks, be_deaf, (str(tmp_path),), cluster_of(3).devices, ranks=3)
    assert str(failure) == "rank 0, device n0/0: ValueError: the others do not listen"


def test_a_result_that_cannot_be_sent_is_an_error(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, start_ranks, give_what_cannot_be_sent, (str(tmp_path),), cluster_of(3).devices, ranks=3)
    assert str(failure).startswith("rank 1, device n0/1: ")
    assert "give_what_cannot_be_sent.<locals>.<lambda>" in str(failure)


def test_a_layer_that_raises_in_training(tmp_path: Path) -> None:
    """The peers lose their connections and say so; that is not the cause."""
    failure = failure_of(tmp_path, run_ranks, stumble_in_training, cluster_of(3, 1), str(tmp_path), "raise", ranks=4)
    assert str(failure) == "rank 1, replica 0 stage 1, device n0/1, in 1F2 of step 1: ValueError: this layer has had enough"
    assert failure.report is not None
    assert "in forward" in failure.report.trace


def test_a_rank_that_is_killed_in_training(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, run_ranks, stumble_in_training, cluster_of(3, 1), str(tmp_path), "kill", ranks=4)
    assert str(failure).startswith("rank 1, replica 0 stage 1, device n0/1 was killed by SIGKILL")
    assert "; last heard of at " in str(failure)


def test_a_rank_that_stands_still_while_others_may_wait_for_long_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a checkpoint is written or loaded: they waited for up to an hour."""
    monkeypatch.setattr(launch, "step_timeout", lambda: timedelta(seconds=2.5))
    failure = failure_of(tmp_path, run_ranks, freeze, cluster_of(2, 1), str(tmp_path), ranks=3)
    assert re.fullmatch(
        r"rank 1, replica 0 stage 1 has given no sign of life for 5 s \(twice HETPIPE_TIMEOUT_SECONDS\): its process stands "
        r"still; last heard of at \d\d:\d\d:\d\d, in its sleep",
        str(failure),
    )
    assert failure.resume == "step 7"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:3456"), ""),
        (torch.distributed.DistBackendError("[../gloo/pair.cc] Connection reset by peer"), ""),
        (RuntimeError("[gloo/transport/tcp/pair.cc:456] Application timeout caused pair closure"), ""),
        (PeerLostError("rank 1 on host b is gone"), "rank 1 on host b is gone"),
        (ValueError("this layer has had enough"), None),
        (ConnectionResetError("Connection reset by peer"), None),  # of the server that has the data
        (RunError("cannot write the checkpoint: OSError: Connection timed out"), None),  # of the file server
    ],
)
def test_what_only_says_that_another_rank_is_gone_is_told_from_what_is_ones_own(error: Exception, cause: str | None) -> None:
    report = with_cause(report_of(error, 2), error)
    assert report.cause == cause
    assert report.last_words == ((None, cause) if cause is not None else (report.error, None))
    if cause:
        assert (report.error, report.where, report.line) == (cause, "", "")


def test_ranks_leave_no_trace_in_this_process() -> None:
    assert not torch.distributed.is_initialized()
    assert "RANK" not in os.environ


def test_an_error_of_a_megabyte_is_clipped() -> None:
    """A layer's, a loss's: in the error, in the line of code, and in each line of a traceback."""
    try:
        raise KeyError("z" * 10**6)
    except KeyError as error:
        report = report_of(error, 0)
    assert report.error is not None
    assert len(report.error) == 1_000
    assert report.error.startswith("KeyError: 'zzz")
    assert max(map(len, report.trace.splitlines())) == 1_000
    assert "test_launch.py" in report.line
