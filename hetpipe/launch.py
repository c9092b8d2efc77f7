"""Starting ranks on one machine, and telling what went wrong first. Under torchrun the same rank program runs unchanged.

Ranks are forked from a server process that has imported torch once. The parent watches them: when one fails, it collects what all
report, ends every process, and raises a RankFailure about the first cause (a killed process, else the earliest error that is not
only the echo of a lost peer).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from hetpipe.cluster import Device
from hetpipe.formats import exit_code

_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed",
           "Connection refused", "recvValue failed", "Timed out waiting", "NCCL communicator was aborted",
           "remote process exited", "Software caused connection abort")  # fmt: skip
_WRAPPERS = ("failed to run forward:", "Failed to run stage backward:")
GRACE_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank says when it ends: its result, or its error, and the exit code that the error means."""

    rank: int
    time: float
    result: Any = None
    error: str | None = None
    kind: str = ""
    code: int = 1
    where: str = ""
    trace: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether the error only says that a peer is gone."""
        return self.error is not None and any(echo in self.error for echo in _ECHOES)


class RankFailure(RuntimeError):
    """A rank failed; the message names rank, stage and device. `report` (None if it ended without one) has the message
    alone, its kind, its exit code (which is that of this error) and its traceback."""

    def __init__(self, message: str, report: Report | None) -> None:
        super().__init__(message)
        self.report = report
        self.exit_code = report.code if report is not None else 1


# In a rank: says where it is ("rank 3, replica 0 stage 1, device n0/1, in 1F3") for its report; and the way to the launcher.
_where: Callable[[], str] | None = None
_parent: Connection | None = None


def describe_with(where: Callable[[], str] | None) -> None:
    """Say, from now on, where this rank is, in its error report."""
    global _where
    _where = where


def name_places(places: Mapping[str, str]) -> None:
    """Tell the launcher (if there is one) which stage each device holds, so that it can name the stage of a killed rank."""
    if _parent is not None:
        _send(_parent, dict(places))


def whereabouts(rank: int) -> str:
    """Where this rank is now."""
    return _where() if _where is not None else f"rank {rank}"


def _send(pipe: Connection, message: Report | dict[str, str]) -> None:
    pipe.send_bytes(
        pickle.dumps(message)
    )  # not pipe.send: torch would put tensors into shared memory that dies with the sender


def _child(
    program: Callable[..., Any],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    rank: int,
    pipe: Connection,
) -> None:
    global _parent
    _parent = pipe
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    os.environ.update(environment)
    _use_threads(int(environment["OMP_NUM_THREADS"]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # for programs that a rank may start
    code = 0
    try:
        result = program(*arguments)
        _send(pipe, Report(rank=rank, time=time.time(), result=result))
    except BaseException as error:
        root = root_cause(error)
        code = exit_code(root)
        message = str(root) if code != 1 else f"{type(root).__name__}: {root}"
        with contextlib.suppress(OSError):
            _send(pipe, Report(rank=rank, time=time.time(), error=message, kind=type(root).__name__, where=whereabouts(rank),
                               trace="".join(traceback.format_exception(error)), code=code))  # fmt: skip
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no destructors: a process group whose peers are gone would wait in them


def _use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)  # the variable alone comes too late: the server has imported torch


def _end_with_the_launcher() -> None:
    """A launcher that was killed cannot end its ranks: each ends itself."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os._exit(1)


def root_cause(error: BaseException) -> BaseException:
    """What a stage itself raised: torch's pipelining wraps it in a RuntimeError with a message full of tensor dumps."""
    while (
        type(error) is RuntimeError
        and error.__cause__ is not None
        and any(text in str(error) for text in _WRAPPERS)
    ):
        error = error.__cause__
    return error


def rank_environment(devices: Sequence[Device], rank: int, port: int) -> dict[str, str]:
    """What torchrun would set for this rank: each node of the cluster is an agent."""
    nodes = list(dict.fromkeys(d.node for d in devices))
    device = devices[rank]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(devices)),
        "LOCAL_RANK": str(sum(d.node == device.node for d in devices[:rank])),
        "GROUP_RANK": str(nodes.index(device.node)),
        "LOCAL_WORLD_SIZE": str(sum(d.node == device.node for d in devices)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def start_server(model: str | None = None) -> None:
    """Let the process from which ranks are forked begin to import what all of them need, with the named model; returns at once.
    Called before this process imports torch, both import at the same time. A server that is there stays as it is. Under
    torchrun, which has started the ranks, there is none."""
    if "RANK" in os.environ:
        return
    preload = ["hetpipe.runtime.engine", "hetpipe.start", "hetpipe.trainer"]
    preload += [f"hetpipe.models.{model}"] if model is not None else []
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    resource_tracker.ensure_running()  # first, since starting it ends the blocking of signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # in the server: Ctrl-C is for this process
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_server() -> None:
    """End it at once, whatever it still imports, so that nobody waits for what it might print; its ranks are gone."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # `_stop` would wait for its imports
    if server is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def start_ranks(
    program: Callable[..., Any], arguments: Sequence[Any], devices: Sequence[Device], model: str | None = None
) -> list[Any]:
    """Run `program(*arguments)` in one process for each of `devices` and return their results in rank order. `program` must be a
    module-level function; `model`: see `start_server`. RankFailure (after every process is gone) if one fails."""
    start_server(model)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], []
    for rank in range(len(devices)):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_child,
            args=(program, list(arguments), rank_environment(devices, rank, store.port), rank, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        return _Watch(processes, pipes, devices).run()
    finally:
        _end_all(processes)


class _Watch:
    """The parent's view of its ranks: what they reported, which are gone, and what stage each device holds."""

    def __init__(
        self, processes: Sequence[Any], pipes: Sequence[Connection], devices: Sequence[Device]
    ) -> None:
        self.processes, self.pipes, self.devices = processes, pipes, devices
        self.reports: dict[int, Report] = {}
        self.exit_codes: dict[int, int] = {}
        self.places: dict[str, str] = {}

    def run(self) -> list[Any]:
        """Wait for all results; RankFailure as soon as one rank fails and the others have had time to say why."""
        while len(self.exit_codes) < len(self.processes):
            self.collect(None)
            if self.failed():
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline and len(self.exit_codes) < len(self.processes):
                    self.collect(0.1)
                raise self.failure()
        return [self.reports[rank].result for rank in range(len(self.processes))]

    def collect(self, timeout: float | None) -> None:
        """Read what comes within `timeout` seconds (None: until something comes)."""
        waiting: list[Any] = [
            p.sentinel for rank, p in enumerate(self.processes) if rank not in self.exit_codes
        ]
        waiting += [
            pipe
            for rank, pipe in enumerate(self.pipes)
            if rank not in self.reports and rank not in self.exit_codes
        ]
        ready = wait(waiting, timeout)
        for rank, (process, pipe) in enumerate(zip(self.processes, self.pipes, strict=True)):
            if pipe in ready or process.sentinel in ready:
                self._read(rank, pipe)
            if process.sentinel in ready:
                process.join()
                self.exit_codes[rank] = process.exitcode

    def _read(self, rank: int, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while rank not in self.reports and pipe.poll():
                message = pickle.loads(pipe.recv_bytes())
                if isinstance(message, Report):
                    self.reports[rank] = message
                else:
                    self.places.update(message)

    def failed(self) -> bool:
        """Whether a rank has reported an error, or ended without a word."""
        return any(r.error is not None for r in self.reports.values()) or any(
            rank not in self.reports for rank in self.exit_codes
        )

    def failure(self) -> RankFailure:
        """The first cause: a silent death, else the earliest error that is not an echo."""
        silent = [rank for rank in sorted(self.exit_codes) if rank not in self.reports]
        if silent:
            rank, code = silent[0], self.exit_codes[silent[0]]
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code} and no message"
            )
            hint = (
                " (the system kills processes like this when memory runs out)"
                if code == -signal.SIGKILL
                else ""
            )
            return RankFailure(f"rank {rank}, {self._place(rank)} {how}{hint}", None)
        first = min(
            (r for r in self.reports.values() if r.error is not None), key=lambda r: (r.is_echo, r.time)
        )
        where = first.where if "device" in first.where else f"{first.where}, {self._place(first.rank)}"
        return RankFailure(f"{where}: {first.error}", first)

    def _place(self, rank: int) -> str:
        device = self.devices[rank].id
        return f"{self.places[device]}, device {device}" if device in self.places else f"device {device}"


def _end_all(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + 2.0
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
