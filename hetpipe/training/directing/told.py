"""What is said of devices whose speed has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetpipe.documents.cluster import Cluster
from hetpipe.files.messages import counted
from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.training.directing.drift import NEAR, OFF, Drift, is_beyond

FEW = 4  # devices that a message names
PROFILE = "'hetpipe profile' measures the devices as they are now"


class Weighed(NamedTuple):
    """What another plan would be worth. Seconds of a step by both (`fresh_seconds`: None where no other is faster); `moving`: how
    many layers, bytes and seconds the change takes; `pays`: whether the steps that are left repay it; `wanted`: whether the job
    wants such changes; `again`: the step after which it is weighed again, since the change before has to be repaid first."""

    step_seconds: float
    fresh_seconds: float | None = None
    moving: tuple[int, int, float] = (0, 0, 0.0)
    pays: bool = False
    wanted: bool = False
    again: int | None = None
    unused: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether the run goes on by the other plan."""
        return self.pays and self.wanted and self.again is None


def told(drift: Drift, factors: Mapping[str, float], weighed: Weighed | None, cluster: Cluster) -> str:
    """All of it. `factors`: of each device whose speed has changed, how many times as long it computes as at the start."""
    parts = [_speeds(drift, factors, cluster)] if factors else []
    off = {device: times for device, times in drift.off.items() if is_beyond(times, OFF) and (not factors or device in factors)}
    if off:
        listed = _listed([f"{device} {times:.2f}" for device, times in off.items()])
        parts.append(f"from the start, times as long as the profile says: {listed}, which is the profile's fault and no drift")
    if weighed is not None:
        parts.append(_advice(drift, weighed))
    return "; ".join([*parts, PROFILE] if weighed is None else parts)


def _speeds(drift: Drift, factors: Mapping[str, float], cluster: Cluster) -> str:
    """Which devices compute how fast."""
    since = "the profile says, from the start" if drift.from_start else "before"
    rows = []
    for device, factor in factors.items():
        seat = next(seat for seat in drift.plan.seats() if seat.device == device)
        lo, hi = drift.plan.replicas[seat.replica].stages[seat.stage].layers
        measured, predicted = drift.measured_seconds(device), drift.predicted_seconds[device]
        times = f"{human_seconds(measured)} of a step, predicted {human_seconds(predicted)}"
        fast = f"computes {factor:.2f} times as long as {since}" if is_beyond(factor, NEAR) else "is as fast again as it was"
        kind = cluster.device(device).type
        rows.append(f"{device} ({kind}, {seat.place}, layers {lo} to {hi - 1}) {fast}: {times}")
    return f"{_together(drift, factors, cluster)}{_listed(rows)}"


def _together(drift: Drift, factors: Mapping[str, float], cluster: Cluster) -> str:
    """What devices have in common that changed at the same time."""
    if len(factors) < 2:
        return ""
    nodes = {cluster.device(device).node for device in factors}
    there = [device for device in drift.plan.device_ids if cluster.device(device).node in nodes]
    what = "are not as fast as the profile says" if drift.from_start else "have changed at once"
    if len(factors) < len(there) or (len(nodes) > 1 and len(there) < len(drift.plan.device_ids)):
        return f"{len(factors)} devices {what}: "
    where = "of the plan" if len(there) == len(drift.plan.device_ids) else f"of node {next(iter(nodes))!r}"
    return f"all {len(factors)} devices {where} {what}, as where other work shares their machine: "


def _advice(drift: Drift, weighed: Weighed) -> str:
    """What can be done."""
    now, fresh = weighed.step_seconds, weighed.fresh_seconds
    if fresh is None:
        return f"a step takes {human_seconds(now)} so, by prediction, and no other plan would be faster; {PROFILE}"
    less = f"{human_seconds(fresh)} by a fresh plan ({1 - fresh / now:.0%} less)"
    gain = f"a step takes {human_seconds(now)} so, by prediction, and {less}"
    layers, size_bytes, seconds = weighed.moving
    what = f"{counted(layers, 'layer')} ({human_bytes(size_bytes)})" if layers else "samples, and no layers,"
    what = f"{what} in about {human_seconds(seconds)}"
    if weighed.is_done:
        idle = f"; it uses {_listed(weighed.unused)} no more, whose speed it does not see then" if weighed.unused else ""
        return f"{gain}, for which the run moves {what}{idle}"
    if not weighed.wanted:
        return f"{gain}. With rebalance: auto the run would move {what}; {PROFILE}"
    if weighed.again is not None:
        return f"{gain}, but the change before is not repaid before step {weighed.again}, after which this is weighed again"
    return f"{gain}, which {counted(drift.left, 'step')} would not repay: the run would move {what}"


def _listed(rows: Sequence[str]) -> str:
    return ", ".join(rows[:FEW]) + (f" and {len(rows) - FEW} more" if len(rows) > FEW else "")
