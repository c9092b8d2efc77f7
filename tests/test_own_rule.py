"""The planning rule of docs/how-to/own-rule.md, as another package's and as one of ours."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hetpipe.partitioners.search import floor
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.planner import make_plan
from hetpipe.predict.simulator import simulate
from tests.support.pages import Page
from tests.support.strategies import make_cluster, make_problem, make_profile


@pytest.fixture
def rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's, installed as pip would."""
    blocks = {block.name: block.text for block in Page("docs/how-to/own-rule.md").blocks if block.language == "python"}
    (point,) = re.findall(r'"hetpipe.partitioners": \["(.*)"\]', blocks["setup.py"])
    (tmp_path / "fastest_type.py").write_text(blocks["fastest_type.py"])
    info = tmp_path / "fastest_type-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastest-type\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hetpipe.partitioners]\n{point}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fastest_type", raising=False)
    return importlib.import_module("fastest_type").partitioner


def problem(memory: int = 10**12, **options: Any) -> Problem:
    """Two fast devices on as many nodes, and three slow ones."""
    cluster = make_cluster([{"fast": 1, "slow": 2}, {"fast": 1, "slow": 1}], memory=memory)
    profile = make_profile({"fast": [0.1, 0.1, 0.1], "slow": [1.0, 1.0, 1.0]}, (1, 2, 4), layer={"parameter_bytes": 100})
    return make_problem(cluster, profile, 8, **options)


def test_it_is_found_by_its_entry_point(rule: Any) -> None:
    given = problem()
    plan = make_plan(given.profile, given.cluster, 8, partitioner="fastest-type")
    (replica,) = plan.replicas
    assert [given.cluster.device(stage.device).type for stage in replica.stages] == ["fast", "fast"]
    assert [stage.layers for stage in replica.stages] == [(0, 2), (2, 3)]
    assert plan.partitioner == rule.name


def test_auto_tries_it_where_it_is_one_of_ours(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem()
    own = rule(given).plan
    monkeypatch.setattr(floor, "rules", lambda: [rule])
    (plan,) = floor.simple_plans(given)
    assert plan == own
    step = simulate(own, given.profile, given.cluster).step_seconds
    assert [*floor.simple_plans(given, step)] == []


def test_it_says_where_nothing_fits_or_can_run(rule: Any) -> None:
    with pytest.raises(PartitionError, match=r"^fastest-type: layers 0 .* need .* on device n0/0 of type 'fast'"):
        rule(problem(memory=300))
    with pytest.raises(PartitionError, match="suits 3 layers, a global batch of 8 and the back end 'fairscale'"):
        rule(problem(backend="fairscale"))
