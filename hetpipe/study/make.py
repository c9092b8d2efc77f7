"""How a study is made: what belongs together, simulated, and what else could be, planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.assumed import with_assumed
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.planning.front import Front
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.study.changes import make_changes
from hetpipe.study.cuts import moved_cuts
from hetpipe.study.rules import equal_names, equal_split, other_rules
from hetpipe.study.scene import Scene, make_scene
from hetpipe.study.study import Alternative, Study


def make_study(
    plan: Plan,
    *,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    measured: Timeline | None = None,
    front: Front | None = None,
    source: str = "the plan",
    rules: Sequence[str] | None = None,
    changes: bool = False,
    cuts: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Study:
    """The study of a plan; InputError if what is given does not belong together. With profile and cluster the partitioners
    `rules` plan the same problem, without any those of the equal split; changed clusters are planned (`changes`), and cuts moved
    (`cuts`), if that is asked for. All of it takes seconds: `progress` is told what is done."""
    profile, cluster = belonging(plan, profile, cluster, source)
    if profile is None or cluster is None:
        scene = make_scene(plan, profile=profile, cluster=cluster)
        return Study(plan=plan, scene=scene, profile=profile, cluster=cluster, measured=measured, front=front)
    problem = profile, cluster
    progress("other partitioners")
    others = other_rules(plan, *problem, equal_names() if rules is None else rules)
    changed = make_changes(plan, *problem, others, progress) if changes else None
    predicted = with_footprint(simulate(plan, *problem), plan, *problem)
    scene = make_scene(plan, profile=profile, cluster=cluster, timeline=predicted, equal=_equal_scene(others, *problem))
    if cuts:
        progress("moving cuts")
    return Study(
        plan=plan,
        scene=scene,
        profile=profile,
        cluster=cluster,
        predicted=predicted,
        measured=measured,
        front=front,
        rules=tuple(others),
        changes=changed,
        cuts=tuple(moved_cuts(plan, *problem, [lane.replicas for lane in scene.lanes])) if cuts else (),
    )


def belonging(
    plan: Plan, profile: Profile | None, cluster: Cluster | None, source: str = "the plan"
) -> tuple[Profile | None, Cluster | None]:
    """The profile at the plan's precision, and the cluster with the profile's links and what is assumed of it; InputError if they
    do not belong together."""
    if cluster is not None and profile is not None:
        cluster = profile.joined(with_assumed(cluster, profile))
    plan.check(profile=profile, cluster=cluster, source=source)
    return profile.at(plan.precision) if profile is not None else None, cluster


def _equal_scene(others: Sequence[Alternative], profile: Profile, cluster: Cluster) -> Scene | None:
    """The equal split, simulated; None where none of its partitioners has a plan."""
    equal = equal_split(others)
    if equal is None or equal.plan is None:
        return None
    return make_scene(equal.plan, profile=profile, cluster=cluster, timeline=simulate(equal.plan, profile, cluster))
