"""`hetpipe.wrap`: one's own model in one's own loop, started as torchrun starts it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import hetpipe
from bench.reference import ReferenceEngine
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.documents.plan import Plan
from hetpipe.layers.device import one_thread
from hetpipe.layers.model import Loss, cross_entropy, mse
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.training.own.loop import _nodes_of
from tests.support.nets import batch, build
from tests.support.programs import alone, own_loop
from tests.support.ranks import cluster_of, make_plan

PLAN = make_plan([{"cuts": [4, 3, 3], "sizes": [4] * 6}, {"cuts": [6, 4], "sizes": [4, 4]}])


def wrapped(plan: Plan, *arguments: Any, counts: tuple[int, ...] = (3, 2)) -> list[dict[str, Any]]:
    return start_ranks(own_loop, (plan, *arguments), cluster_of(*counts).devices)


@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
def test_a_loop_of_ones_own(tokens: bool, tmp_path: Path) -> None:
    net = "tied" if tokens else "blocks"
    model, (inputs, targets) = build(net), batch(net, 32, 0)
    engine = ReferenceEngine(model, Loss(function=cross_entropy, weight="tokens") if tokens else Loss(function=mse))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.2, momentum=0.9)
    losses = []
    with one_thread(torch.device("cpu")):
        for _ in range(3):
            losses.append(engine.step(inputs, targets))
            assert engine.clip_grad_norm_(0.5) > 0.5
            optimizer.step()
    truth = model.state_dict()
    found = wrapped(PLAN, (), tokens, str(tmp_path / "saved"))
    assert {name for result in found for name in result["state"]} == set(truth)
    for result in found:
        assert result["losses"] == pytest.approx(losses, abs=1e-10)
        assert result["evaluation"].loss == pytest.approx(engine.evaluate(inputs, targets).loss, abs=1e-10)
        for name, value in result["state"].items():
            assert torch.allclose(value, truth[name], rtol=0, atol=1e-10), name
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        assert set(result["names"]) == {name for name in result["state"] if name in parameters}
        check_saving(result, tmp_path / "saved")
    check_not_saved(found, tmp_path / "saved")
    assert sorted(name for result in found for name in result["read"]) == found[0]["files"]  # each once
    whole, *others = [result["whole"] for result in found]
    assert others == [None] * 4
    assert list(whole) == list(truth)
    assert {name: float((value - truth[name]).abs().max()) for name, value in whole.items()} == pytest.approx(
        dict.fromkeys(truth, 0.0), abs=1e-10
    )
    again = build(net)
    again.load_state_dict({name: torch.zeros_like(value) for name, value in again.state_dict().items()})
    assert hetpipe.load_weights(again, tmp_path / "saved") == 9
    assert hetpipe.load_weights(again, tmp_path / "saved" / "step-00000003") == 3
    assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())


def check_saving(result: dict[str, Any], folder: Path) -> None:
    """What was saved goes on bit for bit; what is of something else is refused; no gradient outlives its use."""
    assert (result["step"], result["back"], result["stale"], result["kept"]) == (3, True, [], [])
    assert result["first"] == result["again"]
    assert result["schedule"] == (7, 0.1, 1)  # engine.steps, the learning rate, the schedule's own count
    assert [p.name for p in list_checkpoints(folder)] == ["step-00000003", "step-00000009"]
    assert result["older"] == (3, 3)  # a checkpoint that has no engine.steps
    name = next(iter(result["state"]))
    surplus, shape, lacks, plain, none, other, odd, apart = result["refused"]
    assert "this is not a state of the model:\n  it has '99.weight', which the model has not" in surplus
    assert f"\n  {name!r} has shape (1, 2, 3), in the model (" in shape
    assert lacks.endswith(f"\n  it has no {name!r}")
    assert "holds another model or optimizer; name another folder to start anew:\n" in plain
    assert "it has momentum_buffer; the job's optimizer keeps nothing" in plain
    was = f"checkpoint {folder}/step-00000003 was saved with the scheduler ExponentialLR, but load_checkpoint was given "
    assert none == f"{was}no scheduler. Give it the same one, or name another folder to start anew"
    assert other == f"{was}the scheduler StepLR. Give it the same one, or name another folder to start anew"
    assert odd.startswith("the state of the scheduler ExponentialLR cannot be saved, because ")
    assert odd.endswith("\n  seen, a Tensor")
    assert apart == "save_checkpoint was given the scheduler ExponentialLR on rank 0, and no scheduler on rank 1"


def check_not_saved(found: list[dict[str, Any]], folder: Path) -> None:
    """A file that cannot be written, on one rank only, and folders of which each rank has its own: told on every rank, nothing is
    left of it, and what was saved before stays."""
    where = rf"{folder}/step-00000009: it needs [\d.]+ KiB, and [\d.]+ [KMGTP]iB are free there"
    for result in found:
        assert re.fullmatch(
            rf"cannot write the checkpoint {where}; rank 1 on host \S+: OSError: \[Errno 27\] File too large", result["failed"]
        )
        assert result["left"] == ["step-00000003"]
        refused, lost, unseen = result["apart"]
        assert refused.startswith("loop (the folder of checkpoints) is not one folder for all ranks, of which each writes ")
        assert re.search(
            rf":\n  rank 0 on host (\S+) writes into {found[0]['own']}\n  rank 1 on host \1 does not see that in "
            rf"{found[1]['own']}\n",
            refused,
        )
        assert re.search(r"; the main rank does not see the \d+ bytes that another has written as shard-\S+\.safetensors$", lost)
        assert f"\n  rank 1 on host {socket.gethostname()} does not see trainer.json in {found[1]['own']}/step-00000009" in unseen
        assert result["one"] == ["step-00000003", "step-00000009"]
    assert [result["there"] for result in found] == [["step-00000009", "step-00000009/trainer.json"], [], [], [], []]


def test_one_process_without_torchrun() -> None:
    model, (inputs, targets) = build("blocks"), batch("blocks", 8, 0)
    engine = ReferenceEngine(model, Loss(function=mse))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.2)
    losses = []
    for _ in range(2):
        losses.append(engine.step(inputs, targets))
        optimizer.step()
    (found,) = start_ranks(alone, (make_plan([{"cuts": [10], "sizes": [3, 3, 2]}]),), cluster_of(1).devices)
    assert found["losses"] == pytest.approx(losses, abs=1e-12)
    assert all(torch.allclose(v, model.state_dict()[k], rtol=0, atol=1e-12) for k, v in found["state"].items())


def test_models_that_differ_are_refused() -> None:
    told = {result["message"] for result in wrapped(PLAN, (1, 1, 1, 2, 2))}  # layer 5 is held by ranks 1 and 3
    assert len(told) == 1
    message = told.pop()
    assert message.startswith("the ranks built different models; call torch.manual_seed with the same seed on every rank")
    assert "layers 4:6 (ranks [1, 3])" in message


def test_processes_too_many_are_told() -> None:
    plan = make_plan([{"cuts": [4, 6], "sizes": [4, 4]}])
    for counts, message in (
        ((2, 1), "is no node of the cluster file: 2 agents for the nodes ['n0']"),
        ((3,), "is beyond node 'n0', which has 2 devices in the cluster file; start that agent with --nproc-per-node=2"),
    ):
        assert all(message in result["message"] for result in wrapped(plan, counts=counts))


def test_a_process_without_a_part_is_told_and_the_others_train() -> None:
    rows = [{"layers": [0, 4], "devices": ["n0/0"]}, {"layers": [4, 10], "devices": ["n0/2"]}]
    plan = Plan.parse(
        {"format": "hetpipe.plan/1", "model": "m", "global_batch": 8, "replicas": [{"microbatch_sizes": [4, 4], "stages": rows}]},
        "a plan",
    )
    first, idle, last = wrapped(plan, counts=(3,))
    assert idle == {"message": "rank 1 has no part in the plan, which uses ['n0/0', 'n0/2']; start one process per device of it"}
    assert first["losses"] == last["losses"]
    assert len(first["losses"]) == 3


def test_nodes_of_a_plan_in_natural_order() -> None:
    rows = [
        {"layers": [0, 1], "devices": ["n10/0"]},
        {"layers": [1, 2], "devices": ["n2/3"]},
        {"layers": [2, 3], "devices": ["n2/1"]},
    ]
    plan = Plan.parse(
        {"format": "hetpipe.plan/1", "model": "m", "global_batch": 1, "replicas": [{"microbatch_sizes": [1], "stages": rows}]},
        "a plan",
    )
    assert [(node.name, node.devices) for node in _nodes_of(plan)] == [("n2", {"any": 4}), ("n10", {"any": 1})]
