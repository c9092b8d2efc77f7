"""Whether a run goes on by another plan when the speeds of its devices have changed: the decision.

It plans again for the speeds that there are, and moves layers if the steps that are left gain more, by prediction, than the move
takes. What that takes: the layers' bytes over the links, and RESTART_SECONDS, or as long as the last move of this run took beside
them. Two things keep a run from going to and fro with a device whose speed goes up and down: a gain below LEAST_GAIN is none,
since no prediction is that exact; and no move follows on another before the step by which that was to have gained what it took.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from hetpipe.documents.plan import Plan
from hetpipe.documents.precisions import in_job, turns
from hetpipe.documents.profile import Profile
from hetpipe.measuring.discover import with_own_types
from hetpipe.planning.partition import PartitionError
from hetpipe.predict.simulator import simulate
from hetpipe.processes.world import World
from hetpipe.training.directing.director import Leg
from hetpipe.training.directing.drift import NEAR, OFF, Drift, is_beyond
from hetpipe.training.directing.seen import Seen
from hetpipe.training.directing.told import Weighed, told
from hetpipe.training.moving.moves import in_place, move_bytes, move_seconds, moves
from hetpipe.training.observers.records import DriftRecord
from hetpipe.training.session import Request, Session, new_plan

LEAST_GAIN = 0.03  # of a step
RESTART_SECONDS = 5.0  # of process groups, engines and their first steps, until a run knows its own


class _Following(NamedTuple):
    """The leg to go on with. `factors`: see `Rebalance`; `step_seconds` and `transfer_seconds`: of its steps and of the change,
    as predicted; `repaid_at`: the step by which it has gained what it takes."""

    leg: Leg
    factors: dict[str, float]
    step_seconds: float
    transfer_seconds: float
    repaid_at: int


class Rebalance:
    """Decides on one rank of a run. `factors`: of the devices that are not as fast as their type, how many times as long they
    compute, as the present plan counts with."""

    def __init__(self, session: Session, profile: Profile) -> None:
        self.session, self.profile = session, profile
        self.factors = dict[str, float]()
        self.following: _Following | None = None
        self._last: _Following | None = None  # the one of the present leg
        self._stepped: float | None = None  # when the last step was over
        self._left: float | None = None  # when that of the leg before was
        self._restart_seconds: float | None = None  # as the last change took, beside the transfer

    def stepped(self) -> None:
        """A step is over: the first one of a leg shows how long the change took."""
        now = time.perf_counter()
        if self._left is not None and self._last is not None:
            known = self._last.step_seconds + self._last.transfer_seconds
            self._restart_seconds = max(0.0, now - self._left - known)
        self._stepped, self._left = now, None

    def go_on(self, world: World) -> Leg:
        """The leg that was decided on, on all ranks. Collective."""
        found: _Following = next(told for told in world.gather(self.following) if told is not None)
        self.following, self._last, self.factors = None, found, found.factors
        self._left, self._stepped = self._stepped, None
        return found.leg

    def plan_again(self, plan: Plan, profile: Profile, world: World) -> Leg:
        """Plan for what was found of devices otherwise, at the speeds that are known. PartitionError where nothing fits.
        Collective."""
        self.profile, seen = profile, Seen.by(self.factors, self.session.cluster, profile)
        return Leg(self._fresh(seen, plan, world), seen=seen)

    def drifted(self, drift: Drift, world: World) -> DriftRecord | None:
        """See `Director`."""
        changed = drift.changed or not drift.from_start
        if not changed and self._last is not None:
            return None  # of a leg that was planned for what was measured, it is no news
        factors = self.factors | {device: self.factors.get(device, 1.0) * factor for device, factor in drift.factors.items()}
        weighed = None
        if changed and drift.left:
            weighed, following = self._weigh(drift, {d: x for d, x in factors.items() if is_beyond(x, NEAR)}, world)
            self.following = following if weighed.is_done else None
        if not drift.changed and changed and self.following is None:
            return None  # looked at again, and left as it is
        news = {device: factors[device] for device in drift.changed}
        return DriftRecord(
            step=drift.step,
            factors=news,
            off={device: times for device, times in drift.off.items() if is_beyond(times, OFF)},
            measured_seconds={device: drift.measured_seconds(device) for device in drift.factors},
            predicted_seconds=drift.predicted_seconds,
            step_seconds=weighed.step_seconds if weighed is not None else None,
            fresh_step_seconds=weighed.fresh_seconds if weighed is not None else None,
            moves=weighed is not None and weighed.is_done,
            again=weighed.again if weighed is not None else None,
            told=told(drift, news, weighed, self.session.cluster),
        )

    def _weigh(self, drift: Drift, factors: dict[str, float], world: World) -> tuple[Weighed, _Following | None]:
        """What a fresh plan for these factors is worth, and the leg under it. Collective."""
        seen, plan, found = Seen.by(factors, self.session.cluster, self.profile), drift.plan, None
        with suppress(PartitionError):
            found = in_place(plan, self._fresh(seen, plan, world), seen.cluster)
        known = [seconds for seconds in world.gather(self._restart_seconds) if seconds is not None]
        restart = max(known, default=RESTART_SECONDS)
        own = self._compared(drift, found, seen, factors, restart) if world.is_main else None  # hosts may round otherwise
        found_by_main: tuple[Weighed, _Following | None] = world.first(own)
        return found_by_main

    def _compared(
        self, drift: Drift, fresh: Plan | None, seen: Seen, factors: dict[str, float], restart: float
    ) -> tuple[Weighed, _Following | None]:
        """The present plan with another one, by what is seen."""
        plan, now = drift.plan, self._step_seconds(drift.plan, seen)
        if fresh is None or fresh.fingerprint == plan.fingerprint:
            return Weighed(now), None
        seconds = self._step_seconds(fresh, seen)
        if seconds > (1 - LEAST_GAIN) * now:
            return Weighed(now), None
        found = [move for move in moves(plan, fresh, seen.linked) if move.source != move.device]
        transfer = move_seconds(found, self.profile, seen.linked)
        takes = transfer + restart
        pays, repaid_at = pays_off(now - seconds, takes, drift.left), self._last.repaid_at if self._last is not None else 0
        weighed = Weighed(
            now,
            seconds,
            (len(found), move_bytes(found, self.profile), takes),
            pays=pays,
            wanted=self.session.job.rebalance == "auto",
            again=repaid_at if pays and drift.step < repaid_at else None,
            unused=tuple(device for device in plan.device_ids if device not in fresh.device_ids),
        )
        at = drift.step + math.ceil(takes / (now - seconds))
        return weighed, _Following(Leg(fresh, seen=seen), factors, seconds, transfer, at)

    def _step_seconds(self, plan: Plan, seen: Seen) -> float:
        return simulate(seen.named(plan, self.session.cluster), seen.profile, seen.cluster).step_seconds

    def _fresh(self, seen: Seen, plan: Plan, world: World) -> Plan:
        """A plan for these speeds, in which each type computes in what it does by the present plan. Collective."""
        session, cluster = self.session, self.session.cluster
        request, own = Request.by(session.job), {device.id: device.type for device in cluster.devices}
        asked = turns(in_job(request.options.precision, self.profile, cluster), self.profile, cluster)[0] | (plan.precision or {})
        named = {device.type: asked[own[device.id]] for device in seen.cluster.devices if own[device.id] in asked}
        options = request.options.changed({"precision": named or None})
        found = new_plan(
            replace(session, cluster=seen.cluster, world=replace(world.patiently(), rank_of=session.world.rank_of)),
            seen.profile,
            replace(request, options=options),
        )
        return with_own_types(found, seen.cluster, cluster)


def pays_off(gain_seconds: float, takes_seconds: float, steps: int) -> bool:
    """Whether so many steps repay a change that gains so much in each."""
    return gain_seconds > 0 and gain_seconds * steps > takes_seconds
