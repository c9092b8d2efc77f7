"""Results of methods that their instance keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

Owner = TypeVar("Owner")
Given = TypeVarTuple("Given")
Result = TypeVar("Result")


def kept(method: Callable[[Owner, *Given], Result]) -> Callable[[Owner, *Given], Result]:
    """A method whose results are kept, by its arguments, in its instance, and so end with it; `functools.cache` would keep
    every instance for ever."""
    name = f"_kept_{method.__name__}"

    @wraps(method)
    def found(self: Owner, *args: *Given) -> Result:
        results: dict[Any, Result] = self.__dict__.setdefault(name, {})
        try:
            return results[args]
        except KeyError:
            return results.setdefault(args, method(self, *args))

    return found
