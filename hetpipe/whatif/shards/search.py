"""The better of a plan with split layers and one of whole layers. Each is searched for apart, since split layers need memory for
the communicator of their sums on every card, which a plan of whole layers may need for itself."""

from __future__ import annotations

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.study.rules import plan_with
from hetpipe.study.study import Alternative
from hetpipe.whatif.shards.measurements import widest_first


def best_plan(name: str, profile: Profile, cluster: Cluster, batch: int, seconds: float) -> Alternative:
    """The plan of `auto` within so many seconds for all searches."""
    turns = widest_first(profile, cluster)
    limit = seconds / len(turns)
    found = [plan_with("auto", name, one, cluster, batch, time_limit_seconds=limit) for one in turns]
    best = min(found, key=lambda one: one.step_seconds)
    return best if len(found) == 1 else _bounded(best, found)


def _bounded(best: Alternative, found: list[Alternative]) -> Alternative:
    """The best of these, with the lowest of their bounds: no plan of any of these searches is faster. Without a bound, where one
    of them found no plan, and so gives none."""
    if best.plan is None or best.plan.predicted is None:
        return best
    all_predicted = [one.plan.predicted for one in found if one.plan is not None]
    known = [p for p in all_predicted if p is not None and p.lower_bound_seconds is not None]
    names = ("lower_bound_seconds", "fluid_bound_seconds", "proof")
    least = min(known, key=lambda p: p.lower_bound_seconds or 0.0) if len(known) == len(found) else None
    changed = {name: getattr(least, name, None) for name in names}
    bound = changed["lower_bound_seconds"]
    changed["gap"] = best.step_seconds / bound - 1 if bound else None
    predicted = best.plan.predicted.model_copy(update=changed)
    return Alternative(name=best.name, plan=best.plan.model_copy(update={"predicted": predicted}))
