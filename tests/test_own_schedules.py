"""In a loop of one's own each rank has an optimizer and a schedule, which may be unlike those of others: a learning rate for each
layer, groups of parameters of which a stage has none, or nothing that trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import hetpipe
from hetpipe.documents.plan import Plan
from hetpipe.layers.model import Loss, mse
from hetpipe.processes.world import World
from hetpipe.runtime.plan_engine import PlanEngine
from tests.support.nets import batch, build
from tests.support.ranks import cluster_of, make_plan, run_ranks
from tests.support.silence import told
from tests.support.transparency import open_engine

SAVED_UNDER, OTHER = (make_plan([{"cuts": cuts, "sizes": [4, 4]}]) for cuts in ([6, 4], [4, 6]))


def each_layer(engine: PlanEngine) -> list[dict[str, Any]]:
    layers = [(int(name), [*layer.parameters()]) for name, layer in engine.stage.named_children()]
    return [{"params": own, "lr": 0.2 * 0.7**number} for number, own in layers if own]


def first_apart(engine: PlanEngine) -> list[dict[str, Any]]:
    """Two groups where the first layer is, one elsewhere."""
    return each_layer(engine)[:2] if engine.is_first else [{"params": engine.parameters(), "lr": 0.05}]


def sgd(groups: Callable[[PlanEngine], Any]) -> Callable[[PlanEngine], torch.optim.Optimizer]:
    return lambda engine: torch.optim.SGD(groups(engine), lr=0.1, momentum=0.9)


def steps_of(
    world: World,
    folder: Path,
    make: Callable[[PlanEngine], torch.optim.Optimizer],
    count: int,
    plan: Plan = SAVED_UNDER,
    net: str = "blocks",
) -> dict[str, Tensor] | str:
    """The weights after the second of these steps was saved, or after it goes on from there; or what was said."""
    engine = open_engine(world, plan, build(net), *batch(net, 8, 0), Loss(function=mse))
    assert isinstance(engine, PlanEngine)
    optimizer = make(engine)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    try:
        if count < 4:
            words = told(lambda: hetpipe.load_checkpoint(engine, optimizer, folder, scheduler))
            if words is not None:
                return words
        for step in range(4 - count, 4):
            engine.step(*batch(net, 8, step))
            optimizer.step()
            scheduler.step()
            if count == 4 and step == 1:
                hetpipe.save_checkpoint(engine, optimizer, folder, 2, scheduler)
        return {name: value.detach().clone() for name, value in engine.stage.state_dict().items()}
    finally:
        engine.close()


def schedules(world: World, folder: str) -> list[Any]:
    found: list[Any] = []
    for groups in (each_layer, first_apart):
        place = Path(folder) / groups.__name__
        found += [(steps_of(world, place, sgd(groups), 4), steps_of(world, place, sgd(groups), 2))]
        found += [steps_of(world, place, sgd(groups), 2, OTHER)]
    return found


# Of an engine whose first stage runs forwards only. The last is not what `trained_parameters` is for, but works, too.
OPTIMIZERS: dict[str, Callable[[PlanEngine], torch.optim.Optimizer]] = {
    "AdamW": lambda engine: torch.optim.AdamW(engine.trained_parameters(), lr=0.05),
    "fused": lambda engine: torch.optim.AdamW(engine.trained_parameters(), lr=0.05, fused=True),
    "Adagrad": lambda engine: torch.optim.Adagrad(engine.trained_parameters(), lr=0.05, foreach=True),
    "by hand": lambda engine: torch.optim.AdamW((p for p in engine.parameters() if p.requires_grad), lr=0.05),
    "all": lambda engine: torch.optim.AdamW(engine.parameters(), lr=0.05, weight_decay=0.1),
}


def forwards_only(world: World, folder: str) -> list[Any]:
    def run(place: str, make: Callable[[PlanEngine], torch.optim.Optimizer], count: int, plan: Plan) -> Any:
        return steps_of(world, Path(folder) / place, make, count, plan, "first stage frozen")

    under = (4, OTHER), (2, OTHER), (2, SAVED_UNDER)
    return [[run(name, make, *how) for how in under] for name, make in OPTIMIZERS.items()]


def test_a_stage_that_trains_nothing_has_an_optimizer_and_goes_on(tmp_path: Path) -> None:
    """torch's optimizers refuse an empty list of parameters: the documents' own line ended that rank, and so the run."""
    first, second = run_ranks(forwards_only, cluster_of(2), str(tmp_path))
    for name, one, other in zip(OPTIMIZERS, first, second, strict=True):
        whole, again, changed = ({**a, **b} for a, b in zip(one, other, strict=True))
        assert len(whole) == len(build("first stage frozen").state_dict()), name
        for state in (again, changed):
            assert state.keys() == whole.keys()
            assert all(torch.allclose(state[key], value, rtol=0, atol=1e-12) for key, value in whole.items()), name
        for file in (tmp_path / name / "step-00000002").glob("*.safetensors"):
            assert not any("nothing" in key for key in load_file(file))


def test_each_rank_goes_on_with_its_own_schedule(tmp_path: Path) -> None:
    """All ranks took over the first one's: the second's weights were 11 % off, and groups unlike could never be loaded."""
    for rank, found in enumerate(run_ranks(schedules, cluster_of(2), str(tmp_path))):
        for whole, resumed in found[::2]:
            assert whole.keys() == resumed.keys()
            assert all(torch.equal(whole[name], value) for name, value in resumed.items()), rank
        for words in found[1::2]:
            assert "a different schedule for each stage of the plan under which it was saved, and none for" in words
            assert "layers '0' to '3'. Resume under that plan, or give the optimizer of every rank the same groups with" in words
