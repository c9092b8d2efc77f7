"""Stages, what crosses their ends, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetpipe.files.messages import InputError
from hetpipe.layers.device import MemoryMeter, static_storages
from hetpipe.layers.model import as_tuple
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.split import TensorSpec, joint_gradients, tied_layers
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.layers.untouched.kept import kept
from tests.support.blocks import Block
from tests.support.nets import AddInPlace, batch, build


def shapes(layers: nn.Sequential, inputs: Tensor) -> list[list[tuple[int, ...]]]:
    return [[spec.shape for spec in row] for row in trace_boundaries(layers, inputs)]


def test_a_boundary_is_traced_before_each_layer_and_after_the_last() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    assert shapes(net, torch.zeros(2, 3, 8, 8)) == [[(2, 3, 8, 8)], [(2, 4, 6, 6)], [(2, 144)], [(2, 5)]]


class Particular(nn.Module):
    """Multiplies by a parameter, if it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.matrix, nn.Parameter)
        return x @ self.matrix


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_parameters_are_parameters_where_layers_are_traced(place: str) -> None:
    assert shapes(nn.Sequential(Particular().to(place)), torch.zeros(2, 8)) == [[(2, 8)], [(2, 5)]]


def test_types_and_gradients_of_a_tuple() -> None:
    inputs, _ = batch("tuples", 3, 0)
    first, second, *_ = trace_boundaries(build("tuples"), inputs)
    assert first == (TensorSpec((3, 8), torch.float64, requires_grad=False), TensorSpec((3, 8), torch.bool, requires_grad=False))
    assert second == (
        TensorSpec((3, 8), torch.float64, requires_grad=True),
        TensorSpec((3,), torch.int64, requires_grad=False),
        TensorSpec((3, 8), torch.bool, requires_grad=False),
        TensorSpec((3, 1), torch.float64, requires_grad=False),
    )
    assert [spec.size_bytes for spec in second] == [192, 24, 24, 24]


def test_no_gradient_for_what_the_output_does_not_depend_on() -> None:
    rows = trace_boundaries(build("unused output"), batch("unused output", 4, 0)[0])
    assert [[spec.requires_grad for spec in row] for row in rows] == [[False], *[[True, False]] * 9, [True]]


def test_no_gradient_below_frozen_layers() -> None:
    rows = trace_boundaries(build("first stage frozen"), batch("blocks", 4, 0)[0])
    assert [row[0].requires_grad for row in rows] == [False] * 5 + [True] * 6


def test_a_gradient_for_all_micro_batches_if_for_any() -> None:
    def row(size: int, *needed: bool) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec((size, 2), torch.float32, n) for n in needed)

    assert joint_gradients([row(3, True, False, False), row(2, False, False, True)]) == [
        row(3, True, False, True),
        row(2, True, False, True),
    ]


def test_tracing_changes_nothing() -> None:
    net = build("dropout and BatchNorm")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    trace_boundaries(net, torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.rand(5), expected)
    assert int(before["1.num_batches_tracked"]) == 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert net.training


def test_layers_may_lie_on_different_devices() -> None:
    """A stage moves its own layers to its GPU; all layers are traced."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4).to("meta"), nn.ReLU(), nn.Linear(4, 5))
    assert shapes(net, torch.zeros(6, 2)) == [[(6, 2)], [(6, 3)], [(6, 4)], [(6, 4)], [(6, 5)]]


MET: list[torch.device] = []


class _Head(nn.Module):
    """A projection that may be tied, behind a normalisation of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(3), weight

    def forward(self, x: Tensor) -> Tensor:
        MET.append(x.device)
        normed: Tensor = self.norm(x)
        return normed @ self.weight.T


def test_a_layer_whose_tied_weight_went_to_another_device_is_traced_on_one() -> None:
    embed = nn.Embedding(5, 3, device="meta")  # autograd knows no GPU here, so that nothing requires a gradient
    head = _Head(embed.get_parameter("weight"))
    net = nn.Sequential(embed, nn.Dropout(), head).requires_grad_(False)
    gpu = torch.device("cuda", 0)
    rows = trace_boundaries(net, torch.zeros(6, 2, dtype=torch.int64), gpu)
    assert [[s.shape for s in row] for row in rows] == [[(6, 2)], [(6, 2, 3)], [(6, 2, 3)], [(6, 2, 5)]]
    assert [gpu] == MET
    assert head.norm.weight.device == torch.device("cpu")


def test_a_layer_that_does_not_fit_is_named() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(
        InputError, match=r"layer '2' \(Linear\) does not run on what the layer before it gives: \(3, 4\) of float32: "
    ) as caught:
        trace_boundaries(net, torch.zeros(3, 8))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_whole_numbers_in_a_linear_layer_are_refused() -> None:
    """Fake tensors would go through it, though real ones do not."""
    with pytest.raises(InputError) as caught:
        trace_boundaries(nn.Sequential(nn.Sequential(nn.Linear(8, 4))), torch.ones(3, 8, dtype=torch.int64))
    assert str(caught.value) == (
        "layer '0' (Sequential) does not run on the inputs: (3, 8) of int64: its input is int64, and its weight float32; where "
        "it wants floating-point numbers, let the data give them (tensor.float()), or begin with an Embedding"
    )
    with pytest.raises(InputError, match=r"\(3, 8\) of float64: its input is float64, and its weight float32$"):
        trace_boundaries(nn.Sequential(nn.Linear(8, 4)), torch.ones(3, 8).double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert trace_boundaries(nn.Sequential(nn.Linear(8, 4)), torch.ones(3, 8))[-1][0].dtype == torch.bfloat16


def test_a_layer_that_overwrites_what_a_gradient_needs() -> None:
    """It was known in the first backward only, after all had been measured and planned."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), AddInPlace(), nn.Linear(8, 2))
    trace_boundaries(net, torch.ones(3, 8))
    with pytest.raises(InputError) as caught:
        trace_boundaries(net, torch.ones(3, 8), backward=True)
    assert str(caught.value).startswith(
        "the model has no backward pass, on one device either: a tensor was overwritten that is needed for a gradient. Let the "
        "layers that overwrite their input work on a copy: '2' (AddInPlace) (torch: "
    )
    assert len(trace_boundaries(nn.Sequential(nn.Tanh(), AddInPlace(), nn.Linear(8, 2)), torch.ones(3, 8), backward=True)) == 4
    trace_boundaries(build("in place"), batch("in place", 3, 0)[0], backward=True)
    assert all(p.grad is None for p in net.parameters())


def test_a_layer_that_gives_no_tensor_is_named() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> object:
            return x, 3

    with pytest.raises(InputError, match=r"layer '0' \(Pair\) .* a tensor or a tuple of tensors, found int"):
        trace_boundaries(nn.Sequential(Pair()), torch.zeros(3, 8))


@pytest.mark.parametrize("how", ["item", "nonzero"])
def test_a_layer_that_decides_by_values_is_refused(how: str) -> None:
    class Choosy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if how == "nonzero":
                return x[x > 0]
            return x if x.sum() > 0 else -x

    with pytest.raises(InputError, match=r"layer '1' \(Choosy\) decides by the values of its tensors.* only checks or logs"):
        trace_boundaries(nn.Sequential(nn.Linear(8, 8), Choosy()), torch.zeros(3, 8))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return out


def test_reentrant_checkpointing_is_refused() -> None:
    net = nn.Sequential(Block(), Checkpointed(reentrant=True))
    with pytest.raises(InputError, match="layer '1' uses reentrant checkpointing.*use_reentrant=False"):
        trace_boundaries(net, torch.zeros(3, 8))
    assert len(trace_boundaries(nn.Sequential(Block(), Checkpointed(reentrant=False)), torch.zeros(3, 8))) == 3


def test_a_stage_keeps_objects_and_names() -> None:
    net = build("blocks")
    stage = make_stage(net, 4, 7)
    assert list(stage) == [net[4], net[5], net[6]]
    assert {name.split(".")[0] for name in stage.state_dict()} == {"4", "5", "6"}
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(stage(x), net[4:7](x))


def test_a_module_that_stands_twice_is_two_layers() -> None:
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(2, 3), relu, nn.Linear(3, 4), relu, nn.Linear(4, 5))
    assert [type(layer).__name__ for layer in make_stage(net, 1, 4)] == ["ReLU", "Linear", "ReLU"]
    assert shapes(net, torch.zeros(1, 2)) == [[(1, 2)], [(1, 3)], [(1, 3)], [(1, 4)], [(1, 4)], [(1, 5)]]


def test_tied_layers_are_found_by_identity() -> None:
    assert tied_layers(build("tied")) == {"0.weight": (0, 9)}
    #   0       1     2      3       4     5      6      7     8       9
    #   linear  tanh  block  linear  tanh  block  block  tanh  linear  block
    assert tied_layers(build("shared modules")) == {"0.weight": (0, 3, 8), "0.bias": (0, 3, 8)}
    assert tied_layers(build("blocks")) == {}


def saved_bytes(stage: nn.Module, x: Tensor) -> int:
    meter = MemoryMeter(exclude=static_storages(stage))
    with meter.hooks():
        output = stage(x)
    used = meter.used
    output.sum().backward()
    return used


def test_recompute_saves_less_and_gives_the_same_gradients() -> None:
    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    plain, again = build("blocks"), build("blocks")
    kept = saved_bytes(make_stage(plain, 0, 10), x)
    less = saved_bytes(make_stage(again, 0, 10, recompute=True), same)
    assert less == 10 * x.nbytes  # the inputs of ten layers
    assert kept > 3 * less
    assert x.grad is not None
    assert same.grad is not None
    assert torch.equal(same.grad, x.grad)
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_counts_a_recomputed_micro_batch_once(momentum: float | None) -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.ReLU()))
        stage = make_stage(net, 0, 2, recompute=recompute)
        losses = [stage(torch.randn(5, 3)).square().sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
        assert stage.get_buffer("1.0.num_batches_tracked") == 3
        found.append([*stage.buffers(), *(p.grad for p in stage.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_layer_that_overwrites_its_input_unsaid_cannot_be_recomputed() -> None:
    stage = make_stage(build("in place"), 5, 8, recompute=True)
    with pytest.raises(InputError, match=r"layer '6' \(AddInPlace\) overwrites its input, so it cannot be recomputed"):
        stage(torch.randn(3, 8, dtype=torch.float64))
    with torch.no_grad():
        assert as_tuple(stage(torch.randn(3, 8, dtype=torch.float64)))[0].shape == (3, 8)


def test_a_leaf_may_be_overwritten_at_the_start_of_a_stage() -> None:
    stage = make_stage(build("in place"), 6, 8)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.relu(x.detach() + 1.0)
    output = stage(x)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (expected > 0).double())


def test_buffers_are_given_back_to_a_module_that_was_moved() -> None:
    """`.to("cuda").to("cpu")` gives a module other buffer tensors; here `.double().float()` does."""
    norm = nn.BatchNorm1d(2)
    first = norm.running_mean
    with kept(norm):
        norm.double()(torch.ones(8, 2).double())
        norm.float()
        assert norm.running_mean is not first
        assert int(norm.get_buffer("num_batches_tracked")) == 1
    assert int(norm.get_buffer("num_batches_tracked")) == 0
    assert norm.get_buffer("running_mean").tolist() == [0.0, 0.0]
