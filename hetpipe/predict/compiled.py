"""Functions of numbers and arrays that numba compiles, or, while `left_to_python`, Python runs, with the same results to the bit.

numba is imported, and a function compiled or read from disk, when it is first called. What is compiled is kept on disk where a
folder for that can be written to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial, update_wrapper, wraps
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np

from hetpipe.processes.environment import cores

F = TypeVar("F", bound=Callable[..., Any])
on_disk: list[Any] = []  # compiled functions that numba keeps
_python: list[bool] = []  # one entry for each `left_to_python` that has not ended


class Compiled:
    """A function beside its compiled twin. Functions of this class that it calls are found among its globals, or in `parts`."""

    def __init__(
        self, function: Callable[..., Any], *, inline: bool = False, parts: Mapping[str, Compiled] | None = None
    ) -> None:
        self.function, self.inline, self.parts = function, inline, parts or {}
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        if not _python:
            return self.by_numba(*arguments)
        with np.errstate(all="ignore"):  # numba says nothing of infinite numbers
            return self.by_python(*arguments)

    @cached_property
    def by_python(self) -> Callable[..., Any]:
        """The function as Python runs it, and all that it calls."""
        return self._with({name: other.by_python for name, other in self._called().items()})

    @cached_property
    def by_numba(self) -> Any:
        """numba's dispatcher of the function; it compiles, or reads from disk, when it is first called."""
        from numba import njit  # it takes long, which few tasks need

        own = self._with({name: other.by_numba for name, other in self._called().items()})
        if self.inline:
            return njit(inline="always", error_model="numpy")(own)
        compiler = partial(njit, nogil=True, error_model="numpy")
        try:
            on_disk.append(compiler(cache=True)(own))
        except RuntimeError:  # numba found no folder that it can write to
            return compiler()(own)
        on_disk[-1]._cache._cache_file._source_stamp = sources()  # numba asks for the time of the function's own file only
        return on_disk[-1]

    def _called(self) -> dict[str, Compiled]:
        found = {**self.function.__globals__, **self.parts}
        return {name: found[name] for name in self.function.__code__.co_names if isinstance(found.get(name), Compiled)}

    def _with(self, names: Mapping[str, Any]) -> Callable[..., Any]:
        return FunctionType(self.function.__code__, {**self.function.__globals__, **names}, self.function.__name__)


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
    _python.append(True)
    try:
        yield
    finally:
        _python.pop()


def once(prepare: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `prepare` the first time that functions are not left to Python."""
    done: list[bool] = []

    @wraps(prepare)
    def call() -> None:
        if not done and not _python:
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


def compiled_beside(module: str, *functions: Any) -> Callable[[], None]:
    """Start a process that compiles what the module's `ready()` makes ready, and return what waits for it. Nothing is started
    where numba keeps all these functions already, or keeps nothing, or this process has one processor only."""
    kept = [function.by_numba for function in functions]
    if cores() < 2 or not all(one in on_disk and not _index(one) for one in kept):
        return lambda: None
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = "import importlib, sys; importlib.import_module(sys.argv[1]).ready()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, module], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return lambda: _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait()  # where it failed, this process compiles what it left
    finally:
        process.kill()


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
