"""Batches, losses and their weights."""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.files.messages import InputError
from hetpipe.layers.model import (
    Loss,
    Model,
    accuracy,
    as_tuple,
    as_value,
    batch_size,
    cross_entropy,
    mse,
    named_layers,
    select,
    split_rows,
    unsplit_note,
)

IGNORED = -100


def test_a_tensor_stands_for_itself_and_a_list_for_a_tuple() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    assert as_tuple(a) == (a,)
    assert as_tuple([a, b]) == (a, b)
    assert as_value((a,)) is a
    assert as_value([a, b]) == (a, b)
    with pytest.raises(TypeError, match="a tensor or a tuple of tensors, found str"):
        as_tuple((a, "b"))


def test_rows_of_all_tensors() -> None:
    x, y = torch.arange(10), torch.arange(20).reshape(10, 2)
    assert batch_size((x, y)) == 10
    parts = split_rows((x, y), [5, 4, 1])
    assert [batch_size(part) for part in parts] == [5, 4, 1]
    assert as_tuple(parts[1])[0].tolist() == [5, 6, 7, 8]
    assert as_tuple(parts[2])[1].tolist() == [[18, 19]]
    assert as_tuple(select((x, y), slice(2, 4)))[1].tolist() == [[4, 5], [6, 7]]


def test_the_sample_is_repeated() -> None:
    net = nn.Sequential(nn.Identity())
    model = Model(name="m", layers=net, inputs=torch.arange(3), targets=torch.arange(3) * 2, loss=Loss(function=mse))
    inputs, targets = model.sample(7)
    assert as_tuple(inputs)[0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert as_tuple(targets)[0].tolist() == [0, 2, 4, 0, 2, 4, 0]


def test_a_module_at_two_positions_is_listed_twice() -> None:
    relu = nn.ReLU()
    net = nn.Sequential(relu, nn.Linear(2, 2), relu)
    assert [name for name, _ in named_layers(net)] == ["0", "1", "2"]
    assert len(list(net.named_children())) == 2


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (nn.Linear(2, 2), "model 'm': expected an nn.Sequential whose children are the layers, found Linear"),
        (nn.Sequential(), "model 'm' has no layers"),
        (nn.Sequential(*[nn.ReLU()] * 20_000), "model 'm' has 20000 layers, the most that are planned are 10000"),
        (
            nn.Sequential(nn.ReLU(), cast(nn.Module, None)),
            r"layer 1 \('1'\) of the nn.Sequential is None: leave it out, or put an nn.Identity\(\) there",
        ),
        (nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU(), cast(nn.Module, None))), "^'1.1' of the nn.Sequential is None: leave"),
        (nn.Sequential(nn.LazyLinear(3)), r"layer '0' \(LazyLinear\): 'weight' has no shape before the module has run: call the"),
    ],
)
def test_what_is_no_model(layers: nn.Sequential, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Model(name="m", layers=layers, inputs=torch.zeros(1), targets=torch.zeros(1), loss=Loss(function=mse))


def test_a_sample_of_nothing_is_refused() -> None:
    nothing = torch.zeros(0, 3)
    with pytest.raises(InputError, match="the sample of model 'net' holds no samples: give a batch of at least one"):
        Model(name="net", layers=nn.Sequential(nn.ReLU()), inputs=nothing, targets=nothing, loss=Loss(function=mse))


def test_a_sample_of_other_targets_is_refused() -> None:
    with pytest.raises(InputError, match="the sample of model 'net' has 3 rows of inputs and 2 of targets; dimension 0"):
        Model(name="net", layers=nn.Sequential(nn.ReLU()), inputs=torch.ones(3), targets=torch.ones(2), loss=Loss(function=mse))


def test_an_unknown_weight_is_refused() -> None:
    with pytest.raises(InputError, match="loss weight 'token'; did you mean 'tokens'"):
        Loss(function=mse, weight="token")  # type: ignore[arg-type]


def test_counts() -> None:
    labels = torch.tensor([[1, IGNORED, 2], [IGNORED, IGNORED, IGNORED]])
    assert Loss(function=cross_entropy).count(labels) == 2
    assert Loss(function=cross_entropy, weight="tokens").count(labels) == 2
    assert Loss(function=cross_entropy, weight="tokens", ignore_index=2).count(labels) == 5


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from(["samples", "tokens"]), st.randoms())
def test_shares_of_any_split_sum_to_the_mean_of_the_whole(sizes: list[int], weight: str, random: object) -> None:
    draw = torch.Generator().manual_seed(random.randrange(1 << 30))  # type: ignore[attr-defined]
    rows = sum(sizes)
    output = torch.randn(rows, 3, 5, generator=draw, dtype=torch.float64)
    labels = torch.randint(5, (rows, 3), generator=draw)
    if weight == "tokens":
        labels[torch.rand(rows, 3, generator=draw) < 0.6] = IGNORED
        labels[0, 0] = 1
    loss = Loss(function=cross_entropy, weight=weight)  # type: ignore[arg-type]
    whole = loss.count(labels)
    shares = [loss.share(o, t, whole) for o, t in zip(split_rows(output, sizes), split_rows(labels, sizes), strict=True)]
    assert float(sum(shares)) == pytest.approx(float(cross_entropy(output, labels)), abs=1e-12)


def test_nothing_but_ignored_targets_is_zero_with_zero_gradients() -> None:
    output = torch.full((2, 5), float("-inf"), requires_grad=True)
    share = Loss(function=cross_entropy, weight="tokens").share(output, torch.full((2,), IGNORED), 7.0)
    share.backward()
    assert float(share.detach()) == 0.0
    assert output.grad is not None
    assert torch.equal(output.grad, torch.zeros(2, 5))


def test_what_a_batch_without_weight_sums_is_not_lost() -> None:
    """A detection loss over its positives: a micro-batch that had none contributed nothing, and gradients were off by a third."""

    def positives(more: float) -> Loss:
        def weight(targets: Tensor) -> Tensor:
            return targets.sum() + more * len(targets)

        def function(output: Tensor, targets: Tensor) -> Tensor:
            return F.binary_cross_entropy_with_logits(output, targets, reduction="sum") / weight(targets)

        return Loss(function=function, weight=weight)

    output, targets = torch.zeros(4, 1), torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    for loss, said in ((positives(0.0), "inf"), (Loss(function=mse, weight=lambda t: t.sum()), "1")):
        told = loss.lost(output[2:] + 1, targets[2:])
        assert told is not None
        assert told.startswith(f"a micro-batch of 2 samples weighs 0, but its loss is {said}: the loss of ")
    assert Loss(function=cross_entropy, weight="tokens").lost(torch.zeros(2, 3), torch.tensor([-100, -100])) is None
    right = positives(1e-6)
    whole = right.count(targets)
    parts = [right.share(output[part], targets[part], whole) for part in (slice(0, 2), slice(2, 4))]
    assert float(sum(parts)) == pytest.approx(float(right.function(output, targets)), rel=1e-5)


def test_a_zero_share_keeps_the_type_of_the_output() -> None:
    output = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    assert Loss(function=cross_entropy, weight="tokens").share(output, torch.full((2,), IGNORED), 7.0).dtype == torch.float64


def test_only_whole_numbers_that_are_ignored_are_left_out_of_a_mean_over_samples() -> None:
    loss = Loss(function=cross_entropy)
    labels = torch.tensor([3, IGNORED])
    assert loss.skips_samples(labels)
    assert not loss.skips_samples(labels.abs())
    assert not loss.skips_samples(labels.double()), "a measured value may be -100"
    assert not Loss(function=cross_entropy, ignore_index=255).skips_samples(labels)
    assert not Loss(function=cross_entropy, weight="tokens").skips_samples(labels)


def test_bytes_hold_no_negative_class() -> None:
    """A byte that is compared with -100 is compared with 156."""
    labels = torch.tensor([156, 3], dtype=torch.uint8)
    assert Loss(function=cross_entropy, weight="tokens").count(labels) == 2
    assert Loss(function=cross_entropy, weight="tokens", ignore_index=156).count(labels) == 1
    assert accuracy(torch.eye(157)[labels.long()], labels) == (2.0, 2)


def test_accuracy_counts_what_is_not_ignored() -> None:
    logits = torch.eye(3)[torch.tensor([[0, 1, 2], [2, 2, 2]])]
    labels = torch.tensor([[0, 2, IGNORED], [2, 2, 1]])
    assert accuracy(logits, labels) == (3.0, 5)


def test_mse_of_two_tensors() -> None:
    zero: Tensor = torch.zeros(2, 2)
    assert float(mse(zero, torch.full((2, 2), 3.0))) == 9.0


def test_a_body_that_is_one_layer_is_told() -> None:
    """No plan cuts inside of it."""

    def row(count: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))

    said = "layer 1 ('body') is an nn.Sequential of 24 modules and is never split: put its modules into the outer one, and plans"
    assert unsplit_note(nn.Sequential(OrderedDict(embed=nn.Linear(2, 2), body=row(24), head=nn.Linear(2, 2)))).startswith(said)
    assert unsplit_note(nn.Sequential(row(9), row(7))) == (
        "layer 0 ('0') is an nn.Sequential of 9 modules and is never split; layer 1 ('1') is an nn.Sequential of 7 modules and "
        "is never split: put their modules into the outer one, and plans may cut between them"
    )
    assert unsplit_note(nn.Sequential(*(row(3) for _ in range(2)))) == "", "blocks"
    assert unsplit_note(nn.Sequential(*(row(6) for _ in range(6)))) == ""
