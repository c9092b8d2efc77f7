"""Running commands as a user does: in a process of their own, under `hetpipe` or torchrun, with every child watched."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MARK = "HETPIPE_TEST_RUN"  # in the environment of a command and of all it starts
THREADS_LEFT = "threads left at exit"  # what tests/support/at_exit says where a script that ended well may abort


class Said(NamedTuple):
    """How a command ended that ran in this process, and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


class Ended(NamedTuple):
    """How a command ended; `leftover` are processes of it that are still there."""

    code: int
    out: str
    err: str
    seconds: float
    leftover: list[int]

    @property
    def last(self) -> str:
        """The last thing printed."""
        return [line for line in self.err.splitlines() if line.strip()][-1]


def environment(mark: str, step_seconds: float = 20) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COLUMNS")}
    return kept | {
        MARK: mark,
        "HETPIPE_TIMEOUT_SECONDS": str(step_seconds),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support" / "at_exit")]),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def processes(mark: str) -> list[int]:
    """Live processes that a command started with this mark, itself included."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            content, state = ((folder / "environ").read_bytes(), (folder / "stat").read_text().rsplit(")", 1)[1].split()[0])
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in content.split(b"\0") and state != "Z":
            found.append(int(folder.name))
    return sorted(found)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Ctrl-C and SIGTERM do afterwards what they did before: a command that ended in this process leaves them ignored, and
    whatever is started later would ignore them, too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(
    arguments: Sequence[str], folder: Path, mark: str, name: str = "command", step_seconds: float = 20
) -> subprocess.Popen[bytes]:
    """Start `python arguments…` in a folder; what it prints goes to name.out and name.err there. It heeds Ctrl-C and SIGTERM, as
    a command that is typed does, also where this process ignores them: started in the background, or after a command that
    ended in it."""
    with signals_kept():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return _start(arguments, folder, name, environment(mark, step_seconds))


def _start(arguments: Sequence[str], folder: Path, name: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=variables, stdout=out, stderr=err)


def finish(process: subprocess.Popen[bytes], folder: Path, mark: str, name: str = "command", timeout: float = 180) -> Ended:
    """Wait for the end, and up to 10 s more for its children's."""
    began = time.monotonic()
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired as late:
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        late.add_note(f"its signals: {[line for line in status if line.startswith(('Sig', 'Shd'))]}")
        late.add_note(f"it had printed:\n{(folder / f'{name}.err').read_text(errors='replace')}")
        raise
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while (leftover := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in leftover:
        os.kill(pid, signal.SIGKILL)
    out, err = ((folder / f"{name}.{end}").read_text(errors="replace") for end in ("out", "err"))
    return Ended(code, out, err, time.monotonic() - began, leftover)


def hetpipe(*arguments: str, folder: Path, timeout: float = 180, step_seconds: float = 20) -> Ended:
    """`python -m hetpipe arguments…` from start to end; `step_seconds`: how long its ranks wait for each other in a step."""
    mark = str(folder)
    process = start(["-m", "hetpipe", *arguments], folder, mark, step_seconds=step_seconds)
    return finish(process, folder, mark, timeout=timeout)


def agents(
    counts: Sequence[int],
    arguments: Sequence[str],
    folder: Path,
    mark: str,
    *,
    program: Sequence[str] = ("-m", "hetpipe"),
    c10d: bool = False,
    restarts: int = 0,
) -> list[subprocess.Popen[bytes]]:
    """One torchrun agent a node, with that many processes each, running `-m hetpipe arguments…` (or another program), which
    meet at a fixed address, or by the c10d rendezvous."""
    port, started = free_port(), []
    for i, count in enumerate(counts):
        place = [f"--node-rank={i}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        if c10d:
            place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--local-addr=127.0.0.1"]
        options = [f"--nnodes={len(counts)}", f"--nproc-per-node={count}", f"--max-restarts={restarts}", *place]
        words = ["-m", "torch.distributed.run", *options, *program, *arguments]
        started.append(start(words, folder, mark, f"agent{i}"))
    return started
