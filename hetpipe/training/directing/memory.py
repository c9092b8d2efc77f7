"""What a run learns where a device has had too little memory for its plan: how much plans may use of devices of its type."""

from __future__ import annotations

import math

from hetpipe.documents.clusters.assumed import with_assumed
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.units import in_bytes
from hetpipe.predict.cost import Costs
from hetpipe.predict.simulator import peak_bytes
from hetpipe.runtime.checks.shortage import Shortage
from hetpipe.training.directing.director import Event
from hetpipe.training.session import Session

LESS = 0.05  # of what a plan was predicted to use, which the device has, and which was not enough: by how much is not known


def learned(session: Session, profile: Profile, event: Event, home: str | None) -> tuple[Profile, Event]:
    """The profile with the limits that follow from an event, saved where the main rank knows its `home`; and the event, which
    says so. Collective."""
    before, lower = profile, dict[str, int]()
    for shortage in event.shortages:
        kind = session.cluster.device(shortage.device).type
        found = most_bytes(session, before, event.plan, shortage)
        if found < profile.joined(session.cluster).device_types[kind].memory:
            profile, lower[kind] = profile.limited(kind, found), found
    if not lower:  # a plan of one's own, which takes more than there is said to be
        return profile, event
    if home is not None and session.world.is_main:
        profile.save(home)
    home = session.world.first(home)
    told = " and ".join(f"{in_bytes(limit)} of a {kind!r}" for kind, limit in lower.items())
    later = f"({home} keeps that for later runs)" if home is not None else _to_keep(session, lower)
    return profile, event._replace(told=f"{event.told}. From here on plans use at most {told} {later}")


def _to_keep(session: Session, limits: dict[str, int]) -> str:
    where = session.job.cluster or "a cluster file"
    memory = ", ".join(f"{kind}: {{memory: {limit}}}" for kind, limit in limits.items())
    return f"(later runs do if {where} says device_types: {{{memory}}})"


def most_bytes(session: Session, profile: Profile, plan: Plan, shortage: Shortage) -> int:
    """The memory of a device type, as a cluster file would say it, with which this plan no longer fits: what the device had, if
    that is less than the plan was predicted to use. Else the plan uses more than predicted, and others may not be predicted to
    use as much."""
    options = session.job.planning
    cluster = with_assumed(session.cluster, profile) if options.memory_reserve is None else session.cluster
    costs = Costs(profile.at(plan.precision), profile.joined(cluster))
    planned, there = peak_bytes(plan, costs)[shortage.device], shortage.bytes_there
    if there is not None:
        there += costs.cluster.runtime_overhead.device_bytes
    usable = there if there is not None and there < planned else (1 - LESS) * planned
    return max(1, math.floor(usable / (1 - options.reserve(session.cluster))))
