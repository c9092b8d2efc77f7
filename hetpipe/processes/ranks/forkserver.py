"""A process that imports once what all ranks need, and forks them.

Everything goes over one socket that only the starting process and the server hold: nothing is made in a folder and nothing
listens. Its end is the end of all: when the starting process is gone, the server kills its ranks and ends; when the server is
gone, each rank ends itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hetpipe.processes.ranks.forkserver import serve; serve()"
_LENGTH, _EXIT = struct.Struct("<q"), struct.Struct("<qq")  # of a request; (process, how `waitpid` says it ended, or −1: started)
_STARTED = -1
# torch's notes on multiprocessing: the server counts GPUs without CUDA, which, once begun, cannot be used in a forked process
_UNTOUCHED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
PRINTED = (1, 2)  # where a process prints: standard output, standard error


class Forkserver:
    """The server as the starting process sees it. It begins to import `preload` at once; what fails is left to the ranks."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._exits: list[tuple[int, int]] = []
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # in the server: Ctrl-C is for this process
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno()), *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **_UNTOUCHED},
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def fork(self, program: Callable[..., NoReturn], arguments: Sequence[Any], pipe: Connection) -> int:
        """Run `program(*arguments, pipe)`, which ends its process, in a new one, which prints where this one does; that one's
        number. ChildProcessError if the server is gone."""
        request = pickle.dumps((program, tuple(arguments)))
        try:
            socket.send_fds(self._socket, [_LENGTH.pack(len(request))], [pipe.fileno(), *PRINTED])
            self._socket.sendall(request)
            while True:
                process, status = self._read()
                if status == _STARTED:
                    return process
                self._exits.append((process, status))
        except (BrokenPipeError, ConnectionResetError, EOFError):
            self._finish()
            raise ChildProcessError(f"the server of ranks (process {self._process.pid}) is gone") from None
        except BaseException:  # Ctrl-C in the midst: what was asked for is half said, or not answered
            self._finish()
            raise

    def fileno(self) -> int:
        """To wait for: readable when a process has ended, or the server."""
        return self._socket.fileno()

    def ended(self) -> list[tuple[int, int]]:
        """(process, exit code; −n: by signal n) of those that ended since the last call. EOFError if the server is gone."""
        while _readable(self._socket):
            self._exits.append(self._read())
        found = [(process, os.waitstatus_to_exitcode(status)) for process, status in self._exits if status != _STARTED]
        self._exits.clear()
        return found

    def _read(self) -> tuple[int, int]:
        content = _receive(self._socket, _EXIT.size)
        if content is None:
            self._finish()
            raise EOFError
        process, status = _EXIT.unpack(content)
        return process, status

    @property
    def is_alive(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """End it at once, whatever it still imports, and with it its ranks."""
        self._finish()
        self._socket.close()

    def _finish(self) -> None:
        """It is no longer alive: a process that was killed closes its end of the socket a moment before it counts as ended."""
        self._process.kill()
        self._process.wait()


def _readable(channel: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(0))


def _receive(channel: socket.socket, size: int) -> bytes | None:
    """So many bytes; None where the other end is gone."""
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(size - len(parts))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def serve() -> NoReturn:
    """The server's program; its arguments are the socket, and what to import."""
    channel, preload = socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]
    sys.argv[1:] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in preload:
        with contextlib.suppress(Exception):  # a rank that needs it says why it cannot be had
            import_module(name)
    gc.freeze()  # what is here is never garbage: ranks need not look at it, and so share its memory
    _Server(channel).run()


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.children: set[int] = set()
        self.alive, self.life = os.pipe()  # `life` is held by the server only: its end is seen at `alive`
        self.woken, waker = socket.socketpair()
        self.own = [self.woken, waker]
        for end in self.own:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)

    def run(self) -> NoReturn:
        selector = selectors.DefaultSelector()
        for each in (self.channel, self.woken):
            selector.register(each, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self.woken in ready:
                    self.woken.recv(4096)
                    self.reap()
                if self.channel in ready and not self.start():
                    break
        for child in self.children:  # whoever started them is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os._exit(0)

    def reap(self) -> None:
        """Tell who has ended."""
        while self.children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            self.children.discard(child)
            self.channel.sendall(_EXIT.pack(child, status))

    def start(self) -> bool:
        """Fork a process as the next request says; False where there will be no more."""
        header, descriptors, _, _ = socket.recv_fds(self.channel, _LENGTH.size, 1 + len(PRINTED))
        request = _receive(self.channel, *_LENGTH.unpack(header)) if len(header) == _LENGTH.size else None
        if request is None or not descriptors:
            return False
        child = os.fork()
        if child == 0:
            self.become(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.children.add(child)
        self.channel.sendall(_EXIT.pack(child, _STARTED))
        return True

    def become(self, request: bytes, pipe: int, *printed: int) -> NoReturn:
        """This process is the new one."""
        for given, own in zip(printed, PRINTED, strict=True):
            os.dup2(given, own)
            os.close(given)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.channel.close()
        for end in self.own:
            end.close()
        os.close(self.life)
        threading.Thread(target=_end_with, args=(self.alive,), daemon=True).start()
        try:
            program, arguments = pickle.loads(request)
            program(*arguments, Connection(pipe, readable=False))
        finally:
            os._exit(1)  # a program ends its process itself


def _end_with(server: int) -> None:
    with contextlib.suppress(OSError):
        os.read(server, 1)
    os._exit(1)
