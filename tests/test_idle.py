"""The idle time of every device, told apart by cause, is all of it and nothing else."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.plan import Plan
from hetpipe.planning.partition import Problem
from hetpipe.predict.idle import CAUSES, Gap, idle_gaps, idle_seconds
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Span, SpanKind, Timeline
from tests.support.strategies import UNHURRIED, make_cluster, make_profile, problems

EVEN = dict.fromkeys(CAUSES, 0.0)


def random_plan(problem: Problem, seed: int) -> Plan:
    """Any plan of a problem: some devices, any cuts, shares and warm-up depths; memory is not looked at."""
    rng, L = random.Random(seed), len(problem.profile.layers)
    devices = [device.id for device in problem.cluster.devices]
    rng.shuffle(devices)
    replicas: list[dict[str, Any]] = []
    while devices and (not replicas or rng.random() < 0.7):
        n = rng.randint(1, min(len(devices), L))
        cuts = [0, *sorted(rng.sample(range(1, L), n - 1)), L]
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
        depths = sorted((rng.randint(1, len(sizes)) for _ in range(n)), reverse=True)
        stages = [
            {"layers": list(pair), "devices": [devices.pop()], "warmup": depth, "recompute": rng.random() < 0.3}
            for pair, depth in zip(pairwise(cuts), depths, strict=True)
        ]
        replicas.append({"microbatch_sizes": sizes, "stages": stages})
    total = sum(sum(replica["microbatch_sizes"]) for replica in replicas)
    return Plan.parse({"format": "hetpipe.plan/1", "model": "test", "global_batch": total, "replicas": replicas}, "a random plan")


@settings(**UNHURRIED, max_examples=200)
@given(problems(), st.integers(0, 2**32))
def test_the_causes_of_every_device_add_up_to_its_idle_time_and_fill_its_gaps_once(problem: Problem, seed: int) -> None:
    timeline = simulate(random_plan(problem, seed), problem.profile, problem.cluster)
    gaps, sums = idle_gaps(timeline), idle_seconds(timeline)
    assert set(gaps) == set(timeline.busy_seconds())
    for device, busy in timeline.busy_seconds().items():
        idle = timeline.step_seconds - busy
        assert sum(sums[device].values()) == pytest.approx(idle, abs=1e-9)
        assert sums[device]["overhead"] == pytest.approx(0, abs=1e-9)  # a simulated device waits for something
        work = [span for span in timeline.spans if span.device == device and span.kind in ("F", "B", "optimizer")]
        pieces = sorted([*((gap.start, gap.end) for gap in gaps[device]), *((x.start, x.end) for x in work)])
        for (_, end), (start, _) in pairwise(pieces):
            assert start == pytest.approx(end, abs=1e-9)


def at(timeline: Timeline, device: str, when: float) -> str | None:
    """Why a device is idle at one moment, by following what it waits for; None where the amount of draining decides."""
    spans = list(timeline.spans)
    mine = [x for x in spans if x.device == device and x.kind in ("F", "B", "optimizer")]
    if any(x.start <= when < x.end for x in mine):
        return "busy"
    awaited = min((x for x in mine if x.start > when), key=lambda x: x.start, default=None)
    replica, stage = mine[0].replica, mine[0].stage
    backwards = [x for x in spans if x.kind == "B"]
    if when < max(x.end for x in spans if x.replica == replica and x.kind == "optimizer"):
        return "slower optimizer"
    if awaited is None:
        if when >= max(x.end for x in backwards if x.replica == replica):
            return "gradient sum"
        last = max(x.microbatch or 0 for x in backwards if x.replica == replica)
        for x in backwards:
            waits = not any(y.device == x.device and y.kind in ("F", "B") and x.start >= y.end > when for y in spans)
            awaits_last = (x.replica, x.microbatch) == (replica, last) and x.stage < stage and x.start > when and waits
            if awaits_last and under_way(spans, x, when):
                return "link"
        return "fill and drain"
    if under_way(spans, awaited, when):
        return "link"
    first = min((x for x in mine if x.kind == awaited.kind), key=lambda x: x.start)
    if awaited is first:
        return "fill and drain"
    return "slower stage" if awaited.kind == "F" else None


def under_way(spans: Sequence[Span], awaited: Span, when: float) -> bool:
    """Whether the stage of this action is idle, and what it waits for now is a message, or a stage that waits for one."""
    own = [x for x in spans if x.device == awaited.device and x.kind in ("F", "B") and x.end > when]
    awaited = min(own, key=lambda x: (x.start, x.end))
    if awaited.start <= when:
        return False
    beside = awaited.stage + (1 if awaited.kind == "B" else -1)
    source = [
        x
        for x in spans
        if (x.replica, x.stage, x.kind, x.microbatch) == (awaited.replica, beside, awaited.kind, awaited.microbatch)
    ]
    return bool(source) and (when >= source[0].end or under_way(spans, source[0], when))


@settings(**UNHURRIED, max_examples=100)
@given(problems(), st.integers(0, 2**32))
def test_each_moment_has_the_cause_that_following_the_waits_gives(problem: Problem, seed: int) -> None:
    timeline = simulate(random_plan(problem, seed), problem.profile, problem.cluster)
    for device, gaps in idle_gaps(timeline).items():
        for gap in gaps:
            if gap.end - gap.start > 1e-6:
                expected = at(timeline, device, (gap.start + gap.end) / 2)
                assert gap.cause in ({expected} if expected else {"fill and drain", "slower stage"})


@settings(**UNHURRIED, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 1), st.floats(0.25, 4), st.sampled_from(["1f1b", "gpipe"]))
def test_equal_stages_with_free_links_only_fill_and_drain(n: int, m: int, forward: float, ratio: float, schedule: str) -> None:
    """(n − 1)(F + B) on every stage (Narayanan et al. 2021, section 2.2)."""
    timeline = pipeline([forward] * n, m, schedule, backward=ratio)
    bubble = (n - 1) * forward * (1 + ratio)
    for causes in idle_seconds(timeline).values():
        assert causes == pytest.approx(EVEN | {"fill and drain": bubble}, abs=1e-9)


def pipeline(forward: list[float], m: int, schedule: str = "1f1b", backward: float = 2.0, latency: float = 0.0) -> Timeline:
    """A pipeline of one layer a stage, each with its own type of device."""
    kinds = [f"k{s}" for s in range(len(forward))]
    link = {"bandwidth": 1e15, "latency": latency}
    cluster = make_cluster([dict.fromkeys(kinds, 1)], link=link)
    profile = make_profile({kind: [t] * len(forward) for kind, t in zip(kinds, forward, strict=True)}, backward=backward)
    stages = [{"layers": [s, s + 1], "devices": [f"n0/{s}"]} for s in range(len(forward))]
    document = {
        "format": "hetpipe.plan/1",
        "model": "test",
        "global_batch": m,
        "schedule": schedule,
        "replicas": [{"microbatch_sizes": [1] * m, "stages": stages}],
    }
    return simulate(Plan.parse(document, "a plan"), profile, cluster)


def test_the_stage_beside_a_slower_one_waits_for_it() -> None:
    r"""Stage 1 takes twice as long.

    time    0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18
    stage 0 F0  F1  ·   ·   ·   ·   ·   B0  B0  F2  ·   ·   ·   B1  B1  ·   ·   ·   ·   B2 B2
    stage 1 ·   F0  F0  B0  B0  B0  B0  F1  F1  B1  B1  B1  B1  F2  F2  B2  B2  B2  B2
    """
    timeline = pipeline([1.0, 2.0], 3)
    assert timeline.step_seconds == 21
    assert idle_gaps(timeline) == {
        "n0/0": [
            Gap(2, 7, "fill and drain"),
            Gap(10, 13, "slower stage"),
            Gap(15, 16, "fill and drain"),
            Gap(16, 19, "slower stage"),
        ],
        "n0/1": [Gap(0, 1, "fill and drain"), Gap(19, 21, "fill and drain")],
    }


def test_a_message_under_way_is_the_link_whoever_waits_for_it() -> None:
    timeline = pipeline([1.0, 1.0, 1.0], 1, latency=0.5)
    assert idle_gaps(timeline)["n0/2"][:4] == [
        Gap(0, 1, "fill and drain"),
        Gap(1, 1.5, "link"),
        Gap(1.5, 2.5, "fill and drain"),
        Gap(2.5, 3, "link"),
    ]
    assert idle_seconds(timeline) == {f"n0/{s}": pytest.approx(EVEN | {"fill and drain": 6, "link": 2}) for s in range(3)}


def test_what_a_measured_device_does_between_actions_is_overhead() -> None:
    def span(kind: SpanKind, start: float, end: float, i: int | None = None) -> Span:
        return Span(device="n0/0", replica=0, stage=0, kind=kind, start=start, end=end, microbatch=i)

    timeline = Timeline(
        spans=(span("F", 1, 2, 0), span("B", 3, 5, 0), span("sync", 5, 7), span("optimizer", 7, 8)),
        step_seconds=9,
        pipeline_seconds=5,
        sync_seconds=2,
        optimizer_seconds=1,
    )
    assert idle_gaps(timeline)["n0/0"] == [
        Gap(0, 1, "overhead"),
        Gap(2, 3, "overhead"),
        Gap(5, 7, "gradient sum"),
        Gap(8, 9, "overhead"),
    ]
    assert idle_seconds(timeline)["n0/0"] == dict.fromkeys(CAUSES, 0.0) | {"overhead": 3.0, "gradient sum": 2.0}


def test_a_replica_of_one_stage_waits_for_other_replicas_and_never_for_a_stage() -> None:
    """A replica of one stage has no other; it waits for the slower replica, and for the sums.

    time      0     0.5   1   1.5 2.5 3.5 …  9.5 10.5 11.5
    replica 0 O     F     F   B   B   ·   ·  ·   ·    sum
    replica 1 O     O     O   F   F   F   B  B   B    sum
    """
    layer = {"name": "one", "parameter_bytes": 1000, "output_bytes_per_sample": 4, "saved_bytes_per_sample": 4}
    cluster = make_cluster([{"fast": 1, "slow": 1}], link={"bandwidth": 1000.0, "latency": 0.0})
    profile = make_profile({"fast": [1.0], "slow": [3.0]}, layers=[layer], optimizer=0.5)
    replicas = [{"microbatch_sizes": [1], "stages": [{"layers": [0, 1], "devices": [f"n0/{i}"]}]} for i in range(2)]
    document = {"format": "hetpipe.plan/1", "model": "test", "global_batch": 2, "replicas": replicas}
    timeline = simulate(Plan.parse(document, "a plan"), profile, cluster)
    assert timeline.step_seconds == 11.5
    assert idle_gaps(timeline) == {"n0/0": [Gap(3.5, 11.5, "gradient sum")], "n0/1": [Gap(10.5, 11.5, "gradient sum")]}


def test_a_stage_waits_for_the_longer_optimizer_of_its_pipeline_before_its_first_forward() -> None:
    cluster = make_cluster([{"a": 2}], link={"bandwidth": 1e15, "latency": 0.0})
    stages = [{"layers": [s, s + 1], "devices": [f"n0/{s}"]} for s in range(2)]
    document = {
        "format": "hetpipe.plan/1",
        "model": "test",
        "global_batch": 1,
        "replicas": [{"microbatch_sizes": [1], "stages": stages}],
    }
    timeline = simulate(Plan.parse(document, "a plan"), make_profile({"a": [1.0, 2.0]}, optimizer=0.5), cluster)
    assert timeline.step_seconds == 10
    assert idle_gaps(timeline) == {
        "n0/0": [Gap(0.5, 1, "slower optimizer"), Gap(2, 8, "fill and drain")],
        "n0/1": [Gap(1, 2, "fill and drain"), Gap(8, 10, "fill and drain")],
    }
