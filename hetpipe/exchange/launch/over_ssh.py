"""All hosts at once, over ssh: their output, and their end."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from hetpipe.exchange.launch.hosts import Host
from hetpipe.files.messages import InputError, reason, shown
from hetpipe.processes.stopping import RunError

END_SECONDS = 60.0  # for a step and a checkpoint, from when a host is told to end until its ssh is killed
LAST_LINES_SECONDS = 2.0  # from the end of a process until nothing more is read of it
UNREACHABLE = 255  # ssh's own exit code


class HostFailedError(RunError):
    """A host ended with an exit code that is not 0, which is then the command's own."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(frozen=True)
class _Running:
    host: Host
    process: subprocess.Popen[str]
    said: SimpleQueue[tuple[_Running, str | None]]  # lines, and None when it has ended

    def follow(self) -> None:
        """Pass on what it prints."""
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while it is read
            for text in self.process.stdout:
                self.said.put((self, text))

    def await_end(self) -> None:
        """Say when it has ended, behind its last line. A process that it leaves behind may hold its output open for longer."""
        reader = Thread(target=self.follow, daemon=True)
        reader.start()
        self.process.wait()
        reader.join(LAST_LINES_SECONDS)
        self.said.put((self, None))

    def tell_to_end(self) -> None:
        """Close its standard input, which its host watches."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def run_over_ssh(hosts: Sequence[Host], ssh: Sequence[str], write: Callable[[str], object]) -> None:
    """Start all hosts and wait for all. If one fails, or this process is told to stop, the others are told to end. Each line that
    a host prints is given to `write` behind the name of its node. HostFailedError for the first that failed."""
    said: SimpleQueue[tuple[_Running, str | None]] = SimpleQueue()
    running: list[_Running] = []
    failed: HostFailedError | None = None
    try:
        for host in hosts:
            running.append(_Running(host, _start(host, ssh), said))
            Thread(target=running[-1].await_end, daemon=True).start()
        while running and failed is None:
            failed = _heard(running, write, said.get())
    finally:
        _end(running, write, said)
    if failed is not None:
        raise failed


def _start(host: Host, ssh: Sequence[str]) -> subprocess.Popen[str]:
    """ssh of one host. It is in a session of its own, so that Ctrl-C reaches this process alone, which ends hosts in order."""
    words = [*ssh, host.address, shlex.join(["sh", "-c", watched(host)])]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            words,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(f"cannot start {shown(shlex.join(ssh))} (--ssh) for node {shown(host.node)}: {reason(error)}") from None


def watched(host: Host) -> str:
    """A script that runs the host's line, and sends it SIGTERM when standard input ends: if the connection is gone, nothing else
    would end it."""
    return (
        f"cd {shlex.quote(host.folder)} || exit; exec 3<&0; {host.line} </dev/null 3<&- & job=$!; "
        '{ read -r line <&3; kill -TERM "$job"; } >/dev/null 2>&1 & watch=$!; exec 3<&-; '
        'wait "$job"; code=$?; kill "$watch" 2>/dev/null; exit "$code"'
    )


def _heard(left: list[_Running], write: Callable[[str], object], news: tuple[_Running, str | None]) -> HostFailedError | None:
    """Pass a line on, or take a host that has ended out of those that are left; its failure, if it is one."""
    each, text = news
    if text is not None:
        write(f"{each.host.node}: {text.rstrip()}\n")
        return None
    left.remove(each)
    code = each.process.wait()
    each.tell_to_end()
    if code == 0:
        return None
    code = code if code > 0 else 128 - code
    others = f"; the other {'nodes were' if len(left) > 1 else 'node was'} told to end" if left else ""
    hint = f" (ssh's own code if it cannot reach {each.host.address})" if code == UNREACHABLE else ""
    return HostFailedError(f"node {shown(each.host.node)} ended with exit code {code}{hint}{others}", code)


def _end(left: list[_Running], write: Callable[[str], object], said: SimpleQueue[tuple[_Running, str | None]]) -> None:
    """Tell these to end, pass on what they still print, and end their ssh if they take too long."""
    for each in left:
        each.tell_to_end()
    deadline = time.monotonic() + END_SECONDS
    try:
        while left and (rest := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                _heard(left, write, said.get(timeout=rest))
    finally:  # also if Ctrl-C is pressed again
        for each in left:
            each.process.kill()
