"""Functions of numbers and arrays that numba compiles. Until one is compiled Python runs it, with the same results to the bit.

numba is imported, and a function compiled or read from disk, when that is worth it (`Compiled`), or when it is made ready. What
is compiled is kept on disk where a folder for it can be written to. A process beside this one may compile (`compile_beside`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial, update_wrapper, wraps
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import IO, Any, TypeVar, cast

import numpy as np

from hetpipe.processes.environment import cores

F = TypeVar("F", bound=Callable[..., Any])
on_disk: list[Any] = []  # compiled functions that numba keeps
BYTES_PER_SECOND = 1_800  # of the bytecode of a function and of all that it calls: how fast numba compiles it
READING_SECONDS = 1.0  # to import numba and to read the first function from disk
_IDLE: int | None = getattr(os, "SCHED_IDLE", None)  # how a process is scheduled that runs where a processor is idle
LOOK_SECONDS = 0.2  # between two looks for what a process beside has compiled
_forced: list[bool] = []  # whether numba runs all, or Python; the last entry counts
_beside: list[subprocess.Popen[bytes]] = []  # the process that compiles, if one was started
_left_idle: list[bool] = []  # whether it runs only where a processor is idle
_telling: list[bool] = []  # whether this is that process, which tells what it begins to compile
_told: list[str] = []  # what it has told
_choosing = threading.RLock()


class Compiled:
    """A function beside its compiled twin. Functions of this class that it calls are found among its globals, or in `parts`.

    Python runs it until that has taken as long as it takes to get the twin: to read it from disk, or to compile it, unless the
    process beside has begun to. So it takes at most twice as long as the better of both ways. The clock decides which one runs,
    and nothing else: both give the same."""

    def __init__(
        self, function: Callable[..., Any], *, inline: bool = False, parts: Mapping[str, Compiled] | None = None
    ) -> None:
        self.function, self.inline, self.parts = function, inline, parts or {}
        self.spent, self.expected = 0.0, 0.0  # seconds that Python took for it, and that the next call will take
        self._looked, self._there = 0.0, False  # when it was last looked for the twin, and whether that is loaded
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        if self._there if not _forced else _forced[-1]:
            if _telling and not self._there:
                print(self._name, flush=True)
            self._there = True
            return self._dispatcher(*arguments)
        if not _forced and self._is_worth_it():
            return self._first(arguments)
        began = time.thread_time()
        with np.errstate(all="ignore"):  # numba says nothing of infinite numbers
            found = self.by_python(*arguments)
        self.spent, self.expected = self.spent + time.thread_time() - began, 0.0
        return found

    def is_kept(self) -> bool:
        """Whether the twin can be read from disk."""
        return self.by_numba in on_disk and _is_kept(self.by_numba)

    @cached_property
    def compile_seconds(self) -> float:
        """About how long numba compiles it, by the length of its code."""
        return self._length() / BYTES_PER_SECOND

    @property
    def _name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def _length(self) -> int:
        return len(self.function.__code__.co_code) + sum(other._length() for other in self._called().values())

    def _is_worth_it(self) -> bool:
        """Whether to get the twin now."""
        total, now = self.spent + self.expected, time.monotonic()
        if total < (0.0 if "numba" in sys.modules else READING_SECONDS) or now < self._looked + LOOK_SECONDS > self.expected:
            return False
        while self.expected > self.compile_seconds and self._name in _begun() and not self.is_kept():
            time.sleep(LOOK_SECONDS / 4)
        self._looked = time.monotonic()
        return self.is_kept() or (total > self.compile_seconds and self._name not in _begun())

    def _first(self, arguments: tuple[Any, ...]) -> Any:
        """Call the twin, which is read or compiled by that."""
        found = list[Any]()
        with _choosing:
            get_ready(lambda: found.append(self.by_numba(*arguments)))
            self._there = True
        return found[0]

    @cached_property
    def by_python(self) -> Callable[..., Any]:
        """The function as Python runs it, and all that it calls."""
        return self._with({name: other.by_python for name, other in self._called().items()})

    @property
    def by_numba(self) -> Any:
        """numba's dispatcher of the function; it compiles, or reads from disk, when it is first called."""
        with _choosing:
            return self._dispatcher

    @cached_property
    def _dispatcher(self) -> Any:
        from numba import njit  # it takes long, which few tasks need

        own = self._with({name: other.by_numba for name, other in self._called().items()})
        if self.inline:
            return njit(inline="always", error_model="numpy")(own)
        compiler = partial(njit, nogil=True, error_model="numpy")
        try:
            on_disk.append(_plain(compiler(cache=True)(own)))
        except RuntimeError:  # numba found no folder that it can write to
            return _plain(compiler()(own))
        on_disk[-1]._cache._cache_file._source_stamp = sources()  # numba asks for the time of the function's own file only
        return on_disk[-1]

    def _called(self) -> dict[str, Compiled]:
        found = {**self.function.__globals__, **self.parts}
        return {name: found[name] for name in self.function.__code__.co_names if isinstance(found.get(name), Compiled)}

    def _with(self, names: Mapping[str, Any]) -> Callable[..., Any]:
        return FunctionType(self.function.__code__, {**self.function.__globals__, **names}, self.function.__name__)


def _plain(dispatcher: Any) -> Any:
    """The dispatcher, to which a number that stands in the calling code is one like any other. numba would compile the function
    once more for each such number, and while it infers the caller's types for each that a variable begins with."""
    from numba.core import types

    template, plain = dispatcher.get_call_template, cast(Any, types).unliteral
    dispatcher.get_call_template = lambda positional, named: template(
        tuple(map(plain, positional)), {name: plain(kind) for name, kind in named.items()}
    )
    return dispatcher


def compiled(function: F) -> F:
    """The function, which numba compiles where that is worth it."""
    return cast(F, Compiled(function))


def inlined(function: F) -> F:
    """The function, compiled as a part of those that call it."""
    return cast(F, Compiled(function, inline=True))


def twin(function: F, parts: Sequence[Callable[..., Any]]) -> F:
    """A twin of a function and of those that it calls, all of one module, which themselves stay plain Python."""
    known = dict[str, Compiled]()
    for part in parts:
        known[part.__name__] = Compiled(part, inline=True, parts=known)
    return cast(F, Compiled(function, parts=known))


@contextmanager
def left_to_python() -> Iterator[None]:
    """Let Python run all these functions in this process, and compile nothing."""
    with _forcing(False):
        yield


@contextmanager
def _forcing(numba: bool) -> Iterator[None]:
    _forced.append(numba)
    try:
        yield
    finally:
        _forced.pop()


def once(prepare: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `prepare` the first time, with all functions run by numba, which then go on to be."""
    done: list[bool] = []

    @wraps(prepare)
    def call() -> None:
        if not done:
            with _forcing(True):
                prepare()
            done.append(True)

    return call


@cache
def sources() -> str:
    """A digest of all files with compiled functions. What is kept is of no use once one has changed, as functions are compiled
    into those that call them."""
    partitioners = find_spec("hetpipe.partitioners")
    assert partitioners is not None
    folders = [Path(__file__).parent, *map(Path, partitioners.submodule_search_locations or ())]
    texts = [path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py"))]
    return sha256(b"".join(text for text in texts if b"hetpipe.predict.compiled" in text)).hexdigest()


def expect(function: Any, seconds: float) -> None:
    """Say how long Python will take for the next call of a compiled function, where one call may take longer than compiling."""
    function.expected = seconds


def are_kept(*functions: Any) -> bool:
    """Whether the twins of all these compiled functions can be read from disk."""
    return all(function.is_kept() for function in functions)


def compile_beside(*modules: str) -> None:
    """Start a process that compiles what these modules' `ready()` make ready, in their order, and keeps it. It ends with this
    process, or when `stop_compiling` says so. None is started beside another, where this process has one processor only, or where
    numba keeps nothing."""
    if _left_idle:
        stop_compiling()  # on a busy machine this process would wait for it
    if not is_compiling() and cores() > 1 and on_disk:
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        _beside[:] = [
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import make_ready; make_ready()", *modules],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        ]
        _told.clear()
        os.set_blocking(cast(IO[bytes], _beside[0].stdout).fileno(), False)


def make_ready() -> None:
    """What the process beside does: it makes ready the modules that its arguments name, while the other end of its input is
    open, which is that process's that started it."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _telling.append(True)
    for module in sys.argv[1:]:
        import_module(module).ready()
    os._exit(0)


def is_compiling() -> bool:
    """Whether a process beside this one is compiling."""
    return bool(_beside) and _beside[0].poll() is None


def _begun() -> list[str]:
    """The functions that the process beside has begun to compile; none when it is over."""
    if not is_compiling():
        return []
    _told.extend((cast(IO[bytes], _beside[0].stdout).read() or b"").decode().split())
    return _told


def stop_compiling(*, wait: bool = False) -> None:
    """End the process beside, or `wait` until it is done. What it has compiled is kept; what it left this process compiles."""
    for process in _beside:
        try:
            if wait:
                process.wait()
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                cast(IO[bytes], pipe).close()
    _beside.clear()
    _left_idle.clear()


def compile_when_idle() -> None:
    """Let the process beside continue whenever a processor is idle. (If it ended with the plan, each start would compile the
    same function from its beginning.)"""
    try:
        if is_compiling() and _IDLE is not None:
            os.sched_setscheduler(_beside[0].pid, _IDLE, os.sched_param(0))
            _left_idle.append(True)
            return
    except OSError:  # it has just ended, or the system does not let it
        pass
    stop_compiling()


def _is_kept(function: Any) -> bool:
    """Whether what numba's list says it keeps of a function is there. The list is written first."""
    file, names = function._cache._cache_file, _index(function).values()
    return bool(names) and all(os.path.exists(file._data_path(name)) for name in names)


def _index(function: Any) -> Mapping[Any, str]:
    """What numba keeps of a function; nothing where its list cannot be read."""
    try:
        found: Mapping[Any, str] = function._cache._cache_file._load_index()
    except Exception:
        found = {}
    return found


def get_ready(first_use: Callable[[], object]) -> None:
    """Call compiled functions a first time. What cannot be read from disk is compiled again."""
    try:
        first_use()
    except Exception:
        damaged = [function for function in on_disk if not _readable(function)]
        if not damaged:
            raise
        for function in damaged:
            function._cache.flush()
        first_use()


def _readable(function: Any) -> bool:
    """Whether numba can read what it keeps of a function. It unpickles the list of that before it compares the version of our
    file, so that a class that has been renamed since is an AttributeError; and a file may have been cut short."""
    file = function._cache._cache_file
    try:
        for key in file._load_index():
            file.load(key)
    except Exception:
        return False
    return True
