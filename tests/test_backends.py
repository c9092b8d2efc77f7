"""Which back end runs which plan, with how many processes."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Backend, Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, Model, mse
from hetpipe.processes.world import connect, create_world
from hetpipe.runtime import backends
from hetpipe.runtime.backends import check_backend, check_cluster, load_library, processes, replica_seats
from hetpipe.runtime.replicas import PlanGroups
from tests.support.ranks import cluster_of, make_plan

both = pytest.mark.parametrize("backend", ["fairscale", "torchgpipe"])


def test_the_processes_of_a_node_take_its_replicas_in_the_plans_order() -> None:
    plan = make_plan(
        [
            {"cuts": [1, 1], "sizes": [1], "devices": ["n0/1", "n0/0"]},
            {"cuts": [2], "sizes": [1], "devices": ["n1/0"]},
            {"cuts": [2], "sizes": [1], "devices": ["n0/2"]},
        ]
    )
    rank_of = {"n1/0": 0, "n0/1": 2, "n0/0": 1}
    assert replica_seats(plan, rank_of) == {"n0/1": 1, "n0/0": 1, "n1/0": 0, "n0/2": 2}
    with pytest.raises(InputError) as caught:
        replica_seats(plan, {"n1/0": 0, "n0/0": 1})
    assert str(caught.value) == (
        "one process drives each replica of the plan: node 'n0' has 2 replicas and 1 processes, start its agent with "
        "--nproc-per-node=2"
    )


def test_one_process_is_started_for_each_replica_and_each_idle_node() -> None:
    cluster = cluster_of(3, 1, 2)
    rows = [
        {"cuts": [1, 1], "sizes": [1], "devices": ["n0/0", "n0/1"]},
        {"cuts": [2], "sizes": [1], "devices": ["n0/2"]},
        {"cuts": [1, 1], "sizes": [1], "devices": ["n2/1", "n2/0"]},
    ]
    plan = make_plan(rows)
    assert [d.id for d in processes("fairscale", plan, cluster)] == ["n0/0", "n0/2", "n1/0", "n2/1"]
    assert [d.id for d in processes("torch", plan, cluster)] == [d.id for d in cluster.devices]


@both
def test_emulated_devices_are_refused(backend: Backend) -> None:
    document = cluster_of(2).model_dump()
    document["device_types"]["slow"] = {"memory": 10**9, "emulate": {"slowdown": 4.0}}
    emulated = Cluster.parse(document, "a cluster")
    check_cluster("torch", emulated)
    with pytest.raises(InputError) as caught:
        check_cluster(backend, emulated)
    assert "the device types ['slow'] are emulated, each device paced by a process of its own" in str(caught.value)
    assert "use plan.backend=torch, or leave 'emulate' out" in str(caught.value)


@both
def test_tensor_parallel_stages_are_refused(backend: Backend) -> None:
    document = make_plan([{"cuts": [2], "sizes": [1]}], schedule="gpipe").model_dump(mode="json")
    document["replicas"][0]["stages"][0]["devices"] = ["n0/0", "n0/1"]
    with pytest.raises(InputError, match=r"replica 0 splits stage 0 over several devices \(tensor parallelism\), which only"):
        check_backend(backend, Plan.parse(document, "a plan"))


@pytest.mark.parametrize(("backend", "module"), [("fairscale", "fairscale_pipe"), ("torchgpipe", "torchgpipe_gpipe")])
def test_a_library_that_is_missing_is_named(backend: Backend, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"hetpipe.runtime.pipes.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "fairscale.nn" if backend == "fairscale" else backend, None)
    with pytest.raises(InputError) as caught:
        load_library(backend)
    assert str(caught.value).startswith(f"the back end '{backend}' cannot be loaded (")
    assert str(caught.value).endswith("install it with: pip install 'hetpipe[pipes]'")


def test_a_gpu_is_taken_and_its_groups_connected_before_the_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is nothing to connect."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"take {device}"))
    monkeypatch.setattr(PlanGroups, "warm_up", lambda _, device: done.append(f"connect {device}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("give back"))
    monkeypatch.setattr("hetpipe.runtime.backends.begin_backward", lambda device: done.append(f"begin on {device}"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: done.append(f"forget the peak of {device}"))

    def stand_in(*_: object, **__: object) -> object:
        done.append("engine")
        return object()

    monkeypatch.setattr("hetpipe.runtime.backends.TorchEngine", stand_in)
    plan, layers = make_plan([{"cuts": [1], "sizes": [1]}]), nn.Sequential(nn.Linear(2, 2))
    x = torch.zeros(1, 2)
    model = Model(name="one", layers=layers, inputs=x, targets=x, loss=Loss(function=mse))
    connect(use_cuda=False)
    try:
        world = create_world(cluster_of(1))
        for take in (lambda _: torch.device("cuda:1"), lambda _: torch.device("cpu")):
            backends.open_engine("torch", model, plan, world, take, lambda _: None)
    finally:
        torch.distributed.destroy_process_group()
    taken = ["take cuda:1", "give back", "connect cuda:1", "begin on cuda:1", "forget the peak of cuda:1"]
    assert done == [*taken, "engine", "engine"]
