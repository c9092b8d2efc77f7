"""hetpipe/documents/options.py: the options of planning are the same everywhere."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from hetpipe import InputError, PlanOptions, make_plan
from hetpipe.cli import commands
from hetpipe.documents.job import PlanSection
from hetpipe.documents.options import PlanRules
from tests.support.strategies import make_cluster, make_profile


def test_the_command_and_a_job_have_every_option() -> None:
    known = {"time_limit": "time_limit_seconds", "no_recompute": "allow_recompute", "offload": "allow_offload"}
    command = {known.get(name, name) for name in inspect.signature(commands.plan).parameters}
    assert set(PlanOptions.model_fields) <= command
    assert set(PlanSection.model_fields) == {*PlanRules.model_fields, "file"}
    assert set(PlanOptions.model_fields) == {*PlanRules.model_fields, "precision"}, "which is train.precision in a job"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partitionr": "even"}, "unknown key 'partitionr'; did you mean 'partitioner'?"),
        ({"schedule": "zb"}, "schedule: Input should be 'auto', 'gpipe' or '1f1b' (got 'zb')"),
        ({"memory_reserve": 1}, "memory_reserve is a fraction of a device's memory, at least 0 and below 1, got 1"),
        (
            {"time_limit_seconds": float("inf"), "max_price_per_hour": -1.0},
            "max_price_per_hour must be a positive number, got -1.0; time_limit_seconds must be a positive number, got inf",
        ),
        ({"deadline_seconds_per_step": "soon"}, "deadline_seconds_per_step: Input should be a valid number (got 'soon')"),
    ],
)
def test_wrong_options_are_told_as_the_user_wrote_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        PlanOptions().changed(changes)
    assert str(caught.value).startswith(message)


def test_an_object_and_keywords_plan_alike() -> None:
    profile, cluster = make_profile({"a": [1.0, 2.0, 3.0]}), make_cluster([{"a": 2}])
    changes: dict[str, Any] = {"partitioner": "even", "schedule": "gpipe", "memory_reserve": 0.5}
    by_keywords = make_plan(profile, cluster, 6, **changes)
    assert by_keywords.schedule == "gpipe"
    assert by_keywords == make_plan(profile, cluster, 6, PlanOptions(**changes))
    assert by_keywords == make_plan(
        profile, cluster, 6, PlanOptions(partitioner="chain", schedule="gpipe"), partitioner="even", memory_reserve=0.5
    )
