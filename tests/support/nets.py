"""Small models with one difficulty each, in float64, and batches for them. All have ten layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.layers.adapters.adapt import adapt
from hetpipe.layers.model import Tensors, as_tuple
from hetpipe.layers.numbers import turn, type_name
from tests.support.blocks import LENGTH, WIDTH, WORDS, Block
from tests.support.splittable import every_style, in_blocks, partly_frozen, splittable, tied_splittable

LAYERS = 10


class InFull(Block):
    """A layer that turns autocast off for itself, as parts are that need more bits; its backward needs them, too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.linear.weight.dtype))


def blocks() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def tied_language_model() -> nn.Sequential:
    """Layer 0 embeds, layer 9 predicts with the same weight."""
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, *[Block() for _ in range(LAYERS - 2)], head)


class Fan(nn.Module):
    """(x, mask) → (x, class of each sample, mask, weight per sample): floats, integers, booleans, and floats without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensors) -> Tensors:
        x, mask = as_tuple(given)
        return self.linear(x), x.argmax(-1), mask, x.detach().abs().mean(-1, keepdim=True)


class Through(nn.Module):
    """Uses every tensor of the tuple and hands all on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)

    def forward(self, given: Tensors) -> Tensors:
        x, index, mask, weight = as_tuple(given)
        return torch.tanh(self.linear(x)) * mask + weight * self.table(index), index, mask, weight


class Join(nn.Module):
    def forward(self, given: Tensors) -> Tensor:
        return as_tuple(given)[0]


def tuples() -> nn.Sequential:
    return nn.Sequential(Fan(), *[Through() for _ in range(LAYERS - 2)], Join())


class Spare(nn.Module):
    """x → (x, a float that needs a gradient but that nothing uses)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensors:
        return torch.tanh(self.linear(x)), self.other(x)


class Carry(nn.Module):
    """Uses the first tensor only, and hands both on."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, given: Tensors) -> Tensors:
        x, spare = as_tuple(given)
        return self.block(x), spare


def unused_output() -> nn.Sequential:
    """The spare crosses every boundary up to the last layer, which drops it."""
    return nn.Sequential(Spare(), *[Carry() for _ in range(LAYERS - 2)], Join())


class Late(nn.Module):
    """Uses the second tensor in micro-batches of an even number of samples only."""

    def forward(self, given: Tensors) -> Tensor:
        x, spare = as_tuple(given)
        return x if x.shape[0] % 2 else x + spare.sum(-1, keepdim=True)


def output_used_by_even_microbatches() -> nn.Sequential:
    """The spare has no gradient in micro-batches of an odd number of samples."""
    return nn.Sequential(Spare(), *[Carry() for _ in range(LAYERS - 2)], Late())


class Turn(nn.Module):
    """[b, 4, 8] → [b, 8, 4] and back: its output is not contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).transpose(1, 2)


def transposed() -> nn.Sequential:
    return nn.Sequential(*[Turn(WIDTH if index % 2 == 0 else 4) for index in range(LAYERS)])


class Idle(nn.Module):
    """Has a parameter that takes no part in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.unused = Block(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


def unused_parameter() -> nn.Sequential:
    return nn.Sequential(*[Idle() for _ in range(LAYERS)])


def frozen(*layers: int) -> Callable[[], nn.Sequential]:
    def build() -> nn.Sequential:
        net = blocks()
        for index in layers:
            net[index].requires_grad_(False)
        return net

    return build


def with_adapters(net: Callable[[], nn.Sequential], **options: Any) -> Callable[[], nn.Sequential]:
    """Adapters of rank 2 beside a frozen net; B is not zero, or A would have no gradient at first."""

    def build() -> nn.Sequential:
        made = adapt(net(), seed=1, r=2, alpha=3, **options)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
        return made

    return build


def shared_modules() -> nn.Sequential:
    """One nn.Tanh at three positions, one nn.Linear at three."""
    tanh, linear = nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(linear, tanh, Block(), linear, tanh, Block(), Block(), tanh, linear, Block())


class AddInPlace(nn.Module):
    """x += 1, without saying so by an `inplace` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return x


def in_place() -> nn.Sequential:
    """Layers 2, 4, 6 and 7 write into their input, also where a stage begins with them."""
    linear = (0, 1, 3, 5, 8, 9)
    row: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) if index in linear else nn.ReLU(inplace=True) for index in range(LAYERS)]
    row[6] = AddInPlace()
    return nn.Sequential(*row)


def declared_in_place() -> nn.Sequential:
    """The same with layers that say so: these can be recomputed."""
    row = list(in_place())
    row[6] = nn.Hardtanh(-0.5, 0.5, inplace=True)
    return nn.Sequential(*row)


def with_dropout_and_batch_norm() -> nn.Sequential:
    half = [(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.ReLU(), Block()) for _ in range(2)]
    return nn.Sequential(*half[0], *half[1])


def bare_parameters() -> nn.Sequential:
    """Identity and Flatten as whole stages: stages without parameters, whose output is their input."""
    row: list[nn.Module] = [Block() if index in (0, 1, 2, 3, 9) else nn.Identity() for index in range(LAYERS)]
    return nn.Sequential(*row)


def partly_in_full() -> nn.Sequential:
    return nn.Sequential(*[InFull() if index % 3 == 1 else Block() for index in range(LAYERS)])


class Rows(nn.Module):
    """[b, rows, 8] and a mask [b, rows] → the same, each row seeing all that the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, given: Tensors) -> Tensors:
        x, mask = as_tuple(given)
        seen = (x * mask.unsqueeze(-1)).sum(1, keepdim=True) / (1 + mask.sum(1)).view(-1, 1, 1)
        return self.block(x) + 0.1 * seen, mask


class Mean(nn.Module):
    def forward(self, given: Tensors) -> Tensor:
        return as_tuple(given)[0].mean(1)


def pictures() -> nn.Sequential:
    """Of any number of rows, with a mask: targets have the same shape whatever these are."""
    return nn.Sequential(*[Rows() for _ in range(LAYERS - 1)], Mean())


class Rivals(nn.Module):
    """[b, 2, 8] → [2b, 8]: from here on both rivals of a sample are rows of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class Scores(nn.Module):
    """[2b, 8] → [b, 2]: a sample's again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1, bias=False)  # one would move both scores alike

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x).view(-1, 2)
        return scores


def pairs() -> nn.Sequential:
    """A sample is two rivals, which only the loss compares."""
    return nn.Sequential(Rivals(), *[Block() for _ in range(LAYERS - 2)], Scores())


def preference(output: Tensors, targets: Tensors) -> Tensor:
    """The mean of how little the one that is preferred (0 or 1) leads, as in Bradley and Terry's model."""
    (scores,), (preferred,) = as_tuple(output), as_tuple(targets)
    lead = (scores[:, 0] - scores[:, 1]) * (1 - 2 * preferred)
    return -nn.functional.logsigmoid(lead).mean()


class OwnFew(nn.Module):
    """Keeps a frozen matrix in types of its own, in which nothing computes: in float8, and as two numbers of 4 bits a byte. It
    casts them itself, by a frozen scale; an adapter and a bias train."""

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn, width: int = WIDTH) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width).to(dtype), requires_grad=False)
        self.packed = nn.Parameter(torch.randint(0, 256, (width, width // 2), dtype=torch.uint8), requires_grad=False)
        self.register_buffer("shift", torch.full((), 0.125).to(torch.float8_e5m2))
        self.scale = nn.Parameter(torch.full((width, 1), 0.3), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, width) / 4), nn.Parameter(torch.randn(width, 2) / 4)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        packed = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1).to(x.dtype) / 8 - 1
        matrix = (self.matrix.to(x.dtype) + packed + self.get_buffer("shift").to(x.dtype)) * self.scale
        low_rank = nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return x + torch.tanh(nn.functional.linear(x, matrix, self.bias) + low_rank)


def own_few() -> nn.Sequential:
    """Between blocks that train; one layer, which is the last of a stage, with nothing that does."""
    few = [OwnFew(), OwnFew(torch.float8_e5m2), OwnFew(), OwnFew(torch.float8_e5m2).requires_grad_(False)]
    return nn.Sequential(Block(), few[0], Block(), few[1], few[2], few[3], *[Block() for _ in range(LAYERS - 6)])


NETS: dict[str, Callable[[], nn.Sequential]] = {
    "blocks": blocks,
    "partly in full": partly_in_full,
    "tied": tied_language_model,
    "tuples": tuples,
    "unused output": unused_output,
    "sometimes used output": output_used_by_even_microbatches,
    "transposed": transposed,
    "unused parameter": unused_parameter,
    "first stage frozen": frozen(0, 1, 2, 3),
    "first two stages frozen": frozen(0, 1, 2, 3, 4, 5, 6),
    "first stage and a part frozen": frozen(0, 1, 2, 3, 4),
    "layer frozen": frozen(2, 6),
    "middle stage frozen": frozen(4, 5, 6),
    "last stage frozen": frozen(7, 8, 9),
    "shared modules": shared_modules,
    "in place": in_place,
    "declared in place": declared_in_place,
    "dropout and BatchNorm": with_dropout_and_batch_norm,
    "identities": bare_parameters,
    "pictures": pictures,
    "pairs": pairs,
    "pairs, LoRA": with_adapters(pairs),
    "LoRA": with_adapters(blocks),
    "LoRA in the upper half": with_adapters(blocks, targets=[f"{index}.linear" for index in range(5, LAYERS)]),
    "LoRA in the lower half": with_adapters(blocks, targets=[f"{index}.linear" for index in range(4)]),
    "DoRA and norms": with_adapters(blocks, use_dora=True, train_also=["norms"]),
    "tied, LoRA": with_adapters(tied_language_model, train_also=["embed", "head"]),
    "nf4, rsLoRA": with_adapters(blocks, base="nf4", rank_stabilized=True),
    "few bits of its own": own_few,
    "splittable": splittable,
    "splittable, partly frozen": partly_frozen,
    "tied, splittable": tied_splittable,
    "splittable, LoRA": with_adapters(splittable),
    "splittable, DoRA": with_adapters(every_style, use_dora=True),
    "splittable, DoRA, dropout": with_adapters(every_style, use_dora=True, dropout=0.3),
    "splittable, fp8": with_adapters(every_style, base="fp8"),
    "splittable, int8": with_adapters(every_style, base="int8"),
    "splittable, int8, DoRA": with_adapters(every_style, base="int8", use_dora=True),
    "splittable, nf4": with_adapters(in_blocks, base="nf4"),
    "splittable, nf4, DoRA": with_adapters(in_blocks, base="nf4", use_dora=True),
    "int8, DoRA": with_adapters(blocks, base="int8", use_dora=True),
}


def build(net: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The net with the same weights every time."""
    torch.manual_seed(0)
    layers = NETS[net]()
    turn(layers, type_name(dtype))  # type: ignore[arg-type]
    return layers


def copied(tensor: Tensor) -> Tensor:
    """A copy that goes from process to process, and can be compared: float8 as its bytes, since pickle cannot read what it wrote
    of it."""
    found = tensor.detach().clone()
    return found.view(torch.uint8) if found.is_floating_point() and found.element_size() == 1 else found


def batch(net: str, size: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensors, Tensors]:
    """Inputs and targets of one step."""
    draw = torch.Generator().manual_seed(100 + step)
    targets = torch.randn(size, WIDTH, generator=draw).to(dtype)
    x = torch.randn(size, WIDTH, generator=draw).to(dtype)
    if net.startswith("tied"):
        words = torch.randint(WORDS, (size, LENGTH + 1), generator=draw)
        labels = words[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=draw) < 0.4] = -100
        labels[4:8] = -100  # a whole micro-batch of four
        labels[-3:] = -100
        return words[:, :-1], labels
    if net == "tuples":
        return (x, torch.rand(size, WIDTH, generator=draw) < 0.7), targets
    if net == "pictures":
        rows = torch.randn(size, 8, WIDTH, generator=draw).to(dtype)
        return (rows, torch.rand(size, 8, generator=draw) < 0.7), targets
    if net.startswith("pairs"):
        return torch.randn(size, 2, WIDTH, generator=draw).to(dtype), torch.randint(2, (size,), generator=draw)
    if net == "transposed":
        return torch.randn(size, 4, WIDTH, generator=draw).to(dtype), torch.randn(size, 4, WIDTH, generator=draw).to(dtype)
    if net == "dropout and BatchNorm":
        return x, torch.randint(WIDTH, (size,), generator=draw)
    return x, targets
