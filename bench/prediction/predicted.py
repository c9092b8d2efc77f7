"""Runs, predicted: from the published profile and each run's plan, for a training system."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from bench.prediction.runs import DEVICES_PER_NODE, Run
from hetpipe.documents.cluster import Cluster, RuntimeOverhead
from hetpipe.documents.clusters.assumed import assumed_overhead
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.predict.simulator import simulate


class System(NamedTuple):
    """A training system on certain machines. `overhead`: what is measured of it; if its memory is `assumed`, what is known of its
    time. `slowdown`: measured
    over predicted seconds of everything but gradient sums; `sums_slowdown`: of these. `memory_rate`: bytes per second of the
    device's memory, at which the gradients of each micro-batch are added up."""

    overhead: RuntimeOverhead = RuntimeOverhead()
    slowdown: float = 1.0
    sums_slowdown: float = 1.0
    memory_rate: float = inf
    assumed: bool = False


DEFAULTS = System(assumed=True)


def predict_all(runs: Iterable[Run], folder: Path, system: System) -> list[dict[str, Any]]:
    """All runs, in their order."""
    found = []
    for run in runs:
        options = ImportOptions(model=run.model, nodes=f"{run.nodes}xGH-96x{DEVICES_PER_NODE}")
        profile, cluster = import_published("sailor", [folder], options)
        assert cluster is not None
        found.append(_predict(run, profile, cluster, system))
    return found


def _predict(run: Run, profile: Profile, cluster: Cluster, system: System) -> dict[str, Any]:
    """Predicted against measured, with relative errors (predicted / measured − 1)."""
    plan = run.plan()
    rate = system.memory_rate if len(plan.replicas[0].microbatch_sizes) > 1 else inf
    trained = in_training(profile, system.slowdown, rate)
    cluster = cluster.model_copy(update={"runtime_overhead": system.overhead})
    overhead = assumed_overhead(cluster, profile) if system.assumed else system.overhead
    timeline = simulate(plan, trained, cluster.model_copy(update={"runtime_overhead": overhead}))
    sums = system.sums_slowdown * timeline.sync_seconds
    seconds = timeline.pipeline_seconds + sums + timeline.optimizer_seconds
    peak = max(timeline.peak_bytes.values())
    return {
        "run": run.name,
        "measured_seconds": run.seconds,
        "predicted_seconds": seconds,
        "pipeline_seconds": timeline.pipeline_seconds,
        "gradient_sync_seconds": sums,
        "optimizer_seconds": timeline.optimizer_seconds,
        "time_error": seconds / run.seconds - 1,
        "measured_bytes": run.peak_bytes,
        "predicted_bytes": peak,
        "memory_error": peak / run.peak_bytes - 1,
    }


def in_training(profile: Profile, slowdown: float, memory_rate: float) -> Profile:
    """The profile with its forwards and backwards slowed down, and backwards that add their gradients to those of the
    micro-batches before: two reads and one write of the parameters' size."""

    def slower(rows: tuple[tuple[float, ...], ...], more: Any = 0.0) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(row) for row in (slowdown * (np.array(rows) + more)).tolist())

    def changed(m: Measurement) -> Measurement:
        added = 3 * np.array(profile.parameter_bytes(m.tensor_parallel, m.device_type)) / memory_rate
        times = {"forward_seconds": slower(m.forward_seconds), "backward_seconds": slower(m.backward_seconds, added)}
        return Measurement.model_validate({**dict(m), **times})

    measurements = tuple(changed(m) for m in profile.measurements)
    return profile.model_copy(update={"measurements": measurements})


def mean_error(rows: list[dict[str, Any]], key: str) -> float:
    """Mean absolute relative error."""
    return fmean(abs(row[key]) for row in rows)
