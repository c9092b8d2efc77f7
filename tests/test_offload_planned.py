"""Offload as a planned choice: what it takes, how it is chosen beside recompute, what is refused, and what a run of it takes."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.files.messages import InputError
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.planner import make_plan
from hetpipe.predict.cost import Costs
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.runtime.backends import check_backend
from tests.support import ranks
from tests.support.jobs import MLP, POINTS, Folder, train
from tests.support.runs import trained
from tests.support.strategies import make_cluster, make_profile

LAYERS: list[dict[str, Any]] = [
    {"parameter_bytes": 100, "output_bytes_per_sample": 10, "saved_bytes_per_sample": 300},
    {"parameter_bytes": 100, "output_bytes_per_sample": 20, "saved_bytes_per_sample": 500},
    {"parameter_bytes": 100, "output_bytes_per_sample": 5, "saved_bytes_per_sample": 400},
]


def profile(rate: float | None = 100.0, overlap: float | None = None, layers: list[dict[str, Any]] | None = None) -> Profile:
    found = make_profile({"a": [1.0, 2.0, 4.0]}, sizes=(1, 2, 4), layers=layers or LAYERS, optimizer=0.1)
    copies = DeviceOverhead(device_type="a", host_bytes_per_second=rate, host_copy_overlap=overlap)
    return found.model_copy(update={"overheads": (copies,)})


def cluster(*counts: int, host: int | None = None, memory: int = 10**6) -> Cluster:
    found = make_cluster([{"a": count} for count in counts], memory=memory)
    return found.with_nodes(node.model_copy(update={"host_memory": host}) for node in found.nodes)


def plan_of(*ways: str, cuts: tuple[int, ...] = (1, 2), sizes: tuple[int, ...] = (2, 2, 2)) -> Plan:
    """Stages on n0, each kept, recomputed or offloaded."""
    plan = ranks.make_plan([{"cuts": cuts, "sizes": sizes}], model=profile().model)
    document = plan.model_dump(mode="json", exclude_none=True)
    for stage, way in zip(document["replicas"][0]["stages"], ways, strict=True):
        stage.update({way: True} if way != "keep" else {})
    return Plan.parse(document, "test plan")


class TestCosts:
    def test_copies_come_on_top_where_nothing_hides_them(self) -> None:
        """Layers 1 and 2 save 900 bytes a sample, 18 s for two at 100 bytes/s."""
        forward, backward = Costs(profile(), cluster(1)).stage_seconds("a", 1, 3, 2)
        assert Costs(profile(), cluster(1)).stage_seconds("a", 1, 3, 2, offload=True) == (forward + 18, backward + 18)

    @pytest.mark.parametrize("rate", [100.0, 1e4])
    def test_hidden_copies_take_as_long_as_the_longer(self, rate: float) -> None:
        costs = Costs(profile(rate, overlap=1.0), cluster(1))
        forward, backward = costs.stage_seconds("a", 1, 3, 2)
        found = costs.stage_seconds("a", 1, 3, 2, offload=True)
        assert found == pytest.approx((max(forward, 1800 / rate), max(backward, 1800 / rate)))

    def test_the_backward_below_a_layer_ends_as_all_of_it(self) -> None:
        costs = Costs(profile(overlap=0.5), cluster(1))
        below = costs.backward_below("a", 0, 3, 2, offload=True)
        assert below[0] == 0
        assert below[2] == pytest.approx(costs.stage_seconds("a", 0, 2, 2, offload=True)[1])

    def test_memory_by_hand(self) -> None:
        """Of each sample the input, the next one's and the output; of two layers what they saved; nothing else."""
        plain, away = (Costs(profile(), cluster(1)).stage_memory("a", 1, 3, samples=4, offload=x) for x in (False, True))
        assert (away.static, away.boundary, away.passing_per_sample) == (plain.static, plain.boundary, plain.passing_per_sample)
        assert away.held_per_sample == plain.held_per_sample - 900 == 10 + 5
        assert away.backward_per_sample == 900
        assert Costs(profile(), cluster(1)).stage_memory("a", 0, 3, samples=4, offload=True).backward_per_sample == 900
        assert Costs(profile(), cluster(1)).host_bytes_per_sample("a", 1, 3) == 900

    def test_a_type_without_a_measurement_is_refused(self) -> None:
        with pytest.raises(InputError, match="offloads on device type 'a', but the profile of 'test' has no host_bytes_per"):
            Costs(profile(rate=None), cluster(1)).stage_seconds("a", 0, 1, 1, offload=True)


class TestPlan:
    def test_a_plan_file_says_it(self, tmp_path: Path) -> None:
        plan = plan_of("offload", "recompute")
        plan.save(tmp_path / "plan.json")
        again = Plan.load(tmp_path / "plan.json")
        assert again == plan
        assert [(s.offload, s.recompute) for s in again.replicas[0].stages] == [(True, False), (False, True)]
        assert again.fingerprint != plan_of("keep", "recompute").fingerprint

    def test_not_both(self) -> None:
        document = plan_of("offload", "keep").model_dump(mode="json", exclude_none=True)
        document["replicas"][0]["stages"][0]["recompute"] = True
        with pytest.raises(InputError, match=r"the stage of layers \[0, 1\] has recompute: true and offload: true. A stage"):
            Plan.parse(document, "plan.json")

    def test_host_memory_of_a_step(self) -> None:
        """Two micro-batches of 2 samples in flight in the first stage, one in the second: 4 x 300 + 2 x 900 bytes."""
        found = simulate(plan_of("offload", "offload"), profile(), cluster(2, host=3000))
        assert found.host_bytes == {"n0": 3000}
        assert simulate(plan_of("offload", "keep"), profile(), cluster(2)).host_bytes == {"n0": 1200}
        assert simulate(plan_of("keep", "recompute"), profile(), cluster(2)).host_bytes == {}

    def test_more_than_the_host_has_is_refused_with_both(self) -> None:
        with pytest.raises(InputError, match=r"offloads .* to the host of node 'n0', whose host_memory is "):
            simulate(plan_of("offload", "offload"), profile(), cluster(2, host=2500))

    def test_the_footprint_is_within_the_peak(self) -> None:
        plan, problem = plan_of("offload", "offload"), (profile(), cluster(2))
        found = with_footprint(simulate(plan, *problem), plan, *problem)
        for device, rows in found.memory.items():
            assert max(size for _, size in rows) <= found.peak_bytes[device]

    @pytest.mark.parametrize("backend", ["fairscale", "torchgpipe"])
    def test_libraries_refuse_it_by_name(self, backend: Any) -> None:
        pytest.importorskip(backend)
        with pytest.raises(InputError, match="replica 0 offloads activations to the host in stages 0, 1, which only"):
            check_backend(backend, plan_of("offload", "offload"))


def least(way: str) -> int:
    """Bytes of a device with which one of three layers on one device trains micro-batches of one sample so."""
    return simulate(plan_of(way, cuts=(3,), sizes=(1, 1, 1, 1)), profile(), cluster(1)).peak_bytes["n0/0"]


def ways(plan: Plan) -> list[str]:
    return ["offload" if s.offload else "recompute" if s.recompute else "keep" for r in plan.replicas for s in r.stages]


def planned(own: Profile, on: Cluster, batch: int = 4, **options: Any) -> Plan:
    return make_plan(own, on, batch, memory_reserve=0.0, **options)


def wide_ends() -> tuple[Profile, int]:
    """Layers with wide ends, whose inputs recompute keeps, and of which most save little; the memory with which they offload."""
    layers = [{**LAYERS[0], "saved_bytes_per_sample": 100, "output_bytes_per_sample": 900}] * 5 + [LAYERS[2]]
    wide = make_profile({"a": [1.0] * 6}, sizes=(1,), layers=layers, optimizer=0.1)
    wide = wide.model_copy(update={"overheads": profile(1e6).overheads})
    plan = ranks.make_plan([{"cuts": [6], "sizes": [1], "offload": True}], model=wide.model)
    return wide, simulate(plan, wide, cluster(1)).peak_bytes["n0/0"]


class TestPlanner:
    @pytest.mark.parametrize(("rate", "way"), [(1e6, "offload"), (1.0, "recompute")])
    def test_what_is_faster_is_chosen(self, rate: float, way: str) -> None:
        memory = max(least("offload"), least("recompute"))
        assert memory < least("keep")
        found = planned(profile(rate), cluster(1, host=10**6, memory=memory))
        assert ways(found) == [way]
        assert found.predicted is not None
        assert found.predicted.host_bytes == ({"n0": 1200} if way == "offload" else None)

    def test_where_all_fits_nothing_is_offloaded_and_the_bound_is_as_good(self) -> None:
        plain, found = (planned(profile(1e9), cluster(1, 1, host=host), 8) for host in (None, 10**6))
        assert found.predicted is not None
        assert plain.predicted is not None
        assert found.replicas == plain.replicas
        assert (found.predicted.proof, plain.predicted.proof) == ("exhaustive", "exhaustive")
        assert found.predicted.gap == plain.predicted.gap == 0

    def test_offload_where_nothing_else_fits(self) -> None:
        wide, memory = wide_ends()
        with pytest.raises(PartitionError):
            planned(wide, cluster(1, memory=memory), 1)
        assert ways(planned(wide, cluster(1, host=10**6, memory=memory), 1)) == ["offload"]

    @pytest.mark.parametrize("partitioner", ["auto", "chain", "exhaustive"])
    def test_hosts_that_lend_too_little_are_named_with_what_is_enough(self, partitioner: str) -> None:
        wide, memory = wide_ends()
        found = planned(wide, cluster(1, host=10**6, memory=memory), 1, partitioner=partitioner).predicted
        assert found is not None
        assert found.host_bytes is not None
        needed = found.host_bytes["n0"]
        message = (
            f"hosts was found; .* stages offload {needed} bytes to the host of node 'n0', whose host_memory is {needed - 1} bytes"
            f". It would fit if you raise the host_memory of node 'n0' to {needed} bytes, or give each 'a' "
        )
        with pytest.raises(PartitionError, match=message) as caught:
            planned(wide, cluster(1, host=needed - 1, memory=memory), 1, partitioner=partitioner)
        assert caught.value.missing_bytes == 1
        assert planned(wide, cluster(1, host=needed, memory=memory), 1, partitioner=partitioner).predicted == found

    def test_a_host_with_too_little_memory_recomputes(self) -> None:
        memory = max(least("offload"), least("recompute"))
        assert ways(planned(profile(1e6), cluster(1, host=1199, memory=memory))) == ["recompute"]
        assert ways(planned(profile(1e6), cluster(1, host=1200, memory=memory))) == ["offload"]

    def test_nobody_offloads_where_nobody_said_so(self) -> None:
        memory = max(least("offload"), least("recompute"))
        without = cluster(1, memory=memory), cluster(1, host=10**6, memory=memory)
        assert ways(planned(profile(1e6), without[0])) == ["recompute"]
        assert ways(planned(profile(None), without[1])) == ["recompute"]
        assert ways(planned(profile(1e6), without[1], allow_offload=False)) == ["recompute"]
        assert ways(planned(profile(1e6), without[1], allow_recompute=False)) == ["offload"]

    def test_what_is_asked_for_and_cannot_be_is_refused(self) -> None:
        def asked(own: Profile, on: Cluster, **options: Any) -> None:
            Problem.of(own, on, 4, PlanOptions(allow_offload=True, **options))

        asked(profile(), cluster(1, host=1))
        with pytest.raises(InputError, match="no node of the cluster says how much of its host's memory stages may offload"):
            asked(profile(), cluster(1))
        with pytest.raises(InputError, match="the profile of 'test' has no host_bytes_per_second of a device type whose"):
            asked(profile(None), cluster(1, host=1))
        with pytest.raises(InputError, match="but only the back end 'torch' can offload, not 'fairscale'"):
            asked(profile(), cluster(1, host=1), backend="fairscale")

    @pytest.mark.parametrize(("memory", "host"), [(3000, 1500), (4000, 10**6), (5000, 1500), (7000, 10**6)])
    def test_no_plan_that_fits_is_below_the_bound(self, memory: int, host: int) -> None:
        """All cuts of two stages, all ways of each, and all sizes."""
        own, on, steps = profile(60.0), cluster(2, host=host, memory=memory), list[float]()
        kinds = ("keep", "recompute", "offload")
        for cut, first, second, size in product((1, 2), kinds, kinds, (1, 2, 4)):
            plan = plan_of(first, second, cuts=(cut, 3 - cut), sizes=(size,) * (8 // size))
            with suppress(InputError):  # too much for the host
                timeline = simulate(plan, own, on)
                if max(timeline.peak_bytes.values()) <= memory:
                    steps.append(timeline.step_seconds)
        assert steps
        found = planned(own, on, 8).predicted
        assert found is not None
        assert found.lower_bound_seconds is not None
        assert found.lower_bound_seconds <= min(steps) * (1 + 1e-9)
        assert found.step_seconds <= min(steps) * (1 + 1e-9)


def test_a_stage_that_offloads_trains_in_the_memory_and_the_time_that_are_predicted(tmp_path: Path) -> None:
    """64 micro-batches, of which three, two and one are in flight."""
    folder = Folder(tmp_path)
    model, data = {**MLP, "args": {**MLP["args"], "width": 256}}, {**POINTS, "args": {**POINTS["args"], "samples": 256}}
    section = train(global_batch=256, steps=2, dtype="float32", evaluate_samples=0)
    file = folder.ready(
        (3,), [{"cuts": [2, 2, 2], "sizes": [4] * 64, "offload": True}], slowdown=1.0, model=model, data=data, train=section
    )
    measured = folder.read("profile.json")
    measured["overheads"] = [{"device_type": "cpu", "host_bytes_per_second": 1e9}]
    folder.write("profile.json", measured)
    found = trained(file)
    assert found.predicted is not None
    assert found.peak_bytes == pytest.approx(dict(found.predicted.peak_bytes), rel=0.05)
