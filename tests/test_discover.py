"""The devices that are found, and a cluster file beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.files.messages import InputError
from hetpipe.measuring import discover
from hetpipe.measuring.discover import as_it_is, cluster_of, one_type_again, there
from hetpipe.processes.world import alone
from tests.support.strategies import make_profile

GIB = 2**30
CARDS = Cluster.parse(
    {
        "format": "hetpipe.cluster/1",
        "device_types": {"rtx3090": {"memory": "24 GiB"}, "gtx1080ti": {"memory": "11 GiB"}},
        "nodes": [{"name": "n0", "devices": {"rtx3090": 1, "gtx1080ti": 2}}],
    },
    "the test's",
)


def test_gpus_that_are_as_declared_but_for_what_a_card_lacks_of_its_nominal_size() -> None:
    there = {
        "n0/0": ("NVIDIA GeForce RTX 3090", round(23.69 * GIB)),
        "n0/1": ("NVIDIA GeForce GTX 1080 Ti", 11 * GIB),
        "n0/2": ("NVIDIA GeForce GTX 1080 Ti", round(10.9 * GIB)),
    }
    cluster, notes = as_it_is(CARDS, there)
    assert {kind: found.memory for kind, found in cluster.device_types.items()} == {
        "rtx3090": round(23.69 * GIB),
        "gtx1080ti": round(10.9 * GIB),
    }
    assert notes == [
        "note: device type 'rtx3090' counts with the 23.69 GiB of n0/0, a NVIDIA GeForce RTX 3090",
        "note: device type 'gtx1080ti' counts with the 10.90 GiB of n0/2, a NVIDIA GeForce GTX 1080 Ti",
    ]
    larger = {device: (name, 2 * size) for device, (name, size) in there.items()}
    assert as_it_is(CARDS, larger) == (CARDS, [])


def test_gpus_that_are_others_than_declared() -> None:
    old, new = ("NVIDIA GeForce GTX 1080 Ti", 11 * GIB), ("NVIDIA GeForce RTX 3090", 24 * GIB)
    with pytest.raises(InputError) as caught:
        as_it_is(CARDS, {"n0/0": old, "n0/1": old, "n0/2": new})
    assert str(caught.value) == (
        "device n0/0 is of type 'rtx3090' with 24.00 GiB in the cluster file, but is a NVIDIA GeForce GTX 1080 Ti with "
        "11.00 GiB: correct the type's memory, or write the node's devices in the order of its GPUs; device type 'gtx1080ti' "
        "stands for unlike GPUs: NVIDIA GeForce GTX 1080 Ti (device n0/1), NVIDIA GeForce RTX 3090 (device n0/2); give each a "
        "type of its own"
    )
    assert as_it_is(CARDS, {"n0/0": ("NVIDIA A10", 24 * GIB)})[1] == ["note: device type 'rtx3090' is a NVIDIA A10"]


def test_the_cpu_of_each_host_is_a_type_of_its_own() -> None:
    one = cluster_of([(0, 0, "cpu", 4 * GIB), (0, 1, "cpu", 4 * GIB)])
    assert list(one.device_types) == ["cpu"]
    two = cluster_of([(1, 0, "cpu", 2 * GIB), (0, 0, "cpu", 4 * GIB), (0, 1, "cpu", 4 * GIB)])
    assert [(d.id, d.type) for d in two.devices] == [("n0/0", "cpu-n0"), ("n0/1", "cpu-n0"), ("n1/0", "cpu-n1")]
    assert two.device_types["cpu-n1"].memory == 2 * GIB
    gpus = cluster_of([(agent, 0, "nvidia-a10", 24 * GIB) for agent in (0, 1)])
    assert list(gpus.device_types) == ["nvidia-a10"]


def test_hosts_whose_times_agree_are_one_type_again() -> None:
    rows = [(agent, 0, "cpu", (8 - agent) * GIB) for agent in range(5)]
    cluster = cluster_of(rows)
    seconds = {"cpu-n0": 1.0, "cpu-n1": 4.0, "cpu-n2": 1.04, "cpu-n3": 1.1, "cpu-n4": 4.1}
    profile = make_profile({kind: [s, 2 * s] for kind, s in seconds.items()})
    grouped, means = one_type_again(cluster, profile)
    assert {d.id: d.type for d in grouped.devices} == {
        "n0/0": "cpu-n0",
        "n1/0": "cpu-n1",
        "n2/0": "cpu-n0",
        "n3/0": "cpu-n3",
        "n4/0": "cpu-n1",
    }
    assert {k: v.memory // GIB for k, v in grouped.device_types.items()} == {"cpu-n0": 6, "cpu-n1": 4, "cpu-n3": 5}
    assert sorted(m.device_type for m in means.measurements) == ["cpu-n0", "cpu-n1", "cpu-n3"]
    for kind, mean in {"cpu-n0": 1.02, "cpu-n1": 4.05, "cpu-n3": 1.1}.items():
        one, whole = means.measurement(kind).forward, profile.measurement("cpu-n0").forward
        assert one == pytest.approx(whole * mean)


def test_precisions_of_a_host_are_not_hosts_that_agree() -> None:
    """Here it is as fast in both, and another host only in one."""
    cluster = cluster_of([(agent, 0, "cpu", GIB) for agent in range(3)])
    rows = make_profile({"cpu-n0": [1.0], "cpu-n1": [1.0], "cpu-n2": [1.0]})
    full = [m.model_copy(update={"precision": "fp32"}) for m in rows.measurements]
    low = [m.slower(1.5 if m.device_type == "cpu-n2" else 1.0).model_copy(update={"precision": "bf16"}) for m in full]
    grouped, means = one_type_again(cluster, rows.model_copy(update={"measurements": (*full, *low)}))
    assert {d.id: d.type for d in grouped.devices} == {"n0/0": "cpu-n0", "n1/0": "cpu-n0", "n2/0": "cpu-n2"}
    found = [(m.device_type, m.precision) for m in means.measurements]
    assert found == [("cpu-n0", "fp32"), ("cpu-n0", "bf16"), ("cpu-n2", "fp32"), ("cpu-n2", "bf16")]


def test_gpus_are_told_apart_by_their_names_not_by_their_times() -> None:
    cluster = cluster_of([(0, 0, "a", GIB), (1, 0, "b", GIB)])
    profile = make_profile({"a": [1.0], "b": [1.0]})
    assert one_type_again(cluster, profile)[0] == cluster


@pytest.mark.parametrize(("own", "host"), [(None, None), ("n1", None), (None, "here")])
def test_nodes_that_are_there(monkeypatch: pytest.MonkeyPatch, own: str | None, host: str | None) -> None:
    """Two have two devices each, of unlike types: which of them is there must be said."""
    nodes = [
        {"name": "n0", "devices": {"rtx3090": 1}},
        {"name": "n1", "devices": {"rtx3090": 2}, **({"host": host} if host else {})},
        {"name": "n2", "devices": {"gtx1080ti": 2}},
    ]
    cluster = Cluster.parse({**CARDS.model_dump(), "nodes": nodes}, "the test's")
    world = replace(alone(), rank_of={"n1/0": 0, "n1/1": 1})
    monkeypatch.setattr(discover, "own_node", lambda: own)
    if own is None and host is None:
        with pytest.raises(
            InputError, match=r"1 agents came for 3 nodes, and nothing says whether one of them is node 'n1' or 'n2'"
        ):
            there(cluster, world)
        return
    assert [device.id for device in there(cluster, world).devices] == ["n1/0", "n1/1"]
    every = replace(world, rank_of={device.id: i for i, device in enumerate(cluster.devices)})
    assert there(cluster, every) is cluster
