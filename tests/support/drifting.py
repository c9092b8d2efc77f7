"""Runs whose devices are said to change their speed: what is measured of them is made up, and nothing is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bench.drift.slowed import Slower
from hetpipe.documents.job import Job
from hetpipe.documents.profile import Profile
from hetpipe.predict.simulator import computing_seconds
from hetpipe.runtime.holder import Holder


@contextmanager
def said_to_be(job: Job, changes: Sequence[Slower]) -> Iterator[None]:
    """In here devices compute as the job's profile says, but for these changes."""
    cluster, plain = job.read_cluster(), Holder.computed
    assert job.profile is not None
    assert cluster is not None
    profile = Profile.load(job.profile)

    def computed(engine: Holder) -> dict[str, Callable[[], float | None]]:
        seconds = computing_seconds(engine.plan, profile, cluster)
        for change in changes:
            if change.device in seconds:
                seconds[change.device] *= change.at(engine.steps)
        return {seat.device: partial(seconds.get, seat.device) for seat in engine.seats}

    Holder.computed = computed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Holder.computed = plain  # type: ignore[method-assign]
