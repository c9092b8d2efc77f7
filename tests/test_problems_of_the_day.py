"""Problems that are drawn anew each day: what holds for all plans holds for theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

from bench.planner.draws import wide
from bench.planner.run import rules
from hetpipe.documents.plan import Plan
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.search.floor import cost
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import with_prediction
from tests.support.plans import ROUNDING, checked

COUNT, MOST_DEVICES = 3, 16


def planned(first: int) -> list[dict[str, object]]:
    """The plan of each problem, or why there is none."""
    found = list[dict[str, object]]()
    for seed in range(first, first + COUNT):
        problem = wide(seed, MOST_DEVICES)
        try:
            found.append(with_prediction(Auto()(problem), problem).model_dump(mode="json"))
        except PartitionError as error:
            found.append({"refused": str(error)})
    return found


def test_plans_fit_are_not_above_the_rules_nor_below_their_bound_and_come_out_the_same_twice() -> None:
    """Twice in processes that go through sets in different orders."""
    first = int(date.today().strftime("%Y%m%d00"))
    print(f"problems: bench.planner.draws.wide(seed, {MOST_DEVICES}) of {COUNT} seeds from {first} on")
    code = f"import json; from {__name__} import planned; print(json.dumps(planned({first})))"
    command, root = [sys.executable, "-c", code], Path(__file__).parent.parent
    both = [
        subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": order}, stdout=subprocess.PIPE, text=True, cwd=root)
        for order in "12"
    ]
    once, again = (process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert once == again
    for seed, found in zip(range(first, first + COUNT), json.loads(once), strict=True):
        problem, least = wide(seed, MOST_DEVICES), min(rules(wide(seed, MOST_DEVICES)).values(), default=None)
        if "refused" in found:
            assert least is None, (seed, found)
            continue
        plan = Plan.parse(found, f"the plan of {seed}")
        step, told = checked(problem, plan).step_seconds, plan.predicted
        assert told is not None
        assert told.step_seconds == step, seed
        assert told.lower_bound_seconds is None or told.lower_bound_seconds <= step * ROUNDING, seed
        assert least is None or cost(problem, plan) <= least * ROUNDING, seed
