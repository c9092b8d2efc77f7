"""Functions that numba compiles at their first use, and keeps on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])
on_disk: list[Any] = []  # functions that numba keeps


def compiled(function: F) -> F:
    """The function, compiled; what is compiled is kept on disk where a folder for that can be written to."""
    compiler = partial(njit, nogil=True, error_model="numpy")
    try:
        on_disk.append(compiler(cache=True)(function))
    except RuntimeError:  # numba found no folder that it can write to
        return cast(F, compiler()(function))
    on_disk[-1]._cache._cache_file._source_stamp = sources()  # numba asks for the time of the function's own file only
    return cast(F, on_disk[-1])


@cache
def sources() -> str:
    """A digest of all files with compiled functions. What is kept is of no use once one has changed, as functions are compiled
    into those that call them."""
    partitioners = find_spec("hetpipe.partitioners")
    assert partitioners is not None
    folders = [Path(__file__).parent, *map(Path, partitioners.submodule_search_locations or ())]
    texts = [path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py"))]
    return sha256(b"".join(text for text in texts if b"hetpipe.predict.compiled" in text)).hexdigest()


def inlined(function: F) -> F:
    """The function, compiled as a part of those that call it."""
    return cast(F, njit(inline="always", error_model="numpy")(function))


def twin(function: F, parts: Sequence[Callable[..., Any]]) -> F:
    """A compiled twin of a function and of those that it calls, all of one module, which themselves stay as they are."""
    names = dict(function.__globals__)
    for part in parts:
        names[part.__name__] = inlined(FunctionType(part.__code__, names))
    return compiled(cast(F, FunctionType(function.__code__, names)))


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
