"""Which process is which device, and what the processes say to each other."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hetpipe.documents.cluster import Cluster, Node
from hetpipe.files.messages import InputError
from hetpipe.measuring.discover import note_missing_gpus
from hetpipe.processes.world import World, bind_devices, connect
from tests.support.programs import save_late, talk
from tests.support.ranks import cluster_of, run_ranks


def node(name: str, count: int = 1, host: str | None = None) -> Node:
    return Node(name=name, devices={"cpu": count}, host=host)


@pytest.mark.parametrize(
    ("nodes", "places", "bound"),
    [
        pytest.param(
            [node("n0", 2), node("n1")],
            [("a", 0, 0), ("a", 0, 1), ("b", 1, 0)],
            {"n0/0": 0, "n0/1": 1, "n1/0": 2},
            id="agents in the order of the nodes",
        ),
        pytest.param(
            [node("n0", 2), node("n1", 3)],
            [("a", 1, 0), ("a", 0, 1), ("a", 1, 2), ("a", 0, 0), ("a", 1, 1)],
            {"n1/0": 0, "n0/1": 1, "n1/2": 2, "n0/0": 3, "n1/1": 4},
            id="two agents on one machine, ranks in any order",
        ),
        pytest.param(
            [node("n0", host="a"), node("n1", host="b")],
            [("b", 0, 0), ("a", 1, 0)],
            {"n1/0": 0, "n0/0": 1},
            id="named hosts, whatever their agents' numbers",
        ),
        pytest.param(
            [node("n0"), node("n1", host="b"), node("n2")],
            [("c", 0, 0), ("b", 1, 0), ("a", 2, 0)],
            {"n0/0": 0, "n1/0": 1, "n2/0": 2},
            id="one named host, the others in order",
        ),
        pytest.param(
            [node("n0", host="a"), node("n1", host="a")],
            [("a", 3, 0), ("a", 5, 0)],
            {"n0/0": 0, "n1/0": 1},
            id="two nodes of one host",
        ),
        pytest.param(
            [node("n0", 4), node("n1", 2)], [("a", 0, 0), ("a", 0, 1)], {"n0/0": 0, "n0/1": 1}, id="fewer processes than devices"
        ),
        pytest.param(
            [node("n0", 2), node("n1"), node("n2", host="b")],
            [("a", 0, 0), ("b", 1, 0), ("a", 2, 0), ("a", 2, 1)],
            {"n1/0": 0, "n2/0": 1, "n0/0": 2, "n0/1": 3},
            id="agents in another order, told apart by their size",
        ),
        pytest.param(
            [node("n0", 2), node("n1", 1)],
            [("a", 0, 0), ("b", 1, 0)],
            {"n0/0": 0, "n1/0": 1},
            id="one process a replica, as the sizes say nothing",
        ),
    ],
)
def test_devices_are_bound(nodes: list[Node], places: list[tuple[str, int, int]], bound: dict[str, int]) -> None:
    assert bind_devices(nodes, places) == bound


@pytest.mark.parametrize(
    ("nodes", "places", "message"),
    [
        pytest.param(
            [node("n0"), node("n1")],
            [("a", 0, 0), ("b", 1, 0), ("c", 2, 0)],
            "agent 2 on host 'c' is no node of the cluster file: 3 agents for the nodes ['n0', 'n1']",
            id="too many agents",
        ),
        pytest.param(
            [node("n0", host="a")],
            [("b", 0, 0)],
            "agent 0 on host 'b' is no node of the cluster file: 1 agents for the nodes ['n0']",
            id="another host",
        ),
        pytest.param(
            [node("n0", 2)],
            [("a", 0, 0), ("a", 0, 1), ("a", 0, 2)],
            "local rank 2 on host 'a' is beyond node 'n0', which has 2 devices in the cluster file; "
            "start that agent with --nproc-per-node=2",
            id="too many local ranks",
        ),
    ],
)
def test_processes_that_are_no_devices(nodes: list[Node], places: list[tuple[str, int, int]], message: str) -> None:
    with pytest.raises(InputError) as caught:
        bind_devices(nodes, places)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("called", "partly", "bound"),
    [
        pytest.param({}, False, {"n0/0": 0, "n1/0": 1, "n1/1": 2}, id="by number"),
        pytest.param({}, True, {"n2/0": 0, "n1/0": 1, "n1/1": 2}, id="of some nodes, by size"),
        pytest.param({0: "n3"}, True, {"n3/0": 0, "n1/0": 1, "n1/1": 2}, id="one says which it is"),
        pytest.param({1: "n4", 0: "n2"}, False, {"n2/0": 0, "n4/0": 1, "n4/1": 2}, id="all say so"),
    ],
)
def test_some_of_the_nodes(called: dict[int, str], partly: bool, bound: dict[str, int]) -> None:
    nodes = [node("n0", 3), node("n1", 2), node("n2"), node("n3"), node("n4", 2, host="z")]
    places = [("a", 0, 0), ("b", 1, 0), ("b", 1, 1)]
    assert bind_devices(nodes, places, called, partly=partly) == bound


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ({1: "n9"}, "HETPIPE_NODE is 'n9' on host 'b' (agent 1), but the cluster file has only the nodes ['n0', 'n1']"),
        (
            {0: "n1", 1: "n1"},
            "HETPIPE_NODE is 'n1' on host 'b' (agent 1), and agent 0 on host 'a' says the same: each agent is a node of its own",
        ),
    ],
)
def test_agents_that_are_no_nodes(called: dict[int, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        bind_devices([node("n0"), node("n1")], [("a", 0, 0), ("b", 1, 0)], called)
    assert str(caught.value) == message


@pytest.fixture(scope="module")
def heard() -> list[dict[str, Any]]:
    return run_ranks(talk, cluster_of(2, 1))


def test_a_process_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="local rank 2 has no GPU: this host shows 2; start at most one process per GPU"):
        connect(use_cuda=True)


@pytest.mark.parametrize(
    ("backends", "use_cuda", "message"),
    [
        ("cpu:gloo,cuda:gloo", True, "GPUs, whose stages need NCCL: make it with init_process_group('cpu:gloo,cuda:nccl'), or"),
        ("cpu:gloo", True, "GPUs, whose stages need NCCL"),
        ("cuda:nccl", False, "CPUs (no GPU is found, or they are emulated), whose stages need gloo: make it with init_"),
    ],
)
def test_a_process_group_of_the_wrong_backend_is_refused(
    monkeypatch: pytest.MonkeyPatch, backends: str, use_cuda: bool, message: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    with pytest.raises(InputError) as caught:
        connect(use_cuda=use_cuda)
    start = f"the process group that was made before has the backends {backends!r}, but the devices are {message}"
    assert str(caught.value).startswith(start)
    connect(use_cuda=not use_cuda)


def test_a_process_group_of_ones_own_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL alone, too; the GPU is that of the local rank."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda backends=backends: backends)
        connect(use_cuda=True)
    assert taken == [1, 1]


def test_every_rank_knows_its_device(heard: list[dict[str, Any]]) -> None:
    assert [h["rank"] for h in heard] == [0, 1, 2]
    assert [h["device"] for h in heard] == ["n0/0", "n0/1", "n1/0"]
    assert [h["main"] for h in heard] == [True, False, False]
    assert all(h["rank_of"] == {"n0/0": 0, "n0/1": 1, "n1/0": 2} for h in heard)


def test_messages_to_all(heard: list[dict[str, Any]]) -> None:
    for h in heard:
        assert h["sum"] == [3.0, 1.5]
        assert h["gather"] == ["from 0", "from 1", "from 2"]
        assert h["first"] == 10


def test_a_part_of_the_world(heard: list[dict[str, Any]]) -> None:
    assert [h["part"] for h in heard] == [None, "n0/1", "n1/0"]
    assert all(h["part ranks"] == (1, 2) for h in heard)
    assert "part sum" not in heard[0]
    for h in heard[1:]:
        assert h["part sum"] == [3.0]
        assert h["part gather"] == [1, 2]
        assert h["part first"] == 1


def test_a_device_without_a_process(heard: list[dict[str, Any]]) -> None:
    message = "the plan uses ['n7/3'], but this job has only the devices ['n0/0', 'n0/1', 'n1/0']; start one process per device"
    assert [h["message"] for h in heard] == [message] * 3


def test_ranks_that_were_told_otherwise_are_refused_on_all_of_them(heard: list[dict[str, Any]]) -> None:
    host = socket.gethostname()
    message = (
        "the ranks differ in what must be the same on all hosts; give these the same files, settings and versions:\n"
        f"  train.seed is 0 on ranks 0, 1 (host {host}), 1 on rank 2 (host {host})"
    )
    assert [h["differs"] for h in heard] == [message] * 3


def test_a_rank_waits_for_others_while_it_hears_them_and_not_while_it_works(heard: list[dict[str, Any]]) -> None:
    assert [h["waits"] for h in heard] == [[False, True, False]] * 3


def test_loading_and_saving_may_take_longer_than_a_step(tmp_path: Path) -> None:
    """The last rank is 6 s late three times, where a step would wait for 4 s."""
    first, last = run_ranks(save_late, cluster_of(2), str(tmp_path))
    assert first["losses"] == last["losses"]
    assert len(set(first["losses"])) == 1, "nothing is trained, and what is loaded is what was saved"


def test_missing_gpus_are_noted_and_shared_cores_where_they_are_shared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster file of someone else's GPUs runs on any machine, but not without a word."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cluster = cluster_of(2, 1)

    def noted(cluster: Cluster, *hosts: str) -> str:
        world = World(rank=0, size=3, device_id="n0/0", rank_of={}, ranks=(0, 1, 2), hosts=hosts, control=None)
        note_missing_gpus(world, cluster)
        return capsys.readouterr().err

    gpus = Cluster.parse(yaml.safe_load(cluster.to_json().replace("cpu", "a100")), "gpus")
    start = "note: no GPU is found, so devices of type a100 are plain CPU processes"
    assert noted(gpus, "a", "b", "c") == f"{start}\n"  # nobody shares anything
    assert noted(gpus, "a", "a", "b") == f"{start}, which share the cores of their host (2 on a)\n"
    assert noted(cluster, "a", "a", "a") == ""
