"""What methods keep ends with their instance."""

from __future__ import annotations

import gc

from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.space import Space
from hetpipe.partitioners.stage_kinds.types import Types
from tests.support.strategies import make_cluster, make_problem, make_profile, mixed


def test_computed_once_for_each_instance_and_arguments() -> None:
    calls: list[tuple[str, int]] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        @memoized
        def twice(self, number: int) -> int:
            """Two times the number."""
            calls.append((self.name, number))
            return 2 * number

    a, b = Named("a"), Named("b")
    assert [a.twice(1), a.twice(1), a.twice(2), b.twice(1)] == [2, 2, 4, 2]
    assert calls == [("a", 1), ("a", 2), ("b", 1)]


def living() -> int:
    gc.collect()
    return sum(type(x) in (Space, Types) for x in gc.get_objects())


def test_searches_leave_nothing_behind() -> None:
    """Both planners: every Space and Types, with their tables, was kept by the caches of their methods."""
    before = living()
    for batch in (4, 5):
        cluster = make_cluster([{"a": 2}, {"a": 2}])
        Auto()(make_problem(cluster, make_profile({"a": [1.0, 2.0, 3.0]}), batch))
    Auto()(mixed(2, 40))
    assert living() == before
