from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from hetpipe.documents.cluster import Cluster, Link
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError, nearest
from hetpipe.planning.planner import make_plan
from tests.support.documents import cluster_document, plan_document, refused
from tests.support.strategies import clusters, make_cluster, make_profile, profiles

CLUSTER = """
format: hetpipe.cluster/1
device_types:
  a100: {memory: 40 GiB, price_per_hour: 4.10}
  t4:   {memory: 15 GiB, price_per_hour: 0.53}
  slow: {memory: 2 GiB, emulate: {slowdown: 4.0}}
nodes:
  - {name: n0, devices: {a100: 2, t4: 1}, link: {bandwidth: 300 GB/s, latency: 5 us}}
  - {name: n1, devices: {slow: 2}}
link: {bandwidth: 24 Gbit/s, latency: 30 us}
"""


class TestCluster:
    def test_units_and_ids(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.yaml"
        path.write_text(CLUSTER)
        cluster = Cluster.load(path)
        assert cluster.device_types["a100"].memory == 40 * 2**30
        assert [device.id for device in cluster.devices] == ["n0/0", "n0/1", "n0/2", "n1/0", "n1/1"]
        assert [device.type for device in cluster.devices] == ["a100", "a100", "t4", "slow", "slow"]
        assert cluster.link_between("n0", "n0").bandwidth == 300e9
        assert cluster.link_between("n0", "n1").bandwidth == 3e9
        assert cluster.link_between("n1", "n1").latency == pytest.approx(30e-6)
        assert cluster.type_of("n1/0").emulate is not None

    def test_a_link_of_one_pair(self) -> None:
        between = [{"between": ["n1", "n0"], "points": [[0, 1.0], [10, 2.0]]}]
        nodes = [{"name": name, "devices": {"a": 1}} for name in ("n0", "n1", "n2")]
        cluster = Cluster.parse(cluster_document(nodes=nodes, links=between), "x")
        assert cluster.link_between("n0", "n1").seconds(5) == 1.5
        assert cluster.link_between("n0", "n1").seconds(30) == 4.0
        assert cluster.link_between("n0", "n2").bandwidth == 1.0

    def test_adapters_are_as_fast_as_the_fastest_link(self) -> None:
        nodes: list[dict[str, Any]] = [{"name": name, "devices": {"a": 2}} for name in ("n0", "n1", "n2", "n3")]
        nodes[1] |= {"adapters": 3}
        nodes[2] |= {"adapters": "per_device", "adapter": {"bandwidth": "8 GB/s", "bandwidth_in": "1 GB/s"}}
        links = [
            {"between": ["n0", other], "points": [[0, 1.0], [8, 3.0], [16, 3.0 + 8 / rate]]}
            for other, rate in (("n1", 10.0), ("n2", 3.0), ("n3", 1.0))
        ]
        found = Cluster.parse(cluster_document(nodes=nodes, links=links, link={"bandwidth": 5}), "x").adapter_rates
        assert found["n0"] == pytest.approx((10.0, 10.0))  # all of its links are its own
        assert found["n1"] == pytest.approx((30.0, 30.0))
        assert found["n2"] == (16e9, 2e9)
        assert found["n3"] == (5.0, 5.0)

    def test_adapters_make_the_link(self) -> None:
        def cluster(*adapters: dict[str, Any]) -> Cluster:
            nodes = [{"name": f"n{i}", "devices": {"a": 1}, "adapter": adapter} for i, adapter in enumerate(adapters)]
            return Cluster.parse(cluster_document(nodes=nodes, link=None), "x")

        slow, fast = {"bandwidth": 5, "latency": 0.5}, {"bandwidth": 6, "bandwidth_in": 7, "latency": 0.25}
        link = cluster(slow, fast, {"bandwidth": 1}).link_between("n1", "n2")
        assert (link.bandwidth, link.latency) == (7.0, 0.75)
        assert cluster(slow).link is None
        refused(Cluster, cluster_document(nodes=[{"name": "n0", "devices": {"a": 1}, "adapters": 0}]), "adapters")

    def test_unknown_key_names_the_nearest(self) -> None:
        refused(Cluster, cluster_document(divices=1), "unknown key 'divices'; did you mean 'device_types'?")
        types = {"a": {"memry": 100}}
        refused(Cluster, cluster_document(device_types=types), "unknown key 'memry'; did you mean 'memory'?")

    def test_all_faults_at_once(self) -> None:
        nodes = [{"name": "n0", "devices": {"b": 1}}, {"name": "n0", "devices": {"a": 1}}]
        links = [{"between": ["n0", "n9"], "bandwidth": 1}]
        messages = ["'n0' is given 2 times", "unknown device type 'b'", "unknown node 'n9'"]
        refused(Cluster, cluster_document(nodes=nodes, links=links), *messages)

    @pytest.mark.parametrize(
        ("memory", "message"),
        [
            ("24 GiBs", "cannot read '24 GiBs'"),
            ("1.2.3 GiB", "cannot read the number in '1.2.3 GiB'"),
            (-1, "greater than or equal"),
        ],
    )
    def test_quantities(self, memory: Any, message: str) -> None:
        refused(Cluster, cluster_document(device_types={"a": {"memory": memory}}), "device_types.a.memory", message)

    def test_no_devices(self) -> None:
        refused(Cluster, cluster_document(nodes=[{"name": "n0", "devices": {"a": 0}}]), "nodes.0.devices.a")
        refused(Cluster, cluster_document(nodes=[]), "nodes")

    def test_a_link_is_given_one_way(self) -> None:
        refused(Cluster, cluster_document(link={"latency": 1}), "either 'bandwidth'")
        refused(Cluster, cluster_document(link={"points": [[5, 1.0], [5, 2.0]]}), "increasing bytes, got sizes [5, 5]")

    def test_unknown_device_and_missing_link(self) -> None:
        cluster = make_cluster([{"a": 2}])
        with pytest.raises(InputError, match="the cluster has no device 'n0/7'; did you mean 'n0/1'"):
            cluster.device("n0/7")
        bare = Cluster.parse({k: v for k, v in cluster_document().items() if k != "link"}, "x")
        with pytest.raises(InputError, match="no link is known inside node 'n0': give the node a 'link:"):
            bare.link_between("n0", "n0")

    @given(clusters())
    def test_survives_json(self, cluster: Cluster) -> None:
        assert Cluster.parse(json.loads(cluster.to_json()), "x") == cluster


class TestProfile:
    def test_times_between_and_beyond_the_measured_sizes(self) -> None:
        measurement = make_profile({"a": [2.0, 4.0]}, sizes=(1, 3), fixed=0.5).measurements[0]
        for size, factor in ((1, 1.0), (2, 1.5), (3, 2.0), (5, 3.0)):
            forward, backward = measurement.times(size)
            assert np.allclose(forward, [2 * factor, 4 * factor])
            assert np.allclose(backward, 2 * forward)
        assert not np.any(measurement.times(0))

    def test_rows_of_another_length(self) -> None:
        document = make_profile({"a": [1.0, 1.0]}).model_dump(mode="json")
        document["measurements"][0]["optimizer_seconds"] = [0.0]
        document["measurements"].append(document["measurements"][0])
        refused(Profile, document, "a row has 1 numbers for 2 layers", "is given twice")

    def test_sizes_that_fall(self) -> None:
        document = make_profile({"a": [1.0]}, sizes=(1, 2)).model_dump(mode="json")
        document["measurements"][0]["microbatch_sizes"] = [2, 1]
        refused(Profile, document, "microbatch_sizes must increase, got [2, 1]")

    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            ({"trained_bytes": 101}, "trained_bytes (101) are more than parameter_bytes (100), of which they are a part"),
            (
                {"trained_bytes": 60, "tied_trained_bytes": 80},
                "tied_trained_bytes (80) are more than trained_bytes (60) or tied_parameter_bytes (70), and are a part of both",
            ),
            (
                {"tied_trained_bytes": 71},
                "tied_trained_bytes (71) are more than trained_bytes (100) or tied_parameter_bytes (70), and are a part of both",
            ),
            (
                {"trained_bytes": 60},
                "60 of the trained_bytes (60) are not in tied_trained_bytes (0), but only 30 of the parameter_bytes are not tied",
            ),
        ],
    )
    def test_more_trains_than_there_is(self, layer: dict[str, int], message: str) -> None:
        document = make_profile({"a": [1.0]}).model_dump(mode="json")
        document["layers"][0] |= {"parameter_bytes": 100, "tied": "wte", "tied_parameter_bytes": 70} | layer
        refused(Profile, document, f"layers.0: {message}")

    @pytest.mark.parametrize(
        ("layer", "trained"),
        [
            ({}, (100, 70)),
            ({"trained_bytes": 30}, (30, 0)),
            ({"trained_bytes": 80}, (80, 70)),
            ({"trained_bytes": 80, "tied_trained_bytes": 60}, (80, 60)),
        ],
    )
    def test_what_of_a_layer_trains(self, layer: dict[str, int], trained: tuple[int, int]) -> None:
        plain = {"parameter_bytes": 100, "tied": "wte", "tied_parameter_bytes": 70}
        (found,) = make_profile({"a": [1.0]}, layers=[plain | layer]).layers
        assert (found.trained, found.tied_trained) == trained

    def test_a_type_that_was_not_measured(self) -> None:
        profile = make_profile({"a100": [1.0], "t4": [1.0]})
        with pytest.raises(InputError, match="no measurement of device type 'A100'; did you mean 'a100'. known: a100, t4"):
            profile.measurement("A100")
        with pytest.raises(InputError, match="whose layers are split over 2 devices"):
            profile.measurement("t4", 2)

    @given(profiles())
    def test_survives_json(self, profile: Profile) -> None:
        assert Profile.parse(json.loads(profile.to_json()), "x") == profile


class TestPlan:
    def test_good(self, tmp_path: Path) -> None:
        plan = Plan.parse(plan_document(), "x")
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert plan.device_ids == ("n0/0", "n0/1")
        assert plan.replicas[0].depths("1f1b") == (2, 1)
        assert plan.replicas[0].depths("gpipe") == (2, 2)

    def test_the_batch_is_met_exactly(self) -> None:
        refused(Plan, plan_document(global_batch=5), "sum to 4 samples, but global_batch is 5")

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            ([[0, 1], [2, 3]], "stage 1 has layers [2, 3), expected a range that starts at 1"),
            ([[0, 0], [0, 3]], "stage 0 has layers [0, 0)"),
        ],
    )
    def test_layers_are_covered_once(self, layers: list[list[int]], message: str) -> None:
        document = plan_document()
        for stage, ends in zip(document["replicas"][0]["stages"], layers, strict=True):
            stage["layers"] = ends
        refused(Plan, document, message)

    def test_a_device_holds_one_stage(self) -> None:
        document = plan_document()
        document["replicas"][0]["stages"][1]["devices"] = ["n0/0"]
        refused(Plan, document, "device 'n0/0' is used 2 times")

    def test_depths_that_rise(self) -> None:
        document = plan_document()
        document["replicas"][0]["stages"][0]["warmup"] = 1
        document["replicas"][0]["stages"][1]["warmup"] = 2
        refused(Plan, document, "replica 0: warm-up depth 2 of stage 1 is above depth 1 of stage 0")

    def test_for_another_cluster_model_or_batch(self) -> None:
        plan = Plan.parse(plan_document(), "x")
        profile = make_profile({"a": [1.0] * 4})
        document = profile.model_dump(mode="json") | {"model": "other"}
        with pytest.raises(InputError) as caught:
            plan.check(cluster=make_cluster([{"a": 1}]), profile=Profile.parse(document, "x"), global_batch=8, source="plan.json")
        text = str(caught.value)
        assert text.startswith("plan.json does not fit. Make a new plan with 'hetpipe plan'")
        for message in (
            "it was made for another cluster: the cluster has no device 'n0/1'",
            "it is for model 'test', the profile for 'other'",
            "its stages cover layers [0, 3), but the model has 4 layers",
            "its global batch is 4, but 8 is asked for",
        ):
            assert message in text

    def test_the_fingerprint_is_of_what_runs(self) -> None:
        plan = Plan.parse(plan_document(), "x")
        assert Plan.parse(plan_document(partitioner="other"), "x").fingerprint == plan.fingerprint
        assert Plan.parse(plan_document(schedule="gpipe"), "x").fingerprint != plan.fingerprint


NO_NUMBERS = [True, "3", float("inf"), float("nan"), 10**400, -1, 1e301]
NUMBERS = [
    (Cluster, ("link", "bandwidth")),
    (Cluster, ("link", "latency")),
    (Cluster, ("device_types", "a", "memory")),
    (Cluster, ("device_types", "a", "price_per_hour")),
    (Cluster, ("nodes", 0, "devices", "a")),
    (Cluster, ("runtime_overhead", "allocator_factor")),
    (Plan, ("global_batch",)),
    (Plan, ("replicas", 0, "microbatch_sizes", 1)),
    (Plan, ("replicas", 0, "stages", 1, "layers", 1)),
    (Profile, ("layers", 0, "parameter_bytes")),
    (Profile, ("measurements", 0, "microbatch_sizes", 0)),
    (Profile, ("measurements", 0, "forward_seconds", 0, 1)),
    (Profile, ("measurements", 0, "optimizer_seconds", 1)),
    (Profile, ("optimizer", "state_bytes_per_parameter_byte")),
]


@pytest.mark.parametrize(("cls", "path"), NUMBERS, ids=[".".join(map(str, path)) for _, path in NUMBERS])
def test_a_number_is_a_finite_number_within_the_limits(cls: Any, path: tuple[Any, ...]) -> None:
    quantity = path[-1] in ("bandwidth", "latency", "memory", "parameter_bytes")  # which may be text with a unit
    for value in NO_NUMBERS:
        document: Any = {
            Cluster: cluster_document(runtime_overhead={}),
            Plan: plan_document(),
            Profile: make_profile({"a": [1.0, 1.0]}).model_dump(mode="json"),
        }[cls]
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        if quantity and value == "3":
            cls.parse(document, "x")
            continue
        with pytest.raises(InputError) as caught:
            cls.parse(document, "the.file")
        lines = str(caught.value).splitlines()
        assert any(line.startswith(f"  {'.'.join(map(str, path))}: Input should be") for line in lines), (value, lines)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert Plan.parse(plan_document(global_batch=4.0), "x").global_batch == 4
    assert Cluster.parse(cluster_document(device_types={"a": {"memory": 2.4e10}}), "x").device_types["a"].memory == 24 * 10**9
    refused(Plan, plan_document(global_batch=4.5), "global_batch: Input should be a valid integer (got 4.5)")


@pytest.mark.parametrize("memory", ["1e400 GiB", "1e19 B"])
def test_quantities_beyond_the_limit(memory: str) -> None:
    refused(Cluster, cluster_document(device_types={"a": {"memory": memory}}), "device_types.a.memory: Input should be")


def test_nearest() -> None:
    assert nearest("gpt3", ["gpt", "mlp"]) == "; did you mean 'gpt'? known: gpt, mlp"
    assert nearest("zzz", ["gpt", "mlp"]) == "; known: gpt, mlp"


def test_link_seconds() -> None:
    assert Link(bandwidth=10.0, latency=0.5).seconds(20) == 2.5


def test_tied_bytes_are_a_part_of_their_layers() -> None:
    document = make_profile({"a": [1.0, 1.0]}).model_dump(mode="json")
    document["layers"][1] |= {"tied": "x", "parameter_bytes": 100, "tied_parameter_bytes": 101}
    refused(Profile, document, "layers.1: tied_parameter_bytes is 101, more than all parameter_bytes of layer 'layer.1', 100")
    document["layers"][1]["tied_parameter_bytes"] = 100
    document["measurements"].append({**document["measurements"][0], "tensor_parallel": 2, "parameter_bytes": [100, 49]})
    refused(Profile, document, "measurement of 'a' (tensor_parallel 2): layer 'layer.1' has 49 parameter_bytes on each device,")
    document["measurements"][1]["parameter_bytes"] = [100, 50]
    Profile.parse(document, "x")


@pytest.mark.parametrize("seconds", [0.0, 1e-320, 1e-300])
def test_a_device_that_takes_no_time_is_no_measurement(seconds: float) -> None:
    """A search that divides by it would find anything."""
    profile = make_profile({"a": [seconds] * 2, "b": [1.0, 0.0]})
    profile.check(make_cluster([{"b": 1}]))
    with pytest.raises(
        InputError, match=f"all layers together take {3 * 2 * seconds:g} s on device type 'a', which is impossible"
    ):
        make_plan(profile, make_cluster([{"a": 1, "b": 1}]), 4)
