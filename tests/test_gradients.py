"""Buckets of gradients: how a group is cut, when each is summed, what is left where; hashes of parameters."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hetpipe.documents.cluster import BUCKET_BYTES
from hetpipe.layers.weights import fingerprint
from hetpipe.runtime import gradients
from hetpipe.runtime.gradients import GradientSync
from hetpipe.runtime.replicas import OwnerGroup
from tests.support.owners import GROUP, REPLACED, Sums, TwoOwners, backward, beside, chain_of_layers, same_gradients, sync_of


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    found = Sums()
    monkeypatch.setattr("torch.distributed.all_reduce", found)
    return found


def train(layers: nn.Module, sync: GradientSync, microbatches: int, *, told: bool = True) -> None:
    sync.begin()
    for i in range(microbatches):
        if told and i == microbatches - 1:
            sync.last_backward()
        layers(torch.full((2, 4), i + 1.0, dtype=torch.float64, requires_grad=True)).square().sum().backward()


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), max_size=12),
    st.integers(1, 300),
)
def test_buckets_hold_every_parameter_once_from_the_last_to_the_first(rows: list[tuple[int, torch.dtype]], limit: int) -> None:
    parameters = tuple(nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "BUCKET_BYTES", limit)
        sync = GradientSync([OwnerGroup("layers", (0, 1), parameters)], {(0, 1): GROUP}, 0)
    place = {p: number for number, p in enumerate(parameters)}
    found = [[place[p] for p in bucket.parameters] for bucket in sync._buckets]
    assert sorted(chain(*found)) == list(range(len(parameters)))
    for dtype in {p.dtype for p in parameters}:
        own = [bucket for bucket in found if parameters[bucket[0]].dtype == dtype]
        assert list(chain(*own)) == [i for i in reversed(range(len(parameters))) if parameters[i].dtype == dtype]
        sizes = [sum(parameters[i].numel() * dtype.itemsize for i in bucket) for bucket in own]
        assert all(size <= limit or len(bucket) == 1 for size, bucket in zip(sizes, own, strict=True))
        firsts = [parameters[bucket[0]].numel() * dtype.itemsize for bucket in own[1:]]
        assert all(size + first > limit for size, first in zip(sizes, firsts, strict=False)), "two would have been one"
    assert sync.gradient_bytes == sum(p.numel() * p.element_size() for p in parameters)


def test_a_bucket_is_summed_while_the_layers_before_it_run_backward(sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 20 * 8)  # a layer
    layers = chain_of_layers(3)
    sync = sync_of(layers, (0, 1))
    before: list[int] = []  # sums that had begun when backward came to each layer
    for layer in layers:
        layer.register_full_backward_pre_hook(lambda *_: before.append(len(sums.sizes)))
    train(layers, sync, 2)
    assert before == [0, 0, 0, 0, 1, 2]
    assert sums.sizes == [20 + 2] * 3
    sync.finish()
    assert len(sums.sizes) == 3


def test_who_is_asked_before_a_sum_begins_in_backward(sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an emulated device is, which has made its gradients later; not for sums that begin after backward."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 20 * 8)  # a layer
    layers = chain_of_layers(3)
    sync, asked = sync_of(layers, (0, 1)), list[tuple[int, bool]]()
    place = {p: i for i, layer in enumerate(layers) for p in layer.parameters()}
    sync.ready = lambda parameters: asked.extend((len(sums.sizes), place[p] == 2 - len(sums.sizes)) for p in parameters)
    train(layers, sync, 2)
    assert asked == [(n, True) for n in (0, 0, 1, 1, 2, 2)]
    train(layers, sync, 1, told=False)
    sync.finish()
    assert len(asked) == 6


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("limit", [1, 100, BUCKET_BYTES])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_are_the_sum_over_owners_and_as_views_of_it(
    sums: Sums, monkeypatch: pytest.MonkeyPatch, limit: int, microbatches: int, told: bool
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", limit)
    layers, alone = chain_of_layers(3), chain_of_layers(3)
    sync, plain = sync_of(layers, (0, 1)), sync_of(alone, (0,))
    for _ in range(2):
        train(layers, sync, microbatches, told=told)
        sync.finish()
        train(alone, plain, microbatches, told=told)
        plain.finish()
        for own, single in zip(layers.parameters(), alone.parameters(), strict=True):
            assert own.grad is not None
            assert single.grad is not None
            assert torch.equal(own.grad, 2 * single.grad)
        assert sync.square_norm() == pytest.approx(4 * plain.square_norm(), rel=1e-12)
        sync.scale(0.5)
        assert sync.square_norm() == pytest.approx(plain.square_norm(), rel=1e-12)
    for summed in (sync, plain):
        assert summed.is_finite()
        next(p for p in (layers if summed is sync else alone).parameters()).grad.view(-1)[0] = float("nan")  # type: ignore[union-attr]
        assert not summed.is_finite()


class Sometimes(nn.Module):
    """Uses its second layer where `use` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.even, self.never = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.even(x) if self.use else x

    use = True


@pytest.mark.parametrize("uses", [(True, False), (False, True)])
def test_a_parameter_that_some_microbatches_do_not_use_is_summed_and_one_that_nobody_uses_has_no_gradient(
    sums: Sums, uses: tuple[bool, bool]
) -> None:
    model = Sometimes()
    sync = GradientSync([OwnerGroup("layers", (0, 1), tuple(model.parameters()))], {(0, 1): GROUP}, 0)
    sync.begin()
    for number, model.use in enumerate(uses):
        if number:
            sync.last_backward()
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert not sums.sizes, "one parameter is still missing"
    sync.finish()
    assert len(sums.sizes) == 1
    assert model.even.weight.grad is not None
    assert float(model.even.weight.grad.abs().sum()) > 0
    assert model.never.weight.grad is None


def test_sparse_gradients_are_summed_as_dense_ones(sums: Sums) -> None:
    for ranks in ((0, 1), (0,)):
        embedding = nn.Embedding(5, 2, sparse=True)
        sync = GradientSync([OwnerGroup("layers", ranks, tuple(embedding.parameters()))], {(0, 1): GROUP}, 0)
        sync.begin()
        sync.last_backward()
        embedding(torch.tensor([1, 1, 3])).sum().backward()
        sync.finish()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.tolist() == [[len(ranks) * n] * 2 for n in (0.0, 2.0, 0.0, 1.0, 0.0)]
    assert sums.sizes == [11]


def test_copies_of_a_tied_parameter_add_their_gradient_and_get_the_sum(sums: Sums) -> None:
    own, copy = (nn.Parameter(torch.ones(3)) for _ in range(2))
    group, device = OwnerGroup("tied", (0, 1), (own,)), torch.device("cpu")
    sync = GradientSync([group], {(0, 1): GROUP}, 0, copies={own: [copy]}, device=device)
    sync.begin()
    (own.sum() * 2 + copy.sum() * 3).backward()
    assert not sums.sizes
    sync.finish()
    for holder in (own, copy):
        assert holder.grad is not None
        assert holder.grad.tolist() == [10.0] * 3
    assert sums.sizes == [4]


# ---- gradients that a user has replaced since the sum ----


replaced = pytest.mark.parametrize("name", REPLACED)


@replaced
@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
@pytest.mark.parametrize("limit", [100, BUCKET_BYTES])
def test_what_a_user_puts_in_the_place_of_a_gradient_is_what_counts(
    sums: Sums, monkeypatch: pytest.MonkeyPatch, limit: int, ranks: tuple[int, ...], name: str
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", limit)
    layers = chain_of_layers(3)
    sync = sync_of(layers, ranks)
    for _ in range(2):  # the next step begins as if nothing had been replaced
        train(layers, sync, 2)
        sync.finish()
        wanted = beside(layers)
        for parameters in (wanted, list(layers.parameters())):
            REPLACED[name](parameters)
        left = [p.grad.detach() for p in wanted if p.grad is not None]
        assert sync.is_finite()
        assert sync.square_norm() == pytest.approx(sum(float(g.square().sum()) for g in left), rel=1e-12)
        sync.scale(0.5)
        assert same_gradients(layers.parameters(), [None if p.grad is None else p.grad * 0.5 for p in wanted])
        assert sync.square_norm() == pytest.approx(sum(float(g.square().sum()) for g in left) / 4, rel=1e-12)
        for parameter in layers.parameters():
            if parameter.grad is not None:
                parameter.grad = torch.full_like(parameter, torch.inf)
                assert not sync.is_finite()
                parameter.grad = torch.zeros_like(parameter)
                assert sync.is_finite()


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_a_copys_gradient_that_was_replaced_is_scaled_and_not_counted_again(sums: Sums, ranks: tuple[int, ...]) -> None:
    own, copy = (nn.Parameter(torch.ones(3)) for _ in range(2))
    sync = GradientSync([OwnerGroup("tied", ranks, (own,))], {(0, 1): GROUP}, 0, copies={own: [copy]}, device=torch.device("cpu"))
    sync.begin()
    (own.sum() * 2 + copy.sum() * 3).backward()
    sync.finish()
    summed = 5.0 * len(ranks)
    for p in (own, copy):
        assert p.grad is not None
        p.grad = p.grad * 2
    assert sync.square_norm() == pytest.approx(3 * (2 * summed) ** 2)
    sync.scale(0.25)
    assert [p.grad.tolist() if p.grad is not None else None for p in (own, copy)] == [[summed / 2] * 3] * 2
    copy.grad = None
    sync.scale(2.0)
    assert own.grad is not None
    assert own.grad.tolist() == [summed] * 3
    assert copy.grad is None


# ---- steps that add up ----


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> TwoOwners:
    found = TwoOwners()
    monkeypatch.setattr("torch.distributed.all_reduce", found)
    return found


@replaced
@pytest.mark.parametrize("limit", [100, BUCKET_BYTES])
def test_steps_that_add_up_begin_with_the_part_that_is_kept_once(
    owners: TwoOwners, monkeypatch: pytest.MonkeyPatch, limit: int, name: str
) -> None:
    """Two owners have the sum of the step before, each: kept by both it would count twice."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", limit)
    models = [chain_of_layers(3) for _ in range(2)]
    kept = (None, 0.25, 0.5, None, 3.0)

    def steps(rank: int) -> list[list[Tensor | None]]:
        layers, found = models[rank], []
        sync = GradientSync([OwnerGroup("layers", (0, 1), tuple(layers.parameters()))], {(0, 1): GROUP}, rank)
        for step, part in enumerate(kept):
            sync.begin(part)
            sync.last_backward()
            backward(layers, rank, step)
            sync.finish()
            found.append([p.grad for p in beside(layers)])
            REPLACED[name](list(layers.parameters()))
            found.append([p.grad for p in beside(layers)])
            assert sync.square_norm() == pytest.approx(
                0.0 if rank else sum(float(g.square().sum()) for g in found[-1] if g is not None), rel=1e-12
            )
        return found

    found = owners.run(steps)
    alone = chain_of_layers(3)
    for step, part in enumerate(kept):
        for p in alone.parameters():
            p.grad = None if p.grad is None or part is None else p.grad.detach() * part
        for rank in range(2):
            backward(alone, rank, step)
        for at, replace in ((2 * step, REPLACED["nothing"]), (2 * step + 1, REPLACED[name])):
            replace(list(alone.parameters()))
            for rank in range(2):
                assert same_gradients(alone.parameters(), found[rank][at]), (rank, step)


def test_what_is_infinite_counts_once_too(owners: TwoOwners) -> None:
    """Times 0 it would be no number on the owner that does not keep it."""

    def steps(rank: int) -> list[float]:
        layer = nn.Linear(1, 2, bias=False)
        sync = GradientSync([OwnerGroup("layers", (0, 1), tuple(layer.parameters()))], {(0, 1): GROUP}, rank)
        for kept, slope in ((None, torch.tensor([torch.inf, 1.0])), (0.5, torch.tensor([1.0, 1.0]))):
            sync.begin(kept)
            (layer.weight[:, 0] * slope).sum().backward()
            sync.finish()
        assert layer.weight.grad is not None
        return layer.weight.grad.flatten().tolist()

    assert owners.run(steps) == [[torch.inf, 0.5 * 2 + 2]] * 2


# Which of its parts the model of an owner uses in two steps; which have a gradient afterwards.
USES = {
    "in the first step only": ((("even",), ("even",)), ((), ()), {"even"}),
    "in the second step only": (((), ()), (("even",), ("even",)), {"even"}),
    "by one owner, in the first step": (((), ("even",)), ((), ()), {"even"}),
    "by one owner each": (((), ("even",)), (("never",), ()), {"even", "never"}),
    "by nobody": (((), ()), ((), ()), set()),
}


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("name", USES)
def test_a_parameter_that_one_of_the_steps_used_has_a_gradient(owners: TwoOwners, name: str, dropped: bool) -> None:
    """Unless it was set to None in between: then the steps since count."""
    first, second, after = USES[name]

    def steps(rank: int) -> set[str]:
        model = Sometimes()
        sync = GradientSync([OwnerGroup("layers", (0, 1), tuple(model.parameters()))], {(0, 1): GROUP}, rank)
        for kept, parts in ((None, first[rank]), (0.5, second[rank])):
            sync.begin(kept)
            x = model.always(torch.ones(2, 4, dtype=torch.float64))
            for part in parts:
                x = model.get_submodule(part)(x)
            x.sum().backward()
            sync.finish()
            if dropped and kept is None:
                for part in ("even", "never"):
                    model.get_submodule(part).weight.grad = None
        return {part for part in ("even", "never") if model.get_submodule(part).weight.grad is not None}

    wanted = {part for parts in second for part in parts} if dropped else after
    assert owners.run(steps) == [wanted] * 2


def test_a_copys_gradient_is_not_kept_beside_the_sum_that_has_it(owners: TwoOwners) -> None:
    def steps(rank: int) -> list[list[float]]:
        own, copy, found = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), list[list[float]]()
        group = OwnerGroup("tied", (0, 1), (own,), tied=True)
        sync = GradientSync([group], {(0, 1): GROUP}, rank, copies={own: [copy]}, device=torch.device("cpu"))
        for kept in (None, 0.5, 2.0):
            sync.begin(kept)
            (own.sum() * (2 + rank) + copy.sum() * 3).backward()
            sync.finish()
            assert own.grad is not None
            assert copy.grad is not None
            assert torch.equal(own.grad, copy.grad)
            found.append(own.grad.tolist())
        return found

    assert owners.run(steps) == [[[11.0] * 2, [16.5] * 2, [44.0] * 2]] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_a_fingerprint_tells_any_two_words_apart_and_their_order(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randint(-100, 100, shape, generator=draw).to(dtype) for shape in ((7, 3), (1,), (2**20 + 5,))]
    own = fingerprint(tensors)
    assert own.dtype == torch.int64
    assert 0 <= int(own) < 2**62
    assert int(fingerprint([t.clone() for t in tensors])) == int(own)
    for number, place in ((0, 0), (0, 20), (1, 0), (2, 2**20 + 4), (2, 77)):
        other = [t.clone() for t in tensors]
        other[number].view(-1)[place] += 1
        assert int(fingerprint(other)) != int(own)
    swapped = [tensors[0].flip(0), *tensors[1:]]
    assert int(fingerprint(swapped)) != int(own)
    assert int(fingerprint([tensors[1], tensors[0], tensors[2]])) != int(own)
    if dtype.is_floating_point:
        zeros = torch.zeros(3, dtype=dtype)
        assert int(fingerprint([zeros])) != int(fingerprint([-zeros]))  # bits, not values
