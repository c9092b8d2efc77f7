"""The plans that other partitioners make of the same problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.planning import registry
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.study.study import Alternative


def rule_names() -> list[str]:
    """What a plan is compared with: the simple rules, and `chain`."""
    return [*(rule.name for rule in registry.rules()), "chain"]


def equal_names() -> list[str]:
    """The rules that treat all devices alike."""
    return [rule.name for rule in registry.rules() if getattr(rule, "equal", False)]


def plan_with(name: str, label: str, profile: Profile, cluster: Cluster, batch: int, **options: Any) -> Alternative:
    """The plan of one partitioner, under this label."""
    try:
        return Alternative(name=label, plan=make_plan(profile, cluster, batch, partitioner=name, **options))
    except (PartitionError, InputError) as error:
        return Alternative(name=label, reason=str(error))


def other_rules(plan: Plan, profile: Profile, cluster: Cluster, names: Sequence[str]) -> list[Alternative]:
    """What these partitioners make of the plan's problem."""
    return [plan_with(name, name, profile, cluster, plan.global_batch, backend=plan.backend) for name in names]


def equal_split(found: Sequence[Alternative]) -> Alternative | None:
    """The fastest of the rules that treat all devices alike, of those that fit."""
    names = equal_names()
    equal = [one for one in found if one.name in names and one.plan is not None]
    return min(equal, key=lambda one: one.step_seconds, default=None)
