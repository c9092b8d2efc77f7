"""Starting ranks on one machine, and telling what went wrong first. Under torchrun the same rank program runs unchanged.

Ranks are forked from a server process that has imported torch once (`forkserver`). The parent watches them: when one fails, it
collects what all report, ends every process, and raises a RankFailure about the first cause (a killed process, else the earliest
error that is not only the echo of a lost peer).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, NoReturn

from hetpipe.documents.cluster import Device
from hetpipe.processes import progress
from hetpipe.processes.environment import NODE, WITHOUT, launched, step_timeout
from hetpipe.processes.peers.beats import Beat, KeyValueStore, Silence, newest_resume, part_for_beats, read_beats, waited
from hetpipe.processes.progress import Activity, say
from hetpipe.processes.pulse import LAUNCHED, stop_pulse
from hetpipe.processes.ranks.forkserver import Forkserver
from hetpipe.processes.ranks.report import RankFailure, Report, report_of, with_cause
from hetpipe.processes.stopping import RunStopped, stop_if_told

GRACE_SECONDS = 1.5  # for all to say why they end
SIGN_SECONDS = 10.0  # without any sign of life, of which ranks give one a second: they stand still
CARDS = "CUDA_VISIBLE_DEVICES"
LOOK_SECONDS = 1.0  # a signal that comes just as a wait begins does not end it; what it asks for is done after the wait


class _Parent(NamedTuple):
    """What a rank takes over from the process that starts it, whenever the server was started."""

    environment: dict[str, str]
    folder: str
    path: list[str]


def _rank(program: bytes, like: _Parent, rank: int, pipe: Connection) -> NoReturn:
    """A rank's process, from its start to its end."""
    os.environ.clear()
    os.environ.update(like.environment)
    os.chdir(like.folder)
    sys.path[:] = like.path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # for programs that a rank may start
    try:
        _use_threads(int(os.environ["OMP_NUM_THREADS"]))
        display, run, arguments = pickle.loads(program)
        if display is not None:
            progress.show_with(display)
        report = Report(rank=rank, time=time.time(), result=run(*arguments))
        content = pickle.dumps(report)
    except BaseException as error:
        report = with_cause(report_of(error, rank), error)
        content = pickle.dumps(report)
    stop_pulse(*report.last_words)
    with contextlib.suppress(OSError):
        pipe.send_bytes(content)  # not pipe.send: torch would put tensors into shared memory that dies with the sender
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if report.error is None else 1)  # no destructors: a process group whose peers are gone would wait in them


def _use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)  # the variable alone comes too late: the server has imported torch


def rank_environment(devices: Sequence[Device], rank: int, port: int, without: Sequence[Device] = ()) -> dict[str, str]:
    """What torchrun would set for this rank: each node of the cluster is an agent. `without`: devices that have no rank."""
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
        LAUNCHED: "1",
        **(_left_out(devices, device, without) if without else {}),
    }


def _left_out(devices: Sequence[Device], device: Device, without: Sequence[Device]) -> dict[str, str]:
    """What a rank is told of devices that have none: numbers of nodes and devices are others without them."""
    own = [d.index for d in devices if d.node == device.node]
    return {NODE: device.node, WITHOUT: " ".join(d.id for d in without), CARDS: visible_cards(own)}


def visible_cards(kept: Sequence[int]) -> str:
    """What CUDA_VISIBLE_DEVICES is to be where, of those cards that it names, only these are to be seen."""
    named = os.environ.get(CARDS, "").split(",") if os.environ.get(CARDS) else []
    return ",".join(named[index] if index < len(named) else str(index) for index in kept)


class Rejoin(Exception):
    """All ranks have saved and ended, so that devices which had been lost can be tried once more."""


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The run can go on when devices are lost, as those `without` which it starts were; `join`: ranks are ended after their next
    checkpoint (Rejoin)."""

    without: Sequence[Device] = ()
    join: bool = False


_server: Forkserver | None = None


def start_server(modules: Sequence[str] = ()) -> None:
    """Let the process from which ranks are forked begin to import what all of them need, and these `modules`; returns at once.
    Called before this process imports torch, both import at the same time. A server that is there stays as it is. Under
    torchrun, which has started the ranks, there is none."""
    global _server
    if launched() or (_server is not None and _server.is_alive):
        return
    end_server()  # what is left of one that was killed
    preload = ["hetpipe.training.start", "hetpipe.training.trainer", "hetpipe.layers.ahead"]
    atexit.unregister(end_server)
    atexit.register(end_server)
    _server = Forkserver([*preload, *modules])


def end_server() -> None:
    """End it at once, whatever it still imports, so that nobody waits for what it might print; its ranks end with it."""
    global _server
    if _server is not None:
        _server.end()
        _server = None


def start_ranks(
    program: Callable[..., Any],
    arguments: Sequence[Any],
    devices: Sequence[Device],
    modules: Sequence[str] = (),
    elastic: Elastic | None = None,
) -> list[Any]:
    """Run `program(*arguments)` in one process for each of `devices` and return their results in rank order. `program` must be a
    module-level function of a module that can be imported; `modules`: see `start_server`. RankFailure (after every process is
    gone) if one fails; `elastic` gives the others time to keep what they hold. SIGTERM and Ctrl-C ask the ranks to stop; a second
    one ends them at once."""
    start_server(modules)
    assert _server is not None
    from hetpipe.processes.rendezvous import part_of_start  # it imports torch, as the server does meanwhile

    store = _store()
    content = pickle.dumps((progress.display, _importable(program), list(arguments)))
    beats = part_for_beats(part_of_start(store, len(devices), 1))
    watch = _Watch(_server, devices, beats, 2 * step_timeout().total_seconds(), elastic)
    try:
        with Activity("starting: importing torch in the process that holds the ranks"):  # the first fork waits for that
            for rank in range(len(devices)):
                mine, theirs = Pipe(duplex=False)
                watch.pipes.append(mine)
                own = rank_environment(devices, rank, store.port, elastic.without if elastic is not None else ())
                like = _Parent({**os.environ, **own}, os.getcwd(), sys.path)
                watch.processes.append(_server.fork(_rank, (content, like, rank), theirs))
                theirs.close()
        with _told_to_stop(watch.ask_to_stop):
            stop_if_told()
            return watch.run()
    finally:
        watch.end_all()


def _importable(program: Callable[..., Any]) -> Callable[..., Any]:
    """The same function where ranks find it: what `python -m` runs has a name beside `__main__`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if program.__module__ != "__main__" or spec is None:
        return program
    found: Callable[..., Any] = getattr(import_module(spec.name), program.__name__)
    return found


def _store() -> Any:
    """The store where ranks meet, which listens on this machine's own address only."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))


@contextmanager
def _told_to_stop(ask: Callable[[int], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C call `ask(signal)`."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    try:
        before = {kind: signal.signal(kind, lambda number, _: ask(number)) for kind in kinds}
    except ValueError:  # not the main thread: signals are somebody else's
        before = {}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class _Rejoining:
    """Looks for the first checkpoint since the ranks were started."""

    def __init__(self) -> None:
        self.asked, self._first, self._looked = False, "", 0.0

    def is_due(self, read: Callable[[], Mapping[int, Beat]]) -> bool:
        """Whether there is one, once."""
        now = time.monotonic()
        if self.asked or now - self._looked < LOOK_SECONDS:
            return False
        self._looked, found = now, newest_resume(read())
        self._first = self._first or found
        self.asked = bool(found) and found != self._first
        return self.asked


class _Watch:
    """The parent's view of its ranks: what they reported, and which are gone."""

    def __init__(
        self, server: Forkserver, devices: Sequence[Device], store: KeyValueStore, patience: float, elastic: Elastic | None
    ) -> None:
        self.server, self.devices, self.store = server, devices, store
        self.grace = GRACE_SECONDS if elastic is None else patience
        self.rejoin = _Rejoining() if elastic is not None and elastic.join else None
        self.silence = Silence(patience, max(LOOK_SECONDS, patience / 20))
        self.processes: list[int] = []
        self.pipes: list[Connection] = []
        self.reports: dict[int, Report] = {}
        self.exit_codes: dict[int, int] = {}
        self.asked: int | None = None  # by which signal the run was asked to stop

    def run(self) -> list[Any]:
        """Wait for all results; RankFailure as soon as one rank fails and the others have had time to say why."""
        while len(self.exit_codes) < len(self.processes):
            self.collect(LOOK_SECONDS)
            if silent := self.silence.look(self._living):
                resume = next((b.resume for b in silent if b.resume), "")
                raise RankFailure(self._frozen(silent[0]), None, resume, [self.devices[b.rank].id for b in silent])
            if self.rejoin is not None and self.rejoin.is_due(self._living):
                self._signal(signal.SIGTERM)
            if self.failed():
                self._let_end()
                raise self.failure()
        return [self.reports[rank].result for rank in range(len(self.processes))]

    def _let_end(self) -> None:
        """Wait until all ranks have ended, or have had the time for it: those that live and know their device may keep what they
        hold."""
        began, looked = time.monotonic(), time.monotonic()
        seconds = self.grace if self._have_met() else GRACE_SECONDS
        counts = {rank: beat.count for rank, beat in self._living().items()}
        while time.monotonic() < began + seconds and len(self.exit_codes) < len(self.processes):
            self.collect(0.1)
            if time.monotonic() > looked + SIGN_SECONDS:
                looked, living = time.monotonic(), {rank: beat.count for rank, beat in self._living().items()}
                if all(counts.get(rank) == count for rank, count in living.items()):
                    return
                counts = living

    def collect(self, timeout: float) -> None:
        """Read what comes within `timeout` seconds."""
        waiting: list[Any] = [self.server.fileno()]
        waiting += [p for rank, p in enumerate(self.pipes) if rank not in self.reports and rank not in self.exit_codes]
        ready = wait(waiting, timeout)
        try:
            ended: dict[int, int] = dict(self.server.ended()) if self.server.fileno() in ready else {}
        except EOFError:
            resume = newest_resume(self._beats())
            raise RankFailure("the process that holds the ranks was killed, and they with it", None, resume) from None
        for rank, (process, pipe) in enumerate(zip(self.processes, self.pipes, strict=True)):
            if pipe in ready or process in ended:
                self._read(rank, pipe)
            if process in ended:
                self.exit_codes[rank] = ended[process]

    def _read(self, rank: int, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            if rank not in self.reports and pipe.poll():
                self.reports[rank] = pickle.loads(pipe.recv_bytes())

    def ask_to_stop(self, number: int) -> None:
        """Tell all ranks to stop after the step in which they are; asked by the same signal again, end them."""
        if self.asked == number:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.asked = number
        say(f"{signal.Signals(number).name}: stopping after this step; once more ends it at once")
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.exit_codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def failed(self) -> bool:
        """Whether a rank has reported an error, or ended without a word."""
        return any(r.error is not None for r in self.reports.values()) or bool(self._silent())

    def _silent(self) -> list[int]:
        """Ranks that have ended without a word."""
        return [rank for rank in sorted(self.exit_codes) if rank not in self.reports]

    def failure(self) -> Exception | RunStopped:
        """The first cause: a stop that was asked for, a silent death, else the earliest error that is not an echo."""
        beats = self._beats()
        resume = newest_resume(beats)
        silent = self._silent()
        stopped = next((r.stopped for r in self.reports.values() if r.stopped is not None), None)
        if self.asked is not None and (stopped is not None or silent):
            if silent and (stopped is None or stopped.step is None):
                return RunStopped(self.asked, resume=resume, lost=self._death(silent[0], beats))
            return stopped.by(self.asked) if stopped is not None else RunStopped(self.asked, resume=resume)
        if self.rejoin is not None and self.rejoin.asked and stopped is not None and not silent:
            return Rejoin(resume)
        if silent:
            return RankFailure(self._death(silent[0], beats), None, resume, [self.devices[rank].id for rank in silent])
        first = min((r for r in self.reports.values() if r.error is not None), key=lambda r: (r.of_another, r.time))
        ended = {*self.reports, *self.exit_codes}
        frozen = [d.id for rank, d in enumerate(self.devices) if rank not in ended] if first.of_another else []
        if not first.where:
            return RankFailure(str(first.error), first, first.resume or resume, frozen)
        where = first.where if "device" in first.where else f"{first.where}, device {self.devices[first.rank].id}"
        return RankFailure(f"{where}: {first.error}", first, first.resume or resume, frozen)

    def _place(self, rank: int, beat: Beat | None) -> str:
        return f"rank {rank}, {beat.place if beat is not None and beat.place else f'device {self.devices[rank].id}'}"

    def _frozen(self, beat: Beat) -> str:
        return (
            f"{self._place(beat.rank, beat)} has given no sign of life for {self.silence.patience:g} s (twice "
            f"HETPIPE_TIMEOUT_SECONDS): its process stands still; {beat.last_seen}"
        )

    def _death(self, rank: int, beats: Mapping[int, Beat]) -> str:
        code, beat = self.exit_codes[rank], beats.get(rank)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no message"
        hint = " (the system kills processes like this when memory runs out)" if code == -signal.SIGKILL else ""
        seen = f"; {beat.last_seen}{waited([beat], beats)}" if beat is not None else ""
        return f"{self._place(rank, beat)} {how}{hint}{seen}"

    def _beats(self) -> dict[int, Beat]:
        with contextlib.suppress(RuntimeError):
            return read_beats(self.store, range(len(self.processes)))
        return {}

    def _have_met(self) -> bool:
        """Whether all ranks know which device is theirs: before that they have nothing to keep."""
        beats = self._beats()
        return len(beats) == len(self.processes) and all(beat.place for beat in beats.values())

    def _living(self) -> dict[int, Beat]:
        ended = {*self.reports, *self.exit_codes}
        return {rank: beat for rank, beat in self._beats().items() if rank not in ended}

    def end_all(self) -> None:
        """Every process is gone when this returns."""
        for pipe in self.pipes:
            pipe.close()
        for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
            self._signal(number)
            with contextlib.suppress(EOFError):
                self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.exit_codes) < len(self.processes) and time.monotonic() < deadline:
            wait([self.server.fileno()], max(0.0, deadline - time.monotonic()))
            ended = dict(self.server.ended())
            self.exit_codes |= {rank: ended[p] for rank, p in enumerate(self.processes) if p in ended}
