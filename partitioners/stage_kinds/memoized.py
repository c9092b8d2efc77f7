"""Results of methods, which their instance keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

Instance = TypeVar("Instance")
Args = TypeVarTuple("Args")
Result = TypeVar("Result")


def memoized(method: Callable[[Instance, *Args], Result]) -> Callable[[Instance, *Args], Result]:
    """A method whose results are kept, by its arguments, in its instance, and so end with it; `functools.cache` would keep
    every instance for ever."""
    name = f"_memoized_{method.__name__}"

    @wraps(method)
    def found(self: Instance, *args: *Args) -> Result:
        results: dict[Any, Result] = self.__dict__.setdefault(name, {})
        try:
            return results[args]
        except KeyError:
            return results.setdefault(args, method(self, *args))

    return found
