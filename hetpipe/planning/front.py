"""The Pareto front of price and time over sub-clusters: every sub-cluster as a row that says how much is known of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, Proof
from hetpipe.documents.profile import Profile
from hetpipe.files.formats import Bytes, Count, DeviceCount, Document, Flag, Name, Number, Positive, Samples, Strict
from hetpipe.predict.cost import Costs
from hetpipe.predict.sums import sync_segments

Status = Literal["planned", "dominated", "infeasible", "excluded", "unknown"]


class Planned(Strict):
    """What a row's plan is and what the simulator says of it. Of replicas that differ, each value stands once, and
    `partitions` counts them by the layers of their stages: {"13-12-13-12": 3}. `gradient_sync_seconds` is what the gradient sums
    add to the step; of it, `embedding_sync_seconds` the sums of tied parameters, which come last."""

    step_seconds: Number
    price_per_million_samples: Number
    samples_per_second: Annotated[Number, Field(allow_inf_nan=True, gt=0)]
    pipeline_seconds: Number
    gradient_sync_seconds: Number
    embedding_sync_seconds: Number
    optimizer_seconds: Number
    peak_bytes: Bytes
    gap: Number | None = None
    proof: Proof | None = None
    replicas: DeviceCount
    microbatch_sizes: tuple[Positive, ...]
    stages: tuple[Positive, ...]
    tensor_parallel: tuple[Positive, ...]
    partitions: dict[Name, Count]


class Row(Strict):
    """One sub-cluster. `price_per_hour` is that of all its nodes, used or not.

    `status` planned: a plan was found. dominated: no plan of it can be better than one in hand, so it was not searched
    further. infeasible: no plan fits its memory. excluded: over a limit that was given. unknown: the time ended before it was
    planned. No plan of the class that was searched has a step below `lower_bound_seconds`; `reason` says what decided. Where
    memory did, a stage needs `needed_bytes` on a device, of which `missing_bytes` are not there."""

    nodes: dict[Name, Count]
    devices: dict[Name, Count]
    price_per_hour: Number
    status: Status
    on_front: Flag = False
    lower_bound_seconds: Number | None = None
    reason: str | None = None
    missing_bytes: Bytes | None = None
    needed_bytes: Bytes | None = None
    plan: Planned | None = None


class Front(Document):
    """All sub-clusters of a catalogue or cluster; `on_front` marks those with a plan that no other row's plan beats both in
    price per million samples and in seconds per step."""

    format: Literal["hetpipe.front/1"] = "hetpipe.front/1"
    model: Name
    global_batch: Samples
    partitioner: Name
    max_price_per_hour: Number | None = None
    deadline_seconds_per_step: Number | None = None
    rows: tuple[Row, ...]

    @property
    def front(self) -> tuple[Row, ...]:
        """The rows on the front, fastest first."""
        return tuple(sorted((row for row in self.rows if row.on_front), key=_step))

    @property
    def largest(self) -> Row:
        """The row of the most devices."""
        return max(self.rows, key=lambda row: sum(row.devices.values()))

    @classmethod
    def of(cls, rows: Sequence[Row], **about: object) -> Self:
        """The rows with the front marked: of equal ones, that of fewest devices."""
        planned = [row for row in rows if row.status == "planned"]
        order = sorted(planned, key=lambda row: (_step(row), _price(row), sum(row.devices.values())))
        least, best = float("inf"), set()
        for row in order:
            if _price(row) < least:
                least = _price(row)
                best.add(id(row))
        marked = [row.model_copy(update={"on_front": id(row) in best}) for row in rows]
        return cls(rows=tuple(marked), **about)  # type: ignore[arg-type]


def _step(row: Row) -> float:
    return row.plan.step_seconds if row.plan is not None else float("inf")


def _price(row: Row) -> float:
    return row.plan.price_per_million_samples if row.plan is not None else float("inf")


def price_per_million_samples(price_per_hour: float, step_seconds: float, global_batch: int) -> float:
    """What a million samples cost on nodes that cost this much per hour."""
    return price_per_hour / 3600 * step_seconds / global_batch * 1e6


def planned(plan: Plan, profile: Profile, cluster: Cluster, price_per_hour: float) -> Planned:
    """What a row says of its plan; `cluster` has the profile's links."""
    found = plan.predicted
    assert found is not None
    shapes = Counter("-".join(str(hi - lo) for lo, hi in (s.layers for s in r.stages)) for r in plan.replicas)
    return Planned(
        step_seconds=found.step_seconds,
        price_per_million_samples=price_per_million_samples(price_per_hour, found.step_seconds, plan.global_batch),
        samples_per_second=found.samples_per_second,
        pipeline_seconds=found.pipeline_seconds,
        gradient_sync_seconds=found.gradient_sync_seconds,
        embedding_sync_seconds=min(found.gradient_sync_seconds, _tied_seconds(plan, Costs(profile, cluster))),
        optimizer_seconds=found.optimizer_seconds,
        peak_bytes=max(found.peak_bytes.values()),
        gap=found.gap,
        proof=found.proof,
        replicas=len(plan.replicas),
        microbatch_sizes=tuple(sorted({max(r.microbatch_sizes) for r in plan.replicas})),
        stages=tuple(sorted({len(r.stages) for r in plan.replicas})),
        tensor_parallel=tuple(sorted({len(s.devices) for r in plan.replicas for s in r.stages})),
        partitions=dict(shapes.most_common()),
    )


def _tied_seconds(plan: Plan, costs: Costs) -> float:
    """Seconds of the sums of tied parameters, one after the other."""
    tied = [segment for segment in sync_segments(plan, costs) if segment.tied is not None]
    return sum(costs.all_reduce_seconds(segment.owners, segment.size_bytes) for segment in tied)


def nodes_text(nodes: Mapping[str, int]) -> str:
    """`3 p4d + 1 g5`."""
    return " + ".join(f"{count} {name}" for name, count in nodes.items() if count)
