"""Layers that couple the samples of a batch, keep state, or add a gradient of their own, by name, with what is said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from hetpipe.layers.model import Tensors

D = 16
_draw = torch.Generator().manual_seed(0)
ROWS, WORDS, IMAGES = (torch.randn(shape, generator=_draw) for shape in ((8, D), (8, 6, D), (6, 3, 8, 8)))


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
    "attention over samples": (
        lambda: nn.Sequential(Self(batch_first=False)),
        WORDS,
        "Its MultiheadAttention 'attention' takes dimension 0 for time, not for samples: give it",
    ),
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
    "a mean in an attribute that evaluation reads": (
        lambda: between(Evaluated(in_place=False)),
        ROWS,
        f"{KEEPS}: the tensor in its attribute 'mean' changes in its forward, and",
    ),
    "a mean in an attribute, in place": (
        lambda: between(nn.Sequential(Evaluated(in_place=True))),
        ROWS,
        f"{KEEPS}: the tensor in its attribute '0.mean' changes in its forward, and depends on",
    ),
    "spectral_norm": (lambda: between(spectral_norm(nn.Linear(D, D))), ROWS, f"{KEEPS}: 'weight_u' changes"),
    "spectral norm as a parametrization": (lambda: between(parametrizations.spectral_norm(nn.Linear(D, D))), ROWS, KEEPS),
    "a scale of the first batch": (lambda: between(ActNorm()), ROWS, f"{KEEPS}: 'scale' changes in its forward"),
    "a count": (lambda: between(Counting()), ROWS, f"{KEEPS}: 'steps' changes in its forward"),
}
