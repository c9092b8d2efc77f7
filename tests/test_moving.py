"""What goes from plan to plan in one run: only what changes its place, and the same numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.hf.chain import HFLayer
from hetpipe.layers.weights import empty_names, materialise
from hetpipe.processes.world import World
from hetpipe.runtime.checks import stale
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.directing.drift import Drift
from hetpipe.training.moving.modules import Modules
from hetpipe.training.observers.records import StepRecord
from hetpipe.training.start import run_everywhere
from hetpipe.training.trainer import Trainer
from tests.support.jobs import Folder, train
from tests.support.runs import trained
from tests.test_adapter_folders import folder_of, job_of
from tests.test_weights import tied_and_empty


class Legs:
    """A plan after another, so many steps each."""

    def __init__(self, plans: Sequence[Plan], steps: int) -> None:
        self.legs = [(plan, steps * (i + 1)) for i, plan in enumerate(plans)]
        self.read = list[list[str]]()

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        self.read.append([])
        return next((Leg(plan, until) for plan, until in self.legs if until > event.step), None)

    def watch(self, record: StepRecord) -> Event | None:
        return None

    def drifted(self, drift: Drift, world: World) -> None:
        return None


def legs(job: Job, plans: list[Plan], steps: int) -> Any:
    """The losses, and which layers each rank has read of the model's folder in each leg."""
    director, plain = Legs(plans, steps), HFLayer.values

    def values(layer: HFLayer, names: Collection[str]) -> dict[str, Tensor]:
        director.read[-1].append(layer.label)
        return plain(layer, names)

    HFLayer.values = values  # type: ignore[method-assign, assignment]
    found = Trainer(job, director).run()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (found and found.losses, director.read))
    return next(losses for losses, _ in every if losses is not None), [read for _, read in every]


ONE = [{"cuts": [4, 2], "sizes": [6, 6]}]
OTHER = [{"cuts": [3, 3], "sizes": [4, 4, 4], "devices": ["n0/0", "n0/1"]}]
SPLIT = [{"cuts": [6], "sizes": [6, 6], "widths": [2]}]


@pytest.mark.thorough
def test_layers_are_split_and_whole_again_in_the_midst_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From whole layers to split ones the modules stay; of split ones no whole ones are made."""
    folder = Folder(tmp_path)
    file = folder.ready((2,), ONE, train=train(steps=6, evaluate_samples=0))
    whole = folder.read("profile.json")
    pieces = {**whole["measurements"][0], "tensor_parallel": 2}
    for name in ("parameter_bytes", "saved_bytes_per_sample"):
        pieces[name] = [layer[name] // 2 for layer in whole["layers"]]
    folder.write("profile.json", {**whole, "measurements": [*whole["measurements"], pieces]})
    truth = trained(file, "log=null").losses
    capfd.readouterr()
    rows: Sequence[list[dict[str, Any]]] = (ONE, SPLIT, OTHER)
    plans = [Plan.load(folder.plan(row, name=f"{i}.json")) for i, row in enumerate(rows)]
    losses, _ = run_everywhere(Job.read(file, ["log=null"]), legs, plans, 2)
    assert losses == pytest.approx(truth, rel=1e-10)
    told = re.findall(r"^moved .*", capfd.readouterr().err, re.M)
    assert ["to build the model anew" in line for line in told] == [False, True]


@pytest.mark.thorough
def test_adapters_move_and_only_the_base_of_the_layers_that_a_rank_gets_is_read_again(tmp_path: Path) -> None:
    """Over a base in 4 bits, which is read of the folder by each rank for itself, and not sent."""
    one, two = [{"cuts": [3, 2], "sizes": [3, 3]}], [{"cuts": [1, 4], "sizes": [3, 3]}]
    made = Folder(tmp_path)
    base = folder_of(tmp_path / "base", torch.bfloat16)
    file = job_of(made, base, {"r": 4, "base": "nf4", "use_dora": True, "train_also": ["norms"]}, one, steps=6)
    truth = trained(file, "log=null", "checkpoint=null").losses
    plans = [Plan.load(made.plan(row, name=f"{i}.json", model="causal_lm")) for i, row in enumerate((one, two, one))]
    losses, read = run_everywhere(Job.read(file, ["log=null", "checkpoint=null"]), legs, plans, 2)
    assert losses == pytest.approx(truth, rel=1e-10)
    assert [[len({*labels}) for labels in of_rank[1:3]] for of_rank in read] == [[0, 2], [2, 0]]


def test_layers_that_a_rank_has_no_longer_are_as_empty_as_they_were_and_what_others_share_with_them_stays() -> None:
    """Layers 0 and 2 share a weight, and know their values; layer 4 does not."""
    layers = nn.Sequential(*tied_and_empty(), nn.Linear(3, 3))
    modules = Modules(layers)
    materialise(layers)
    weight, own = layers.get_parameter("2.inner.weight"), layers.get_parameter("4.weight")
    modules.set_down(["0", "1", "4"], ["2"])
    assert layers.get_parameter("0.inner.weight") is weight is layers.get_parameter("2.inner.weight")
    assert [bool(empty_names(layer)) for layer in layers] == [False, True, False, False, False]
    assert layers.get_parameter("4.weight") is own
    there = {f"model.1.{name}": torch.full_like(t, 7.0, device="cpu") for name, t in layers[1].state_dict().items()}
    modules.give(there | {"model.4.weight": torch.ones(3, 3)})
    assert empty_names(layers[1]) == []
    assert layers.get_buffer("1.inner.running_var").unique().tolist() == [7.0]
    assert not layers.get_parameter("1.inner.bias").requires_grad
    assert own.unique().tolist() == [1.0]
    modules.discard()
    assert all(tensor.is_meta for tensor in layers.state_dict().values())


def test_a_model_whose_layers_were_given_values_is_not_stale() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stale.mark(layers, nn.Sequential(*list(layers)[:1]))
    assert stale.stale_layers(layers) == ["1"]
    Modules(layers).give({"model.1.weight": layers.get_parameter("0.weight").detach()})
    assert stale.stale_layers(layers) == []
    layers(torch.ones(2, 2))
