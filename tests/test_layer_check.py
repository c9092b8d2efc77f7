"""Layers that couple samples, keep state or add gradients are found; others are not taken for such."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import hetpipe
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Tensors, as_tuple, mse, named_layers
from hetpipe.layers.randomness import Generators
from hetpipe.layers.trials.layer_check import Outcome, cut_to_try, rows_to_try, try_layers
from hetpipe.layers.weights import materialise
from hetpipe.spec.plan import Backend
from tests.ranks import make_plan

D = 16
_draw = torch.Generator().manual_seed(0)
ROWS, WORDS, IMAGES = (torch.randn(shape, generator=_draw) for shape in ((8, D), (8, 6, D), (6, 3, 8, 8)))


def tried(net: nn.Sequential, inputs: Tensors) -> Outcome:
    """The outcome; the net, and all generators, must be as they were."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes, generators = [m.training for m in net.modules()], Generators.now()
    found = try_layers(named_layers(net), cut_to_try(inputs))
    assert not generators.moved
    assert [m.training for m in net.modules()] == modes
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in net.parameters())
    return found


def between(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, D), layer, nn.Linear(D, D))


class Of(nn.Module):
    """A function of a linear layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(D, D), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


class First(nn.Module):
    """The first of a tuple, through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        result: Tensor = self.linear(given[0])
        return result


def load_balance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Switch Transformer's: a product of two means, carried along."""
    chances = x[:, :4].softmax(-1)
    return x, (F.one_hot(chances.argmax(-1), 4).to(x).mean(0) * chances.mean(0)).sum()


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(*ctx.saved_tensors)


def inject(x: Tensor) -> Tensor:
    result: Tensor = _Inject.apply(x, x.square().mean())  # type: ignore[no-untyped-call]
    return result


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        result: Tensor = gradient / gradient.norm()
        return result


class Keeping(nn.Module):
    """Keeps a mean of what it has seen: in a buffer, one that is replaced, or an attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "attribute":
            self.mean = torch.zeros(D)
        else:
            self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.how == "buffer":
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return x - mean


class Evaluated(nn.Module):
    """Keeps a mean of what it has seen in an attribute, which only an evaluation reads."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.mean = in_place, torch.zeros(D)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        if self.in_place:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x.clone()


class Codebook(nn.Module):
    """Of a VQ-VAE, whose codes follow what comes near them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, D))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.get_buffer("codes")
        near = torch.cdist(x.detach(), codes).argmin(-1)
        if self.training:
            codes.index_add_(0, near, 0.01 * (x.detach() - codes[near]))
        return x + (codes[near] - x).detach()


class ActNorm(nn.Module):
    """Takes its scale from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("made", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.get_buffer("made"):
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                self.get_buffer("made").fill_(True)
        return x * self.scale


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("steps").add_(1)
        return x.clone()


class Experts(nn.Module):
    """Each word goes to one of four, of which each takes but so many of a batch."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.router, self.experts, self.capacity = nn.Linear(D, 4), nn.ModuleList(nn.Linear(D, D) for _ in range(4)), capacity

    def forward(self, x: Tensor) -> Tensor:
        words, result = x.reshape(-1, D), torch.zeros_like(x.reshape(-1, D))
        chances = self.router(words).softmax(-1)
        chosen = chances.argmax(-1)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()[: max(1, int(self.capacity * len(words) / 4))]
            result = result.index_copy(0, mine, expert(words[mine]) * chances[mine, number : number + 1])
        return x + result.reshape(x.shape)


class Output(nn.Module):
    """Of an RNN, without its state."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.rnn(x)[0]
        return result


class Self(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, dropout=0.2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x)[0]
        return result


def hooked() -> nn.Sequential:
    net = between(nn.Linear(D, D))
    weight = net.get_parameter("1.weight")
    weight.register_hook(lambda gradient: gradient + 0.1 * weight)
    return net


class MixStyle(nn.Module):
    """Mixes each sample's mean with another's, drawn in one of several ways."""

    def __init__(self, order: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return x - 0.5 * mean + 0.5 * mean[self.order(len(x))]


class Drawing(nn.Module):
    """Noise, drawn in each forward from a generator of its own, which keeps its place; or begins anew with a fixed seed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.generator = how, torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "begins anew":
            self.generator.manual_seed(3)
        elif self.how == "another":
            return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
        elif self.how == "of columns":
            return x + torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(3))
        elif self.how == "all anew":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                return F.dropout(F.dropout(x, 0.3), 0.3)
        return x + torch.randn(x.shape, generator=self.generator)


class Checkpointed(nn.Module):
    """Computes, and draws, again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


COUPLES, KEEPS, ADDS = "couples the samples of a batch", "keeps state", "adds a gradient of its own in backward"
TWO_PARTS = "for 4 samples together, and in two parts, what it gives differs by"
REFUSED: dict[str, tuple[Callable[[], nn.Sequential], Tensors, str]] = {
    "centring": (lambda: between(Of(lambda x: x - x.mean(0))), ROWS, COUPLES),
    "hardly centring": (lambda: between(Of(lambda x: x - 1e-5 * x.mean(0))).double(), ROWS.double(), COUPLES),
    "one sample, centred": (lambda: between(Of(lambda x: x - x.mean(0))), ROWS[:1], COUPLES),
    "samples that are alike, centred": (lambda: between(Of(lambda x: x - x.mean(0))), ROWS[:1].repeat(6, 1), COUPLES),
    "functional BatchNorm": (lambda: between(Of(lambda x: F.batch_norm(x, None, None, training=True))), ROWS, COUPLES),
    "deviation of the batch": (lambda: between(Of(lambda x: x * (1 + x.std(0).mean()))), ROWS, COUPLES),
    "load balance": (lambda: nn.Sequential(nn.Linear(D, D), Of(load_balance), First()), ROWS, COUPLES),
    "gradient of the batch's norm": (lambda: between(Of(_Normalised.apply)), ROWS, "its gradients differ by"),
    "a capacity": (lambda: between(Experts(1.0)), WORDS, COUPLES),
    "attention over samples": (lambda: nn.Sequential(Self(batch_first=False)), WORDS,
                               "Its MultiheadAttention 'attention' takes dimension 0 for time, not for samples: give it"),
    "LSTM over samples": (lambda: nn.Sequential(Output(nn.LSTM(D, D))), WORDS, "Its LSTM 'rnn' takes dimension 0 for time"),
    "auxiliary loss in backward": (lambda: between(Of(inject)), ROWS, f"layer '1' (Of) {ADDS} (that of 'input 0' is not zero"),
    "a hook that adds": (hooked, ROWS, f"{ADDS} (that of 'weight' is not zero"),
    "a permutation of the batch": (lambda: between(MixStyle(torch.randperm)), ROWS, COUPLES),
    "an order of the batch": (lambda: between(MixStyle(lambda n: torch.rand(n).argsort())), ROWS, COUPLES),
    "a choice of the batch": (lambda: between(MixStyle(lambda n: torch.rand(n).topk(n).indices)), ROWS, COUPLES),
    "a fixed seed, of another generator": (lambda: between(Drawing("another")), ROWS, COUPLES),
    "a fixed seed, of its generator": (lambda: between(Drawing("begins anew")), ROWS, COUPLES),
    "a fixed seed, of torch's generator": (lambda: between(Drawing("all anew")), ROWS, COUPLES),
    "a codebook": (lambda: between(Codebook()), ROWS, f"{KEEPS}: 'codes' changes in its forward"),
    "a mean in a buffer": (lambda: between(Keeping("buffer")), ROWS, f"{KEEPS}: 'mean' changes in its forward"),
    "a mean in another buffer": (lambda: between(Keeping("other")), ROWS, f"{KEEPS}: 'mean' changes in its forward"),
    "a mean in an attribute": (lambda: between(Keeping("attribute")), ROWS, KEEPS),
    "a mean in an attribute that evaluation reads": (lambda: between(Evaluated(in_place=False)), ROWS,
                                                     f"{KEEPS}: the tensor in its attribute 'mean' changes in its forward, and"),
    "a mean in an attribute, in place": (lambda: between(nn.Sequential(Evaluated(in_place=True))), ROWS,
                                         f"{KEEPS}: the tensor in its attribute '0.mean' changes in its forward, and depends on"),
    "spectral_norm": (lambda: between(spectral_norm(nn.Linear(D, D))), ROWS, f"{KEEPS}: 'weight_u' changes"),
    "spectral norm as a parametrization": (lambda: between(parametrizations.spectral_norm(nn.Linear(D, D))), ROWS, KEEPS),
    "a scale of the first batch": (lambda: between(ActNorm()), ROWS, f"{KEEPS}: 'scale' changes in its forward"),
    "a count": (lambda: between(Counting()), ROWS, f"{KEEPS}: 'steps' changes in its forward"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_couples_samples_keeps_state_or_adds_gradients_is_named(case: str) -> None:
    torch.manual_seed(0)
    make, inputs, words = REFUSED[case]
    found = tried(make(), inputs)
    assert found.fault is not None
    assert words in found.fault
    assert found.fault.startswith("layer '")
    assert "write 'coupled_layers: per_microbatch' in the job's model section, or coupled_layers=\"per_mi" in found.fault


class Decoder(nn.Module):
    """Goes back by the weights of another module, which it may not register."""

    def __init__(self, encoder: nn.Linear, *, registers: bool) -> None:
        super().__init__()
        self.encoder = encoder if registers else [encoder]

    def forward(self, x: Tensor) -> Tensor:
        encoder: Any = self.encoder
        return F.linear(x, (encoder[0] if isinstance(encoder, list) else encoder).weight.t())


def tied(*, registers: bool) -> nn.Sequential:
    encoder = nn.Linear(D, 2 * D)
    return nn.Sequential(encoder, nn.Tanh(), Decoder(encoder, registers=registers))


def test_a_weight_that_a_layer_uses_and_does_not_register_is_refused() -> None:
    """Its gradient was that of one of two layers, without a word."""
    said = tried(tied(registers=False), ROWS).fault
    assert said is not None
    assert said.startswith("layer '2' (Decoder) uses a tensor of shape (32, 16) that requires a gradient and is no parameter of")
    weight = torch.ones(D, requires_grad=True)
    said = tried(between(Of(lambda x: x * weight)), ROWS).fault
    assert said is not None
    assert "uses a tensor of shape (16,)" in said


def test_the_message_has_its_numbers() -> None:
    fault = tried(between(Of(lambda x: x - x.mean(0))), ROWS).fault
    assert fault is not None
    assert f"layer '1' (Of) couples the samples of a batch: {TWO_PARTS} 0." in fault
    assert "A batch is cut into micro-batches and shared out, so gradients would be wrong." in fault


class Table(nn.Module):
    """Makes tables in its first forward; remembers what it gave last, and the first number of all; counts, also in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None
        self.last: Any = None
        self.calls, self.rows, self.first = 0, torch.tensor(0), torch.zeros(())
        self.register_buffer("mask", None)

    mask: Any

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows += len(x)
        self.first.copy_(x.detach().flatten()[0])
        if self.table is None:
            self.table, self.mask = torch.arange(x.shape[-1]) / 10, torch.ones(x.shape[-1])
        self.last = x * self.mask + self.table
        result: Tensor = self.last
        return result


def put_back_in_order(x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return torch.tanh(x[order])[order.argsort()]


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.zeros(2, D))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def low_rank() -> nn.Linear:
    layer = nn.Linear(D, D)
    register_parametrization(layer, "weight", LowRank())
    return layer


class Slope(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(x).square().sum(), x, create_graph=True)
        return x + slope


class Clamped(nn.Module):
    """Clips the gradients of its numbers, one by one."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return 2 * x


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(0.8) / 0.8


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Windows(nn.Module):
    """Attention in windows of a sequence, which are rows of their own meanwhile, as Swin's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(D, 2, 2 * D, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(x), 3, 2, D).transpose(0, 1).reshape(-1, 2, D)  # the windows of all samples, then those of the next
        result: Tensor = self.inner(rows).reshape(3, len(x), 2, D).transpose(0, 1).reshape(x.shape)
        return result


class ConvNext(nn.Module):
    """A block of it, with a scale for each channel and stochastic depth."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.depth = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.inner = nn.LayerNorm(channels), nn.Sequential(nn.Linear(channels, 32), nn.GELU(), nn.Linear(32, channels))
        self.scale, self.drop = nn.Parameter(torch.full((channels,), 1e-2)), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.norm(self.depth(x).permute(0, 2, 3, 1))) * self.scale
        result: Tensor = x + self.drop(y.permute(0, 3, 1, 2))
        return result


class Squeeze(nn.Module):
    """A block of EfficientNet without BatchNorm: squeeze and excite, in place."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels)
        self.inner = nn.Sequential(nn.Conv2d(channels, 2, 1), nn.SiLU(inplace=True), nn.Conv2d(2, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        result: Tensor = x + y * torch.sigmoid(self.inner(y.mean((2, 3), keepdim=True)))
        return result


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.channels, self.norm = nn.Linear(6, 6), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.words(self.norm(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.norm(x))
        return result


def images(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 8 * 8, 4))


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Sequential], Tensors]] = {
    "dropout": (lambda: between(nn.Dropout(0.5)), ROWS),
    "alpha dropout": (lambda: between(nn.AlphaDropout(0.5)), ROWS),
    "stochastic depth": (lambda: between(DropPath()), WORDS),
    "random ReLU": (lambda: between(nn.RReLU()), ROWS),
    "Gumbel softmax": (lambda: between(Of(F.gumbel_softmax)), ROWS),
    "noise of a generator of its own": (lambda: between(Drawing("goes on")), ROWS),
    "fixed noise, alike for all samples": (lambda: between(Drawing("of columns")), ROWS),
    "words in another order": (lambda: between(Of(lambda x: x[:, torch.randperm(x.shape[1])])), WORDS),
    "some words, in another order": (lambda: between(Of(lambda x: x[:, torch.rand(x.shape[1]).argsort()[:4]])), WORDS),
    "each sample's words in another order": (lambda: between(Of(
        lambda x: x.gather(1, torch.rand(x.shape[:2]).argsort(1)[:, :, None].expand(-1, -1, D)))), WORDS),
    "an order that is put back": (lambda: between(Of(put_back_in_order)), ROWS),
    "dropout in a checkpoint": (lambda: between(Checkpointed()), ROWS),
    "noise": (lambda: between(Of(lambda x: x + torch.randn_like(x) + torch.distributions.Normal(x, 1.0).rsample())), ROWS),
    "encoder": (lambda: between(nn.TransformerEncoderLayer(D, 2, 32, dropout=0.2, batch_first=True)), WORDS),
    "attention": (lambda: between(Self(batch_first=True)), WORDS),
    "LSTM": (lambda: between(Output(nn.LSTM(D, D, 2, dropout=0.3, batch_first=True))), WORDS),
    "time first in between": (lambda: nn.Sequential(Transposed(), nn.TransformerEncoderLayer(D, 2, 32), Output(nn.GRU(D, D)),
                                                    Transposed()), WORDS),
    "words of all samples as rows": (lambda: between(Of(lambda x: x.transpose(0, 1).reshape(-1, D))), WORDS),
    "windows": (lambda: between(Windows()), WORDS),
    "experts without a capacity": (lambda: between(Experts(4.0)), WORDS),
    "a mean carried along": (lambda: nn.Sequential(nn.Linear(D, D), Of(lambda x: (x, x.square().mean())), First()), ROWS),
    "tables and a memory": (lambda: between(Table()), ROWS),
    "a gradient inside": (lambda: between(Slope()), ROWS),
    "a gradient inside, of the inputs": (lambda: nn.Sequential(Slope(), nn.Linear(D, D)), ROWS),
    "clipped gradients": (lambda: between(Clamped()), ROWS),
    "tied weights": (lambda: tied(registers=True), ROWS),
    "frozen weights of nobody": (lambda: between(Of(lambda x: x @ torch.ones(D, D).to(x))), ROWS),
    "a low-rank change as a parametrization": (lambda: between(low_rank()), ROWS),
    "weight_norm": (lambda: between(parametrizations.weight_norm(nn.Linear(D, D))), ROWS),
    "frozen": (lambda: between(nn.Linear(D, D).requires_grad_(False)), ROWS),
    "words": (lambda: nn.Sequential(nn.Embedding(30, D), nn.LayerNorm(D)), torch.randint(30, (8, 6))),
    "sparse words": (lambda: nn.Sequential(nn.Embedding(30, D, sparse=True), nn.LayerNorm(D)), torch.randint(30, (1, 6))),
    "BatchNorm, accepted": (lambda: images(nn.BatchNorm2d(8), nn.ReLU(inplace=True)), IMAGES),
    "BatchNorm without statistics, accepted": (lambda: images(nn.BatchNorm2d(8, track_running_stats=False)), IMAGES),
    "BatchNorm, frozen": (lambda: images(nn.BatchNorm2d(8).eval()), IMAGES),
    "norms of one sample": (lambda: images(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)), IMAGES),
    "ConvNeXt": (lambda: images(ConvNext(), ConvNext()), IMAGES),
    "EfficientNet": (lambda: images(Squeeze(), nn.Dropout2d(0.2)), IMAGES),
    "Mixer": (lambda: between(Mixer()), WORDS),
    "float64": (lambda: between(nn.LayerNorm(D)).double(), ROWS.double()),
    "bfloat16": (lambda: between(nn.LayerNorm(D)).bfloat16(), ROWS.bfloat16()),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_does_neither_is_left_alone(case: str) -> None:
    torch.manual_seed(0)
    make, inputs = LEFT_ALONE[case]
    found = tried(make(), inputs)
    assert (found.fault, found.untried) == (None, None)
    assert found.found is not None


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_nor_is_it_refused_in_float64(case: str) -> None:
    """Where numbers may differ by less."""
    torch.manual_seed(0)
    make, inputs = LEFT_ALONE[case]
    found = tried(make().double(), as_tuple(inputs)[0].double() if as_tuple(inputs)[0].is_floating_point() else inputs)
    assert (found.fault, found.untried) == (None, None)


class Single(nn.Module):
    """Computes in float32 what is rounded otherwise in a batch of another size."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() + 1.1 * len(x) - 1.1 * len(x)).to(x)


def test_numbers_of_float64_may_have_been_rounded() -> None:
    found = tried(between(Single()).double(), WORDS.double())
    assert (found.fault, found.untried) == (None, None)


def test_under_autocast_what_is_rounded_is_no_coupling() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = tried(between(nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)), WORDS)
    assert (found.fault, found.untried) == (None, None)


class Threshold(nn.Module):
    """Decides by a number that is rounded otherwise in a batch of another size, as the logits of a router are."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x + 1.1 * len(x) - 1.1 * len(x) > 0.5, x, -x)


def test_what_rounding_decides_is_no_coupling() -> None:
    """In float64 it decides alike."""
    near = 0.5 + torch.arange(-40, 40) * 2.0**-25
    together, apart = (Threshold()(near.repeat(n, 1)) for n in (4, 2))
    decided = near[(together[0] != apart[0]) & (near != 0.5)]
    assert len(decided), "in float32 it does not"
    values = torch.rand(4, D)
    values[1, :] = decided[0]
    found = tried(nn.Sequential(Threshold()), values)
    assert (found.fault, found.untried) == (None, None)


def test_a_layer_that_does_not_run_on_a_few_samples_is_told() -> None:
    def fours(x: Tensor) -> Tensor:
        return x.reshape(-1, 4, D).reshape(-1, D)

    found = tried(between(Of(fours)), ROWS)
    assert found.fault is None
    assert found.untried is not None
    assert found.untried.startswith("layer '1' (Of): RuntimeError: shape '[-1, 4, 16]' is invalid for input of size 32")


@pytest.mark.parametrize(("count", "rows"), [(1, 2), (2, 2), (3, 3), (9, 4)])
def test_rows_to_try_are_few_and_no_two_alike(count: int, rows: int) -> None:
    inputs = torch.randint(20, (count, 7)), torch.rand(count, 7), torch.arange(count)
    found = rows_to_try(inputs)
    assert [len(t) for t in found] == [rows] * 3
    assert len({tuple(row.tolist()) for row in found[0]}) == rows
    assert all(torch.equal(t[0], whole[0]) for t, whole in zip(found, inputs, strict=True))


@pytest.mark.parametrize("backend", get_args(Backend))
def test_every_back_end_tries_layers_in_its_first_step_and_takes_the_word(backend: Backend) -> None:
    plan = make_plan([{"cuts": [3] if backend == "torch" else [1, 1, 1], "sizes": [4, 4]}], schedule="gpipe")

    def wrapped(**more: Any) -> Any:
        torch.manual_seed(0)
        return hetpipe.wrap(between(Of(lambda x: x - x.mean(0))), plan, ROWS, mse, backend=backend, **more)

    try:
        engine = wrapped()
        with pytest.raises(InputError, match=r"^layer '1' \(Of\) couples the samples of a batch: for 4 samples"):
            engine.step(ROWS, ROWS)
        assert all(p.grad is None for p in engine.parameters())
        engine.close()
        engine = wrapped(coupled_layers="per_microbatch")
        assert engine.step(ROWS, ROWS) > 0
        engine.close()
        with pytest.raises(InputError, match="unknown coupled_layers 'per_batch'; did you mean 'per_microbatch'"):
            wrapped(coupled_layers="per_batch")
    finally:
        dist.destroy_process_group()


def test_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(InputError, match=r"^layer '1' \(Counting\) keeps state: 'steps' changes in its forward"):
            hetpipe.auto(between(Counting()), (ROWS, ROWS), mse, global_batch=8)
    finally:
        dist.destroy_process_group()
    assert list(tmp_path.iterdir()) == []


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 99, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 8}, "gemma2": {"head_dim": 8}, "phi3": {}, "olmo2": {},
    "granite": {}, "gpt_neox": {}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "bloom": {"n_layer": 1, "n_head": 4},
    "mixtral": {"num_local_experts": 4}, "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16},
}  # fmt: skip


class Whole(nn.Module):
    """A model of transformers as one layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=words, use_cache=False).logits
        return logits


@pytest.mark.parametrize("kind", PUBLISHED)
def test_no_model_of_transformers_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **PUBLISHED[kind])).train()
    found = tried(nn.Sequential(Whole(model)), torch.randint(3, 90, (4, 12)))
    assert (found.fault, found.untried) == (None, None)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_no_model_of_the_zoo_is_refused(name: str) -> None:
    from tests.zoo import ZOO, batch

    torch.manual_seed(0)
    net = ZOO[name].build(**ZOO[name].config)
    materialise(net)
    found = try_layers(named_layers(net), cut_to_try(as_tuple(batch(name, 0)[0])))
    assert (found.fault, found.untried) == (None, None)
