from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import hetpipe
import hetpipe.planning.pareto
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.catalogue import Catalogue, choice_of
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.partitioners.auto import Auto
from hetpipe.planning import registry
from hetpipe.planning.front import Front, Row
from hetpipe.planning.pareto import make_front
from hetpipe.planning.partition import PartitionError, Problem, Solution
from hetpipe.planning.planner import make_plan
from hetpipe.predict.simulator import simulate
from hetpipe.show.front_report import COLUMNS, draw_front, front_csv
from tests.support.commands import Command
from tests.support.strategies import make_cluster, make_profile

PRICES = {"a": 3.0, "b": 1.0}
LAYER = {"parameter_bytes": 1000, "output_bytes_per_sample": 10, "saved_bytes_per_sample": 100}
PROFILE = make_profile({"a": [1.0] * 3, "b": [2.5] * 3}, sizes=(1, 2), layer=LAYER, optimizer=0.1)


def catalogue(nodes: dict[str, Any], memory: int = 10**6, prices: dict[str, float] | None = None) -> Catalogue:
    return Catalogue.parse(
        {
            "format": "hetpipe.catalogue/1",
            "device_types": {
                kind: {"memory": memory, "price_per_hour": (PRICES if prices is None else prices).get(kind, 0)} for kind in PRICES
            },
            "templates": {"fast": {"devices": {"a": 1}}, "slow": {"devices": {"b": 2}}},
            "nodes": nodes,
            "link": {"bandwidth": 1e5, "latency": 1e-3},
        },
        "the test's catalogue",
    )


def brute(
    source: Catalogue | Cluster, profile: Profile, batch: int, **options: Any
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Counts → (price per million samples, step) of the sub-clusters on the front, each planned by itself."""
    choice = choice_of(source)
    points = {}
    for counts in choice.counts():
        cluster = choice.cluster(counts)
        try:
            found = make_plan(profile, cluster, batch, **options).predicted
        except PartitionError:
            continue
        assert found is not None
        price = sum(cluster.type_of(d.id).price_per_hour for d in cluster.devices)
        points[counts] = (price / 3600 * found.step_seconds / batch * 1e6, found.step_seconds)
    return {
        counts: point
        for counts, point in points.items()
        if not any(p <= point[0] and t <= point[1] and (p, t) != point for p, t in points.values())
    }


class TestFront:
    @pytest.mark.parametrize("memory", [10**6, 12_000], ids=["ample", "tight"])
    def test_is_that_of_brute_force(self, memory: int) -> None:
        source = catalogue({"fast": "0..2", "slow": "0..1"}, memory)
        found = make_front(PROFILE, source, 6)
        expected = brute(source, PROFILE, 6)
        assert len(expected) > 1
        assert {tuple(row.nodes.values()) for row in found.front.front} == set(expected)
        for row in found.front.front:
            assert row.plan is not None
            assert (row.plan.price_per_million_samples, row.plan.step_seconds) == pytest.approx(
                expected[tuple(row.nodes.values())]
            )

    def test_rows_at_other_precisions_where_memory_is_short(self, run: Command, tmp_path: Any) -> None:
        """They were called infeasible."""
        full = [m.model_copy(update={"precision": "fp32"}) for m in PROFILE.measurements]
        half = [m.slower(1.1).model_copy(update={"precision": "fp16", "saved_bytes_per_sample": (10,) * 3}) for m in full]
        own = PROFILE.model_copy(
            update={
                "measurements": (*full, *half),
                "layers": tuple(layer.model_copy(update={"saved_bytes_per_sample": 2000}) for layer in PROFILE.layers),
            }
        )
        source = catalogue({"fast": "0..2", "slow": "0..1"}, 12_000)
        options: dict[str, Any] = {"precision": "auto", "allow_recompute": False, "memory_reserve": 0.0}
        found = make_front(own, source, 6, **options)
        assert {tuple(row.nodes.values()) for row in found.front.front} == set(brute(source, own, 6, **options))
        assert [plan.precision for plan, _ in found.plans] == [{"a": "fp16"}, {"b": "fp16"}]
        told = {tuple(row.nodes.values()): (row.status, row.reason) for row in found.front.rows}
        changed = "no plan fits at the fastest precisions; this one computes in fp16 on {!r} in place of fp32, which takes {}"
        assert told[0, 1] == ("planned", changed.format("b", "fewer bytes"))
        assert told[2, 0] == ("planned", changed.format("a", "fewer bytes"))
        assert told[1, 0][0] == "infeasible"
        own.save(tmp_path / "profile.json")
        source.save(tmp_path / "catalogue.yaml")
        ended = run(
            "plan",
            "--profile",
            tmp_path / "profile.json",
            "--cluster",
            tmp_path / "catalogue.yaml",
            "--global-batch",
            6,
            "--pareto",
            "--precision",
            "auto",
            "--no-recompute",
            "--memory-reserve",
            0,
        )
        assert ended.code == 0
        assert f"note: of the front, or a part of it: {changed.format('a', 'fewer bytes')}" in ended.err

    def test_of_a_cluster_takes_its_nodes_as_a_catalogue(self) -> None:
        cluster = make_cluster([{"a": 1}, {"b": 2}, {"a": 1}], price=PRICES)
        found = make_front(PROFILE, cluster, 6).front
        assert [row.nodes for row in found.rows] == [{"ax1": a, "bx2": b} for a, b in ((0, 1), (1, 0), (1, 1), (2, 0), (2, 1))]
        assert {tuple(row.nodes.values()) for row in found.front} == set(brute(cluster, PROFILE, 6))

    def test_plans_come_with_their_clusters(self) -> None:
        found = make_front(PROFILE, catalogue({"fast": "0..1", "slow": "0..1"}), 6)
        assert len(found.plans) == len(found.front.front)
        for row, (plan, cluster) in zip(found.front.front, found.plans, strict=True):
            assert row.plan is not None
            assert simulate(plan, PROFILE, cluster).step_seconds == row.plan.step_seconds

    def test_counts_what_the_framework_takes_as_plans_do(self) -> None:
        """It was left out of the front, so that plans did not fit where they were to run. A device alone has no communicators."""
        layer = {**LAYER, "parameter_bytes": 2**26}
        own = make_profile({"a": [1.0] * 3, "b": [2.5] * 3}, sizes=(1, 2), layer=layer, optimizer=0.1)
        source = catalogue({"fast": "0..2", "slow": "0..1"}, 2 * 2**30)
        found = make_front(own, source, 6)
        for plan, cluster in found.plans:
            alone, predicted = make_plan(own, cluster, 6).predicted, plan.predicted
            assert predicted is not None
            assert alone is not None
            assert predicted.peak_bytes == simulate(plan, own, cluster).peak_bytes
            assert predicted.step_seconds == alone.step_seconds
            assert min(predicted.peak_bytes.values()) > 490 * 2**20
        devices = {cluster.device_count: cluster.runtime_overhead.device_bytes for _, cluster in found.plans}
        assert devices[1] < devices[2]

    def test_bounds_hold_and_rule_out(self) -> None:
        """b is slower and, by the work it does, dearer: alone it is beaten before it is planned."""
        found = make_front(PROFILE, catalogue({"fast": "0..1", "slow": "0..1"}, prices={"a": 1.0, "b": 5.0}), 6).front
        slow = next(row for row in found.rows if row.nodes == {"fast": 0, "slow": 1})
        assert (slow.status, slow.plan, slow.on_front) == ("dominated", None, False)
        assert slow.reason is not None
        assert slow.reason.startswith("1 fast takes 54.3 s and costs no more")
        step = make_plan(PROFILE, choice_of(catalogue({"slow": 1})).whole(), 6).predicted
        assert step is not None
        assert slow.lower_bound_seconds is not None
        assert slow.lower_bound_seconds <= step.step_seconds

    def test_a_sub_cluster_without_room_says_what_is_missing(self) -> None:
        found = make_front(PROFILE, catalogue({"fast": "0..3"}, 8_000), 6, memory_reserve=0.0).front
        one, two, three = found.rows
        assert (one.status, one.plan, one.lower_bound_seconds) == ("infeasible", None, None)
        assert one.reason is not None
        assert f"{one.missing_bytes} bytes" in one.reason
        assert (two.status, three.status, three.on_front) == ("infeasible", "planned", True)
        assert one.missing_bytes is not None
        assert two.missing_bytes is not None
        assert one.missing_bytes > two.missing_bytes
        assert [r.needed_bytes for r in found.rows] == [8_000 + one.missing_bytes, 8_000 + two.missing_bytes, None]
        needs = [line["oom_gpumem"] for line in csv.DictReader(io.StringIO(front_csv(found)))]
        assert needs[:2] == [str(r.needed_bytes / 1e9) for r in (one, two) if r.needed_bytes is not None]

    def test_a_type_measured_at_larger_sizes_only_leaves_the_others_their_rows(self) -> None:
        document = PROFILE.model_dump()
        (own,) = [m for m in document["measurements"] if m["device_type"] == "b"]
        own["microbatch_sizes"] = [size + 6 for size in own["microbatch_sizes"]]
        found = make_front(Profile.parse(document, "the test's"), catalogue({"fast": "0..1", "slow": "0..1"}), 6).front
        status = {tuple(row.nodes.values()): (row.status, row.reason) for row in found.rows}
        assert status[1, 0][0] == "planned"
        assert status[0, 1][0] == "infeasible"
        assert "6 samples is below the smallest micro-batch measured on the cluster's types, 7" in str(status[0, 1][1])

    def test_limits_leave_rows_out(self) -> None:
        source = catalogue({"fast": "0..2", "slow": 0})
        by_price = make_front(PROFILE, source, 6, max_price_per_hour=3.0).front
        assert [row.status for row in by_price.rows] == ["planned", "excluded"]
        assert by_price.rows[1].reason == "its price of 6 per hour is over the limit of 3"
        assert by_price.rows[1].plan is None
        late = make_front(PROFILE, source, 6, deadline_seconds_per_step=40.0).front
        assert [row.status for row in late.rows] == ["excluded", "planned"]
        assert late.rows[0].reason == "its step takes at least 54.3 s, the deadline is 40 s"
        step = late.rows[1].plan.step_seconds if late.rows[1].plan else 0.0
        between = make_front(PROFILE, source, 6, deadline_seconds_per_step=step * 0.999).front
        assert [row.status for row in between.rows] == ["excluded", "excluded"]
        assert between.rows[1].reason is not None
        assert between.rows[1].reason.startswith("the step of its plan takes")
        assert between.front == ()

    def test_fewer_nodes_serve_more_and_more_nodes_bound_fewer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A planner that fails on more than one node, and one whose plan of two nodes is bad."""
        plain = Auto()

        def broken(problem: Problem) -> Solution:
            if len(problem.cluster.nodes) > 1:
                raise PartitionError("no plan was found in time", out_of_time=True)
            return plain(problem)

        monkeypatch.setattr(registry, "partitioner", lambda _: named(broken))
        one, two = make_front(PROFILE, catalogue({"fast": "1..2"}), 6).front.rows
        assert two.status == "planned"
        assert two.reason == "the plan of 1 fast, which is part of it"
        assert two.plan is not None
        assert one.plan is not None
        assert two.plan.step_seconds == one.plan.step_seconds
        assert two.plan.gap is not None
        assert two.plan.gap > 0.9
        assert (one.on_front, two.on_front) == (True, False)

    def test_what_was_cut_short_on_the_front_is_searched_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A planner that uses up its time at first, and then has a plan of one device only."""
        calls, now = list[int](), [100.0]
        for module in ("pareto", "workers"):
            monkeypatch.setattr(f"hetpipe.planning.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))

        def slow(problem: Problem) -> Solution:
            calls.append(len(problem.cluster.nodes))
            assert problem.time_limit_seconds is not None
            unhurried = replace(problem, time_limit_seconds=None)
            if calls.count(calls[-1]) > 1:
                return Auto()(unhurried)
            now[0] += problem.time_limit_seconds
            one = choice_of(catalogue({"fast": 1})).whole()
            return Solution(plan=Auto()(replace(unhurried, cluster=one)).plan)

        monkeypatch.setattr("hetpipe.planning.workers.registry", SimpleNamespace(partitioner=lambda _: slow))
        one, two = make_front(PROFILE, catalogue({"fast": "1..2"}), 6).front.rows
        assert sorted(calls) == [1, 2, 2]
        assert one.plan is not None
        assert two.plan is not None
        assert two.plan.step_seconds < 0.6 * one.plan.step_seconds

    def test_out_of_time(self) -> None:
        found = make_front(PROFILE, catalogue({"fast": "0..1", "slow": "0..1"}), 6, time_limit_seconds=1e-9).front
        assert {row.status for row in found.rows} == {"unknown"}
        assert {row.reason for row in found.rows} == {"the time limit ended the search before this sub-cluster was planned"}
        assert all(row.lower_bound_seconds is not None for row in found.rows)

    def test_processes_find_the_same(self) -> None:
        source = catalogue({"fast": "0..1", "slow": "0..1"}, 8_500)
        assert make_front(PROFILE, source, 6, workers=2) == make_front(PROFILE, source, 6)

    def test_progress(self) -> None:
        said: list[tuple[int, int, str]] = []
        make_front(PROFILE, catalogue({"fast": "0..2"}), 6, progress=lambda *x: said.append(x))
        assert said[0][:2] == (0, 2)
        assert said[0][2].startswith("0 on the front; next 2 fast: at least 27.15 s")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"partitioner": "chian"}, "unknown partitioner 'chian'; did you mean 'chain'"),
            ({"global_batch": 0}, "the global batch must be at least 1, got 0"),
            ({"memory_reserve": 1.0, "max_price_per_hour": 0}, "memory_reserve is .* got 1.0; max_price_per_hour must be a pos"),
            ({"max_price_per_hour": -1.0}, "max_price_per_hour must be a positive number, got -1.0"),
            ({"source": catalogue({"fast": 1}, prices={})}, "no device type has a price_per_hour"),
            ({"source": catalogue({"fast": "0..99", "slow": "0..99"})}, "the catalogue has 9999 sub-clusters, more than 4000"),
            ({"profile": make_profile({"a": [1.0]})}, "no measurement of device type 'b'"),
        ],
    )
    def test_wrong_options(self, options: dict[str, Any], message: str) -> None:
        given: dict[str, Any] = {"profile": PROFILE, "source": catalogue({"fast": 1, "slow": 1}), "global_batch": 6}
        with pytest.raises(InputError, match=message):
            make_front(**given | options)


def named(planner: Any) -> Any:
    planner.name = "test"
    return planner


def row(price: float, step: float, **keys: Any) -> Row:
    """A planned row of one device and one sample a step."""
    plan = {
        "step_seconds": step,
        "price_per_million_samples": price / 3600 * step * 1e6,
        "samples_per_second": 1 / step,
        "pipeline_seconds": step * 0.5,
        "gradient_sync_seconds": step * 0.375,
        "embedding_sync_seconds": step * 0.125,
        "optimizer_seconds": step * 0.125,
        "peak_bytes": 2 * 10**9,
        "gap": 0.0,
        "proof": "exhaustive",
        "replicas": 3,
        "microbatch_sizes": (1, 2),
        "stages": (1, 2),
        "tensor_parallel": (1,),
        "partitions": {"4": 2, "3-1": 1},
    }
    return Row.model_validate(
        {"nodes": {"x": 1, "y": 2}, "devices": {"a": 1}, "price_per_hour": price, "status": "planned", "plan": plan} | keys
    )


def front(*rows: Row) -> Front:
    return Front.of(rows, model="m", global_batch=1, partitioner="auto")


def test_a_saved_front_is_read_again_where_a_gap_is_not_known(tmp_path: Any) -> None:
    """It was refused for the key that is not written."""
    plan = row(1, 1).plan
    assert plan is not None
    unknown = row(1, 1, plan=plan.model_copy(update={"gap": None, "proof": None}).model_dump())
    written = front(unknown)
    written.save(tmp_path / "front.json")
    assert Front.load(tmp_path / "front.json") == written


class TestMarking:
    def test_what_is_beaten_in_both(self) -> None:
        """(price of a sample, step): (3, 1) and (2, 2) and (1, 4) are the front; (3, 3) and (2, 2.5) lose."""
        rows = [row(p / t, t) for p, t in ((3, 1), (2, 2), (1, 4), (3, 3), (2, 2.5))]
        assert [r.on_front for r in front(*rows).rows] == [True, True, True, False, False]
        assert [r.plan.step_seconds for r in front(*rows).front if r.plan] == [1, 2, 4]

    def test_of_equals_the_one_with_fewest_devices(self) -> None:
        rows = [row(1, 1, devices={"a": 2}), row(1, 1, devices={"a": 1}), row(1, 1, status="excluded")]
        assert [r.on_front for r in front(*rows).rows] == [False, True, False]


class TestCsv:
    def test_columns(self) -> None:
        """FASOP's first; times add up to the step."""
        lost = row(9, 9, status="infeasible", plan=None, missing_bytes=5, needed_bytes=10**9, reason='layer "x", too large')
        lines = list(csv.DictReader(io.StringIO(front_csv(front(row(2, 8), lost)))))
        assert tuple(lines[0]) == COLUMNS
        assert tuple(lines[0])[:7] == ("mbs", "tp", "dp", "pp", "node placement", "partition", "estimated time (step/s)")
        first, second = lines
        assert (first["mbs"], first["tp"], first["dp"], first["pp"]) == ("1/2", "1", "3", "1/2")
        assert first["node placement"] == "['x', 'y', 'y']"
        assert first["partition"] == "2 x [4]; 1 x [3, 1]"
        assert (
            float(first["estimated time (step/s)"])
            == 8
            == sum(
                float(first[key])
                for key in ("pipeline time", "DP all-reduce time", "embedding layer all-reduce time", "optimizer time")
            )
        )
        assert math.isclose(float(first["price_per_step"]), 2 / 3600 * 8)
        assert (first["is_oom"], first["oom_gpumem"], first["on_front"]) == ("False", "2.0", "True")
        assert (second["is_oom"], second["oom_gpumem"], second["estimated time (step/s)"]) == ("True", "1.0", "")
        assert (second["missing_bytes"], second["reason"]) == ("5", 'layer "x", too large')


class TestPicture:
    def test_svg_and_png(self, tmp_path: Any) -> None:
        pytest.importorskip("resvg_py")
        found = front(row(2, 8), row(1, 20), row(2, 30), row(9, 9, status="dominated", plan=None, lower_bound_seconds=5.0))
        draw_front(found, tmp_path / "new" / "front.svg")
        assert "<svg" in (tmp_path / "new" / "front.svg").read_text()
        draw_front(found, tmp_path / "front.png")
        assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
        draw_front(front(row(9, 9, status="infeasible", plan=None)), tmp_path / "empty.png")

    def test_another_ending(self, tmp_path: Any) -> None:
        with pytest.raises(InputError, match=r"cannot write '.*front.pdf': unknown suffix '.pdf'; known: .svg, .png"):
            draw_front(front(row(2, 8)), tmp_path / "front.pdf")


def test_make_front_is_public() -> None:
    assert hetpipe.make_front is make_front
