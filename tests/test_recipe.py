"""The recipe of a stage: a transform is in what is measured, trained, saved, resumed and exported, under the old names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.reference import train_reference
from hetpipe import InputError
from hetpipe.documents.job import Job, ProfileSection
from hetpipe.documents.number_types import NumberTypes
from hetpipe.layers.model import Loss, Model, mse
from hetpipe.layers.numbers import StageTypes
from hetpipe.layers.recipe import layer_on, make_stage
from hetpipe.layers.split import tied_layers
from hetpipe.layers.transforms import COMPILED, Changed, lineage_of, transformed, written_names
from hetpipe.layers.weights import empty_names, load_state, state_of
from hetpipe.measuring.cache import cache_path
from hetpipe.measuring.profiler import profile_model
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import run_everywhere, train_rank
from tests.support.commands import Command
from tests.support.doubling import Doubled, Doubling, doubled
from tests.support.jobs import Folder, train
from tests.support.nets import batch, build
from tests.support.ranks import cluster_of
from tests.support.user_parts import tied

CPU = torch.device("cpu")


def test_what_a_transform_makes_runs_under_the_old_names() -> None:
    plain, made_of = build("blocks"), doubled(build("blocks"))
    assert any(isinstance(module, Doubled) for module in made_of.modules())
    assert list(state_of(made_of)) == list(plain.state_dict())
    assert list(state_of(make_stage(made_of, 4, 7))) == list(state_of(make_stage(plain, 4, 7)))
    x = batch("blocks", 3, 0)[0]
    load_state(plain, state_of(made_of))
    before = made_of(x)
    load_state(made_of, {name: 2 * value for name, value in plain.state_dict().items()})
    assert not torch.equal(made_of(x), before)
    assert tied_layers(doubled(tied())) == tied_layers(tied())


def test_of_two_transforms_the_names_go_back_to_the_first() -> None:
    layers = transformed(nn.Sequential(nn.Linear(2, 2)), [Doubling(), Doubling()])
    assert list(layers.state_dict()) == ["0.base.base.weight", "0.base.base.bias"]
    assert list(state_of(layers)) == ["0.weight", "0.bias"]
    found = lineage_of(layers[0])
    assert found is not None
    assert found.identities == (Doubling.identity,) * 2
    assert written_names(layers)(f"0.{COMPILED}.base.base.weight") == "0.weight"


def test_a_layer_that_stands_at_two_places_is_transformed_once() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first, between, second = doubled(nn.Sequential(block, nn.Tanh(), block))
    assert first is second
    assert [type(module) for module in first.children()] == [Doubled, nn.ReLU]
    assert isinstance(first.get_submodule("0.base"), nn.Linear)
    assert isinstance(between, nn.Tanh)


def test_what_is_more_than_a_chain_is_not_transformed() -> None:
    class More(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return -x

    with pytest.raises(InputError, match="has a forward of its own, which would not run"):
        doubled(More(nn.Linear(2, 2)))


def test_a_stage_in_other_types_has_the_same_parameters() -> None:
    """Others refer to them: the layers that share one, an optimizer."""
    layers = tied()
    before = list(layers.parameters())
    with layer_on(layers, layers[0], CPU, NumberTypes.of("float64")) as layer:
        assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert {p.dtype for p in layers.parameters()} == {torch.float32}
    make_stage(layers, 0, 6, types=StageTypes(0, 6, NumberTypes.of("float64")))
    assert all(a is b for a, b in zip(before, layers.parameters(), strict=True))
    assert {p.dtype for p in before} == {torch.float64}
    assert tied_layers(layers) == tied_layers(tied())


class Late(nn.Linear):
    def values(self, names: Collection[str]) -> Mapping[str, Tensor]:
        return {name: torch.full(dict(self.named_parameters())[name].shape, 3.0) for name in names}


def test_values_come_under_the_old_names_when_their_layer_is_placed() -> None:
    layers = doubled(nn.Sequential(Late(4, 4, device="meta"), Late(4, 2, device="meta")))
    with layer_on(layers, layers[1], CPU) as layer:
        assert layer(torch.ones(1, 4)).tolist() == [[30.0, 30.0]]
    assert empty_names(layers[1]) == ["base.weight", "base.bias"]
    stage = make_stage(layers, 0, 1)
    assert [float(value.mean()) for value in state_of(stage).values()] == [3.0, 3.0]


def test_a_transform_that_loses_or_doubles_a_name_is_told() -> None:
    class Losing(Doubling):
        def apply(self, name: str, layer: nn.Module) -> Changed:
            return Changed(super().apply(name, layer).layer)

    class Adding(Doubling):
        def apply(self, name: str, layer: nn.Module) -> Changed:
            found, names, *_ = super().apply(name, layer)
            found.register_buffer("bias", torch.zeros(1))
            return Changed(found, names)

    with pytest.raises(InputError, match=r"layer '0': of the transform '.*', 'weight' becomes 'weight', which the layer that it"):
        transformed(nn.Sequential(nn.Linear(2, 2)), [Losing()])
    with pytest.raises(InputError, match="layer '0': after the transform '.*' two tensors stand for 'bias'; give the one that"):
        transformed(nn.Sequential(nn.Linear(2, 2)), [Adding()])


def test_a_profile_is_of_what_the_transforms_made() -> None:
    x = torch.ones(2, 4)
    plain = Model(name="net", layers=nn.Sequential(nn.Linear(4, 4)), inputs=x, targets=x, loss=Loss(function=mse))
    other = Model(name="net", layers=doubled(nn.Sequential(nn.Linear(4, 4))), inputs=x, targets=x, loss=Loss(function=mse))
    profile = profile_model(other, microbatch_sizes=[1], repeats=1)
    assert profile.layers[0].parameter_bytes == profile_model(plain, microbatch_sizes=[1], repeats=1).layers[0].parameter_bytes
    cluster, options = cluster_of(1), ProfileSection()
    assert cache_path(plain, cluster, options, "SGD") != cache_path(other, cluster, options, "SGD")


def test_a_job_saves_resumes_and_exports_what_transforms_made(folder: Folder, run: Command) -> None:
    """The checkpoint has the names of the model as it was written, and fits it."""
    file = folder.ready(
        rows=[{"cuts": [3, 3], "sizes": [6, 6]}],
        model={"target": "tests.support.doubling:doubled_tied"},
        checkpoint={"folder": "saved"},
        train=train(steps=4),
    )

    def losses(*settings: str) -> list[float]:
        result: TrainResult = run_everywhere(Job.read(file, settings), train_rank)
        return result.losses

    whole = losses("checkpoint=")
    assert [*losses("train.steps=2"), *losses()] == whole
    plain = folder.job("plain.yaml", model={"target": "tests.support.user_parts:tied"}, plan={"partitioner": "auto"})
    assert train_reference(Job.read(plain, ("train.steps=4",))).losses != whole
    assert train_reference(Job.read(file)).losses == pytest.approx(whole, abs=1e-9)
    ended = run("export-weights", file, "-o", "out")
    assert ended.code == 0, ended.err
    weights = load_file("out/model.safetensors")
    assert list(weights) == sorted(tied().state_dict())
    tied().double().load_state_dict(weights)
