"""hetpipe/documents/clusters/assumed.py: what is counted of the framework where nothing was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hetpipe import PlanOptions, make_plan
from hetpipe.cli import commands
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.assumed import assumed_overhead, is_assumed, with_assumed
from hetpipe.documents.profile import Profile
from hetpipe.planning.partition import PartitionError, Problem
from tests.support.strategies import make_cluster, make_profile

MIB, GIB = 2**20, 2**30
PCIE, NVLINK = {"bandwidth": 20e9}, {"bandwidth": 230e9}
PROFILE = make_profile({"a": [1.0] * 4, "b": [1.0] * 4}, layer={"parameter_bytes": GIB // 2})


def device_bytes(nodes: list[dict[str, int]], inside: dict[str, Any], profile: Profile = PROFILE) -> int:
    cluster = make_cluster(nodes, memory=24 * GIB, link=PCIE, inside=inside)
    return assumed_overhead(cluster, profile).device_bytes


def test_a_device_alone_has_a_context_and_two_workspaces() -> None:
    assert device_bytes([{"a": 1}], NVLINK) == (426 + 64) * MIB


def test_communicators_by_the_links_inside_the_nodes() -> None:
    """Three of 2 channels over PCIe, and of 24 where any node has NVLink; a node of one device has no link inside."""
    assert device_bytes([{"a": 2}], PCIE) == (490 + 3 * 2 * 36) * MIB
    assert device_bytes([{"a": 2}, {"b": 1}], NVLINK) == (490 + 3 * 24 * 36) * MIB
    assert device_bytes([{"a": 1}, {"b": 1}], NVLINK) == (490 + 3 * 2 * 36) * MIB


def test_tensor_parallel_stages_have_one_more() -> None:
    m = PROFILE.measurement("a")
    split = PROFILE.model_copy(update={"measurements": (m, m.model_copy(update={"tensor_parallel": 2}))})
    assert device_bytes([{"a": 2}], PCIE, split) == (490 + 4 * 2 * 36) * MIB


def test_measured_links_count() -> None:
    link = {"between": ["n0", "n0"], **NVLINK}
    document = {**PROFILE.model_dump(mode="json", exclude_none=True), "links": [link]}
    cluster = make_cluster([{"a": 2}], memory=24 * GIB, link=PCIE, inside=PCIE)
    measured = Profile.parse(document, "the test's profile")
    assert with_assumed(cluster, measured).runtime_overhead.device_bytes == (490 + 3 * 24 * 36) * MIB


def test_nothing_is_assumed_where_something_is_said() -> None:
    real = make_cluster([{"a": 1}], memory=2 * GIB)
    assert is_assumed(real)
    assert not is_assumed(make_cluster([{"a": 1}], memory=2 * GIB - 1))  # no CUDA card
    told = make_cluster([{"a": 1}], memory=2 * GIB, overhead={"device_bytes": 5})
    assert with_assumed(told, PROFILE) is told
    document = real.model_dump(mode="json", exclude_none=True)
    document["device_types"]["a"]["emulate"] = {"slowdown": 2.0}
    assert not is_assumed(Cluster.parse(document, "emulated"))
    assert not is_assumed(with_assumed(real, PROFILE))


def test_the_command_says_what_it_assumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, cluster = tmp_path / "profile.json", tmp_path / "cluster.yaml"
    PROFILE.save(profile)
    for memory, said in ((24 * GIB, True), (GIB, False)):
        make_cluster([{"a": 1}], memory=memory).save(cluster)
        small = ["--partitioner", "even"] if said else ["--partitioner", "even", "--memory-reserve", "0"]
        arguments = ["plan", "--profile", str(profile), "--cluster", str(cluster), "--global-batch", "2", *small]
        monkeypatch.setattr(sys, "argv", ["hetpipe", *arguments])
        with pytest.raises(SystemExit):
            commands.main()
        assert ("is assumed: 490 MiB, 5% for the allocator" in " ".join(capsys.readouterr().err.split())) == said


def test_plans_leave_room_for_it() -> None:
    """2 GiB of parameters, as much of gradients, twice as much of states: 8; 5 % and a context more with what is assumed."""
    cluster = make_cluster([{"a": 1}], memory=round(8.7 * GIB))
    problem = Problem.of(PROFILE, cluster, 2, PlanOptions())
    assert problem.memory_reserve == 0
    assert problem.cluster.runtime_overhead == assumed_overhead(cluster, PROFILE)
    with pytest.raises(PartitionError, match="are missing on each .a."):
        make_plan(PROFILE, cluster, 2)
    reserved = make_plan(PROFILE, cluster, 2, memory_reserve=0.08)  # said, so nothing is assumed
    assert reserved.predicted is not None
    assert reserved.predicted.peak_bytes == {"n0/0": 8 * GIB}
    roomy = make_plan(PROFILE, make_cluster([{"a": 1}], memory=12 * GIB), 2)
    assert roomy.predicted is not None
    assert roomy.predicted.peak_bytes == {"n0/0": round(1.05 * 8 * GIB) + 490 * MIB}
