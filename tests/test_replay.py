"""Transformers of diffusers as chains: outputs and gradients are the model's own bits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from hetpipe.files.messages import InputError
from hetpipe.layers.replay.chain import chain, chain_of
from hetpipe.layers.replay.flow import Flow, tensors_in
from hetpipe.layers.replay.layers import Replayed
from hetpipe.layers.replay.numbered import Numbered
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.layers.weights import materialise
from tests.support.diffusers import CASES, made
from tests.support.ranks import cluster_of, run_ranks
from tests.support.replayed import Apart, three_beside_one

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers
REFUSED = {
    "DiT": r"'transformer_blocks\.0\.norm1\.emb.*' is used outside of its module, too",
    **dict.fromkeys(("Mochi", "Lumina2"), "its forward asks for the values of tensors"),
}
IN_ENGINES = ("Flux", "QwenImage", "Wan", "SD3", "LTX", "HunyuanVideo", "ZImage", "AuraFlow", "Chroma", "CogView4")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def squares(outputs: Any) -> Tensor:
    return torch.stack([(output**2).mean() for output in tensors_in(outputs)]).sum()


def in_batches(outputs: Any) -> list[Tensor]:
    """A model's tensors, [b, …] also where it gives a list with one for each sample."""
    first = outputs[0]
    return [torch.stack(first)] if isinstance(first, list) else tensors_in(outputs)


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in REFUSED])
def test_a_chain_gives_the_models_own_bits(kind: str) -> None:
    """Gradients, too, but for sums that come in another order where a tensor is used in several layers."""
    model, inputs = made(kind, 3)
    truth = in_batches(model(**inputs))
    squares(truth).backward()
    wanted = gradients(model)
    model.zero_grad()
    layers, given = chain_of(model, inputs)
    found = layers(given.tensors(inputs))
    squares(found).backward()
    assert all(map(torch.equal, tensors_in(found), truth))
    assert len(tensors_in(found)) == len(truth)
    own, largest = gradients(model), max(float(gradient.abs().max()) for gradient in wanted.values())
    assert own.keys() == wanted.keys()
    assert max(float((own[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-6 * largest
    blocks = [layer for layer in layers if isinstance(layer, Replayed) and "block" in layer.paths]
    assert len(blocks) == len(layers) - 2


@pytest.mark.parametrize("samples", [1, 4])
def test_a_chain_takes_other_numbers_of_samples_than_it_was_cut_with(samples: int) -> None:
    model, inputs = made("Wan", 3)
    layers, _ = chain_of(model, inputs)
    more = {name: value[:1].repeat(samples, *[1] * (value.ndim - 1)) for name, value in inputs.items() if name != "return_dict"}
    assert torch.equal(layers(tuple(more.values())), model(**more, return_dict=False)[0])


def test_a_chain_takes_other_shapes_than_it_was_cut_with() -> None:
    """A wide picture and a longer text."""
    model, inputs = made("Wan", 3)
    layers, _ = chain_of(model, inputs)
    other = {**inputs, "hidden_states": torch.randn(3, 4, 1, 4, 12), "encoder_hidden_states": torch.randn(3, 9, 16)}
    found = layers((other["hidden_states"], other["encoder_hidden_states"], other["timestep"]))
    assert torch.equal(found, model(**other)[0])


@functools.cache
def steps(kinds: tuple[str, ...]) -> list[dict[str, Apart]]:
    """Of each rank: three of replica 0, and a whole one."""
    found: list[dict[str, Apart]] = run_ranks(functools.partial(each_kind, kinds=kinds), cluster_of(3, 1))
    return found


def each_kind(world: Any, kinds: tuple[str, ...]) -> dict[str, Apart]:
    return {kind: three_beside_one(world, kind, adapted=True, double=True) for kind in kinds}


@pytest.mark.parametrize("kinds", [IN_ENGINES[:2], pytest.param(IN_ENGINES[2:], marks=pytest.mark.thorough)], ids=", ".join)
def test_three_stages_beside_a_whole_replica_train_adapters_as_one_device(kinds: tuple[str, ...]) -> None:
    for rank in steps(kinds):
        for kind, apart in rank.items():
            assert apart.loss < 1e-10, kind
            assert apart.gradients < 1e-9, kind


@pytest.mark.parametrize("kind", ["QwenImage", "Wan"])
def test_layers_read_their_own_weights_from_a_folder(kind: str, tmp_path: Path) -> None:
    model, inputs = made(kind, 3)
    cast(Any, model).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with init_empty_weights():
        empty = type(model).from_config(cast(Any, model).config)  # type: ignore[attr-defined]
    layers, tensors = chain(empty, inputs, weights=tmp_path)
    materialise(layers, 0, 3)
    assert [any(p.is_meta for p in layer.parameters()) for layer in layers][:4] == [False, False, False, True]
    materialise(layers)
    with torch.no_grad():
        assert torch.equal(layers(tensors(inputs)), model(**inputs)[0])
    with init_empty_weights():
        other = type(model).from_config({**cast(Any, model).config, "num_layers": 5})  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"has no '.*blocks\.4\..*', which .* with this configuration has"):
        chain(other, inputs, weights=tmp_path)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_transformer_that_is_no_chain_is_refused(kind: str) -> None:
    model, inputs = made(kind, 3)
    with pytest.raises(InputError, match=f"cannot be cut into layers: {REFUSED[kind]}"):
        chain_of(model, inputs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks in a row, with what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        if how == "idle":
            self.idle = nn.Linear(2, 2)
        if how == "twice":
            self.again = self.first
        self.drop = nn.Dropout(0.5 if how == "dropped" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = list[Tensor]()
        for number, block in enumerate(self.blocks):
            if self.how == "skipped" and number == 2:
                continue
            if self.how == "U" and number >= 2:
                x = x + skips.pop()
            x = self.drop(block(x))
            skips += [x] * (number < 2)
            if self.how == "turned" and number == 1:
                x = x.transpose(0, 1)
        if self.how == "functional":
            x = functional.dropout(x, 0.5, self.training)
        if self.how == "outside":
            x = x * self.get_parameter("blocks.0.linear.bias")
        found: Tensor = self.last(x)
        return found


def test_a_net_with_connections_that_skip_blocks() -> None:
    torch.manual_seed(0)
    net, x = Net("U"), torch.randn(3, 5, 4)
    layers, given = chain_of(net, {"x": x})
    assert torch.equal(layers(given.tensors({"x": x})), net(x))
    carried = [layers[:count](x) for count in range(1, 6)]
    assert [sum(t.numel() > 0 for t in tensors_in(each)) for each in carried] == [1, 1, 2, 2, 1]


def test_dropout_between_blocks_is_drawn_once_and_in_training_only() -> None:
    torch.manual_seed(0)
    net, x = Net("dropped"), torch.randn(3, 5, 4)
    layers, _ = chain_of(net, {"x": x})
    for training in (True, False):
        found = list[Tensor]()
        for each in (net, layers):
            torch.manual_seed(1)
            found.append(each.train(training)(x))
        assert torch.equal(*found)
    assert not torch.equal(net.train()(x), net.eval()(x))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("idle", "nothing is computed of 'idle.weight'"),
        ("twice", "'again' is 'first', too"),
        ("skipped", r"'blocks\.2' is not called"),
        ("outside", r"'blocks\.0\.linear\.bias' is used outside of its module, too"),
        ("turned", "samples are not in its first dimension"),
        ("functional", r"in training its forward does something between its blocks.* such as torch\.nn\.functional\.dropout"),
    ],
)
def test_what_is_no_chain_is_refused_with_the_reason(how: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        chain_of(Net(how), {"x": torch.randn(3, 5, 4)})


def test_what_is_given_later_must_be_like_what_the_model_was_cut_with() -> None:
    model, inputs = made("QwenImage", 3)
    _, given = chain_of(model, inputs)
    assert len(given.tensors(inputs)) == 4
    with pytest.raises(InputError, match=r"an argument is .*\(1, 2, 8\).*, and was .*\(1, 4, 4\)"):
        given.tensors({**inputs, "img_shapes": [(1, 2, 8)] * 3})
    with pytest.raises(InputError, match="guidance is given, and was not when the model was cut"):
        given.tensors({**inputs, "guidance": torch.ones(3)})
    with pytest.raises(InputError, match="timestep is missing, and was given when"):
        given.tensors({name: value for name, value in inputs.items() if name != "timestep"})


def test_weights_are_those_of_the_model_or_those_of_the_folder(tmp_path: Path) -> None:
    model, inputs = made("Wan", 3)
    with pytest.raises(InputError, match="has weights, so leave the folder out"):
        chain(model, inputs, weights=tmp_path)
    with pytest.raises(InputError, match="has no weights, so name their folder"):
        chain(model.to("meta"), inputs)


class Counting(nn.Module):
    """Its forward is another each time that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.runs = nn.ModuleList([Block(), Block()]), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for block in self.blocks:
            x = block(x) * self.runs
        return x


def test_a_chain_that_computes_something_else_is_refused() -> None:
    x = {"x": torch.randn(3, 5, 4)}
    layers, tensors = chain(Net("plain"), x)
    assert layers(tensors(x)).shape == (3, 5, 2)
    with pytest.raises(InputError, match="Counting cannot be cut into layers: output 0 would be computed by other operations"):
        chain(Counting(), x)


def test_a_layer_that_computes_of_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is another tensor of the same shape, or another number."""
    x = {"x": torch.randn(3, 5, 4)}
    real = Replayed._given_on

    def swapped(self: Replayed, have: Any, came: Any) -> Any:
        given = real(self, have, came)
        return tuple(reversed(given)) if isinstance(given, tuple) and self.number == 2 else given

    monkeypatch.setattr(Replayed, "_given_on", swapped)
    with pytest.raises(InputError, match="would be computed by other operations"):
        chain(Net("U"), x)

    def scaled(given: Any, number: int) -> Any:
        return tree_map(lambda each: each * (1 + 1e-9 * (number == 2)), given)

    monkeypatch.setattr(Replayed, "_given_on", lambda *given: scaled(real(*given), given[0].number))
    with pytest.raises(InputError, match="would be computed by other operations"):
        chain(Net("plain"), x)


def test_tensors_of_the_same_operations_have_the_same_name() -> None:
    with torch.no_grad(), Numbered() as numbered:
        a, b = torch.rand(2, 3), torch.rand(2, 3)
        numbered.begins(a, "a")
        numbered.begins(b, "b")

        def made(first: Tensor, by: float) -> list[Tensor]:
            whole = torch.zeros(2, 3)
            whole[1] = first[0] * by
            view = whole.t()
            whole.add_(b)
            return [view, whole, torch.add(first, b, out=torch.empty(2, 3))]

        first, again, other, scaled = ([*map(numbered.name, made(*how))] for how in ((a, 2.0), (a, 2.0), (b, 2.0), (a, 3.0)))
        assert first == again
        assert not {*first} & {*other}
        assert first[2] == scaled[2]
        assert not {*first[:2]} & {*scaled[:2]}
        assert numbered.name(torch.tensor([1.0, 2.0])) == numbered.name(torch.tensor([1.0, 2.0]))
        assert numbered.name(torch.tensor([1.0, 2.0])) != numbered.name(torch.tensor([1.0, 3.0]))


def test_whole_numbers_may_follow_the_shape() -> None:
    model, inputs = made("LTX", 3)
    layers, tensors = chain(model, inputs, sizes=["height", "width"])
    wide = {**inputs, "hidden_states": torch.randn(3, 12, 4), "height": 2, "width": 6}
    for each in (inputs, wide):
        assert torch.equal(layers(tensors(each)), model(**each)[0])
    with pytest.raises(InputError, match=r"num_frames.*|an argument is 2, and was 1 when the model was cut"):
        tensors({**inputs, "num_frames": 2})
    with pytest.raises(InputError, match="there is no argument 'hight'; did you mean 'height'"):
        chain(model, inputs, sizes=["hight"])


class Odd(nn.Module):
    """A net that does, with what a module gives, what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.other = how, Counted(how), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        if how == "in a module":
            self.other = nn.Identity()  # type: ignore[assignment]
            self.writing = Writing()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.first(x)
        x, number = found if self.how.startswith("number") else (found, 1)
        if self.how == "+=":
            x += self.other(y)
        elif self.how == "[]=":
            x[:, 1:] = self.other(y)[:, 1:]
        elif self.how == "in a module":
            x = x + self.writing(y)
        elif self.how == "given":
            y *= 2
            x = x + self.other(y)
        elif self.how == "complex":
            x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * 2).flatten(-2) + self.other(y)
        else:
            x = x + self.other(y)
        for block in self.blocks:
            x = block(x) * number
            if self.how == "drawn":
                x = x + torch.randn(4)
            if self.how == "+=":
                x += y
        return x.mean() if self.how == "mean" else x + y


class Writing(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, y: Tensor) -> Tensor:
        y *= 3
        found: Tensor = self.linear(y)
        return found


class Counted(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Any:
        found = self.linear(x)
        return (found, {"number of samples": len(x), "number": 2}[self.how]) if self.how.startswith("number") else found


@pytest.mark.parametrize("how", ["plain", "+=", "[]=", "given", "in a module", "complex"])
def test_what_a_module_gives_may_be_written_into(how: str) -> None:
    torch.manual_seed(0)
    net, x, y = Odd(how), torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    layers, tensors = chain(net, {"x": x, "y": y.clone()})
    truth = net(x, y.clone())
    truth.square().mean().backward()
    wanted = gradients(net)
    net.zero_grad()
    found = layers(tensors({"x": x, "y": y.clone()}))
    found.square().mean().backward()
    assert torch.equal(found, truth)
    assert all(torch.allclose(gradient, wanted[name], atol=1e-7) for name, gradient in gradients(net).items())


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("number of samples", "'first' returns 3 beside tensors, which may be another value in another call"),
        ("number", "'first' returns 2 beside tensors"),
        ("drawn", "output 0 would be computed by other operations"),  # each layer would draw numbers of its own
        ("mean", r"for 3 samples it gives a tensor of shape \[\], which has no row for each"),
    ],
)
def test_numbers_beside_tensors_and_outputs_without_samples_are_refused(how: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        chain(Odd(how), {"x": torch.randn(3, 5, 4), "y": torch.randn(3, 5, 4)})


def test_what_a_tensor_is_computed_of() -> None:
    with torch.no_grad():
        a, b, c = torch.ones(3), torch.ones(3), torch.ones(3)
        with Flow() as flow:
            for name, tensor in (("a", a), ("b", b), ("c", c)):
                flow.begins(tensor, name)
            whole = torch.zeros(2, 3)
            whole[0] = a * 2
            view = whole.view(-1)
            whole[1].copy_(b)
            other = torch.cat([c, c])
            assert flow.sources([view]) == {"a", "b"}
            assert flow.sources([other]) == {"c"}


@pytest.mark.parametrize("kind", ["Flux", "Wan", "HunyuanVideo", "ZImage"])
def test_blocks_behind_the_second_of_a_list_are_known_to_be_alike(kind: str) -> None:
    """So that few of them are measured."""
    small, inputs = CASES[kind](2)
    deep = {name: 6 for name in cast(Any, small).config if name in ("num_layers", "num_single_layers", "n_layers")}
    model = type(small).from_config({**cast(Any, small).config, **deep})  # type: ignore[attr-defined]
    layers, given = chain_of(model.eval(), {**inputs, "return_dict": False})
    kinds = trace(layers, given.tensors({**inputs, "return_dict": False})).kinds
    lists = len(deep)
    assert len(set(kinds.first)) <= len(layers) - 2 * lists
    assert len(layers) >= 6 * lists + 2
