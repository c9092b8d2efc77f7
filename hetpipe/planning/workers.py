"""Planning several problems at once: in this process, or in others, one for each core."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any, NamedTuple

from hetpipe.documents.plan import Plan
from hetpipe.planning import registry
from hetpipe.planning.offload import solve
from hetpipe.planning.partition import Partitioner, Problem
from hetpipe.planning.planner import with_prediction

_planner: list[Partitioner] = []  # of a worker process


class Solved(NamedTuple):
    """A plan, and how long its search took."""

    plan: Plan
    seconds: float


class Planners:
    """Plans problems by the named partitioner, up to `count` at a time; a context."""

    def __init__(self, name: str, count: int) -> None:
        self.count = count
        if count > 1:
            self._pool: Executor = ProcessPoolExecutor(
                count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(name,)
            )
            self._solve: Callable[[Problem], Solved] = _solve_there
        else:
            planner = registry.partitioner(name)
            self._pool, self._solve = _Here(), lambda problem: _solve(planner, problem)

    def __enter__(self) -> Planners:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, problem: Problem) -> Future[Solved]:
        """The plan with its prediction, or the PartitionError, when it is there."""
        return self._pool.submit(self._solve, problem)


class _Here(Executor):
    """Does what is submitted at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _begin(name: str) -> None:
    _planner.append(registry.partitioner(name))


def _solve_there(problem: Problem) -> Solved:
    return _solve(_planner[0], problem)


def _solve(planner: Partitioner, problem: Problem) -> Solved:
    began = time.monotonic()
    plan = with_prediction(solve(planner, problem), problem)
    return Solved(plan, time.monotonic() - began)
