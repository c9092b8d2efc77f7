"""A loss is tried before it trains: what is no mean over its weight is refused, and what is one is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, Model, cross_entropy, mse
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.trials.loss_check import check_loss, check_sample
from hetpipe.layers.trials.loss_trial import Trial, telling_rows
from hetpipe.layers.untouched.boundaries import trace_boundaries
from tests.support.losses import IGNORED, LABELS, LOGITS, MODEL, NUMBERS, POINTS, TOKENS, WEIGHTS, WORDS, refused, spec, tried
from tests.support.means import MEANS, Shifted, of_words


@pytest.mark.parametrize("case", MEANS)
def test_a_mean_is_none_of_our_business(case: str) -> None:
    function, targets, *output = MEANS[case]
    before = torch.get_rng_state()
    assert tried(function, targets, *output) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("function", "targets", "output", "weight"),
    [
        (cross_entropy, IGNORED, WORDS, "tokens"),
        (of_words, IGNORED, WORDS, "tokens"),
        (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS, LOGITS, lambda t: WEIGHTS[t].sum()),
        (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS[:1], spec(1, 4), lambda t: float(WEIGHTS[t].sum())),
    ],
)
def test_a_mean_by_its_own_weight(function: Any, targets: Tensor, output: TensorSpec, weight: Any) -> None:
    assert tried(function, targets, output, weight=weight) is None


NEITHER = "Its weight is neither samples nor tokens. For a weighted mean give what it divides by, as a function of the targets"


@pytest.mark.parametrize(
    ("function", "targets", "output", "weight", "expected"),
    [
        (
            lambda o, t: F.cross_entropy(o, t, reduction="sum"),
            LABELS,
            LOGITS,
            "samples",
            "It looks like a sum: return the mean (reduction='mean')",
        ),
        (lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS), LABELS, LOGITS, "samples", NEITHER),
        (lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS), LABELS * 0, LOGITS, "samples", NEITHER),  # one class in the sample
        (
            lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS.bfloat16()),
            LABELS,
            spec(12, 4, dtype=torch.bfloat16),
            "samples",
            NEITHER,
        ),
        (of_words, IGNORED, WORDS, "samples", "It looks like a mean over the targets that are not -100: write 'weight: tokens'"),
        (
            lambda o, t: of_words(o, t, reduction="none").mean(1).mean(),
            IGNORED,
            WORDS,
            "tokens",
            "It looks like a mean over samples: write 'weight: samples' in the job's loss section, or loss_weight='samples'",
        ),
        (
            lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(o))),
            LABELS,
            LOGITS,
            "samples",
            "a loss over pairs of samples, or a root of a mean, is no mean over samples",
        ),
        (lambda o, t: F.mse_loss(o, t).sqrt(), POINTS, NUMBERS, "samples", NEITHER),
        (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS, LOGITS, lambda t: 2 * WEIGHTS[t].square().sum(), NEITHER),
    ],
)
def test_what_is_no_mean(function: Any, targets: Tensor, output: TensorSpec, weight: Any, expected: str) -> None:
    said = refused(function, targets, output, weight=weight)
    assert said.startswith("the loss is no mean weighed by "), said
    assert expected in said


def where_numbers(output: Tensor, targets: Tensor) -> Tensor:
    found: Tensor = (output - targets.nan_to_num()).square()[~targets.isnan()].mean()
    return found


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(ignore_index=9)

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = self.loss(output.transpose(1, 2), targets)
        return result


def by_hand(output: Tensor, targets: Tensor, ignore_index: int = 9) -> Tensor:
    counts = targets != ignore_index
    return F.cross_entropy(output[counts], targets[counts])


@pytest.mark.parametrize(
    ("function", "targets", "output", "weight", "value"),
    [
        (lambda o, t: of_words(o, t, ignore_index=9), TOKENS, WORDS, "samples", "9"),
        (Inside(), TOKENS, WORDS, "samples", "9"),
        (by_hand, TOKENS, WORDS, "samples", "9"),
        (partial(by_hand, ignore_index=8), TOKENS, WORDS, "samples", "8"),
        (Shifted(ignore_index=9), TOKENS, WORDS, "samples", "9"),
        (lambda o, t: of_words(o, t) + 0.1 * o.square().mean(), TOKENS, WORDS, "tokens", "-100"),
        (lambda o, t: F.cross_entropy(o[t >= 0], t[t >= 0]), LABELS, LOGITS, "samples", "-1"),
        (lambda o, t: (o - t).square()[t >= 0].mean(), POINTS.abs(), NUMBERS, "samples", "-1"),
        (where_numbers, POINTS, NUMBERS, "samples", "nan"),
    ],
)
def test_what_a_loss_leaves_out_is_tried_before_it_comes(
    function: Any, targets: Tensor, output: TensorSpec, weight: Any, value: str
) -> None:
    """Such targets came in steps 3, 5, 6 and 7, in which no loss is tried, and gradients were wrong."""
    said = refused(function, targets, output, weight=weight)
    assert said.startswith(f"on targets of which a part was set to {value}, as a mask may be in later batches, the loss is no ")
    if weight == "samples" and value != "nan" and not targets.is_floating_point():
        assert f"or loss_weight=lambda targets: (targets != {value}).sum()" in said
        own = Loss(function=function, weight="tokens", ignore_index=int(value))
        assert check_loss(Trial(model=MODEL, loss=own, output=[output], targets=targets, rows=len(targets))) is None


def test_a_rare_class_s_weight_is_seen() -> None:
    """The batch has one of its samples, or none."""
    weights = torch.ones(40)
    weights[7] = 10.0
    labels = torch.where(torch.arange(30) == 11, 7, torch.arange(30) % 3 + 20)
    assert NEITHER in refused(lambda o, t: F.cross_entropy(o, t, weight=weights), labels, spec(30, 40))
    for function in (nn.CrossEntropyLoss(weight=weights), nn.NLLLoss(weights), partial(F.cross_entropy, weight=weights)):
        assert refused(function, labels[:11], spec(11, 40)) == (
            "the loss is no mean weighed by samples: it divides by the sum of its class weights (1 to 10). A batch is cut into "
            "micro-batches, so gradients would be wrong. For a weighted mean give what it divides by, as a function of the "
            "targets (in the job's loss section 'weight_fn: module:function', or loss_weight=function; for class weights "
            "'class_weights: […]' in the job, or loss_weight=lambda targets: weights[targets].sum())"
        )
    assert tried(nn.CrossEntropyLoss(weight=torch.ones(4)), LABELS, LOGITS) is None
    assert tried(nn.CrossEntropyLoss(weight=WEIGHTS), torch.eye(4), spec(4, 4)) is None, "of probabilities, it divides by samples"


def test_both_numbers_are_said() -> None:
    said = refused(lambda o, t: o.sum() * 0 + t.sum(), torch.tensor([1, 2, 0, 3, 2]), spec(5, 4))
    assert said == (
        "the loss is no mean weighed by samples: on outputs drawn at random it is 8 for 5 samples; it is 3 for 2 of them and 5 "
        "for the other 3, whose mean is 4.2 (weights 2 and 3). A batch is cut into micro-batches, so gradients would be wrong. "
        "It looks like a sum: return the mean (reduction='mean')"
    )


def test_a_mask_among_the_outputs_is_drawn_too() -> None:
    def masked(output: Any, targets: Tensor) -> Tensor:
        logits, mask = output
        found: Tensor = (of_words(logits, targets, reduction="none") * mask).sum() / mask.sum()
        return found

    assert NEITHER in refused(masked, TOKENS, WORDS, spec(6, 5, dtype=torch.bool, requires_grad=False))


def _raises(output: Tensor, targets: Tensor) -> Tensor:
    if bool((output.diff(dim=1) < 0).any()):
        raise ValueError("outputs must be sorted")
    return output.mean()


NOTES: dict[str, tuple[Any, ...]] = {
    "it gives another number each time": (lambda o, t: F.cross_entropy(F.dropout(o, 0.5), t), LABELS, LOGITS),
    "on outputs drawn at random it raises ValueError: outputs must be sorted": (_raises, LABELS, LOGITS),
    "on outputs drawn at random it gives nan": (lambda o, t: (o * 0 / 0).mean(), LABELS, LOGITS),
    "on outputs drawn at random it raises AssertionError: Torch not compiled with CUDA": (
        lambda o, t: F.cross_entropy(o.cuda(), t.cuda()),
        LABELS,
        LOGITS,
    ),
    "the model's output ((12, 4); ()) does not have a row for each sample": (lambda o, t: o[1], LABELS, LOGITS, spec()),
    "none of the samples that were looked at counts": (of_words, IGNORED * 0 - 100, WORDS),
    "only one of the samples that were looked at counts": (of_words, IGNORED.where(torch.arange(6)[:, None] == 3, -100), WORDS),
    "the output of two samples would have 40000000 numbers": (lambda o, t: o.mean(), LABELS, spec(2, 20_000_000)),
}


@pytest.mark.parametrize("note", NOTES)
def test_what_cannot_be_tried_is_noted(note: str) -> None:
    function, targets, *output = NOTES[note]
    if "CUDA" in note and torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA")
    found = tried(function, targets, *output, weight="tokens" if "counts" in note else "samples")
    assert found is not None
    assert found.startswith(note)


GIVEN = "the output of layer 'head' (Linear) ((12, 4) of float32) and targets ("


@pytest.mark.parametrize(
    ("function", "targets", "output", "expected"),
    [
        (
            lambda o, t: F.cross_entropy(o, t, reduction="none"),
            LABELS,
            LOGITS,
            f"the loss must return one number, found a tensor of shape (12,) for {GIVEN}(12,) of int64, 0 to 3): return its mean",
        ),
        (lambda o, t: 1.5, LABELS, LOGITS, "the loss must return a tensor of one number, found float"),
        (lambda o, t: None, LABELS, LOGITS, "the loss must return a tensor of one number, found NoneType"),
        (lambda o, t: (o.argmax(1) == t).sum(), LABELS, LOGITS, "the loss must return a floating-point number, found one of"),
        (lambda o, t: F.cross_entropy(o.detach(), t), LABELS, LOGITS, "the loss requires no gradient: what it returns does not"),
        (lambda o: o.mean(), LABELS, LOGITS, "takes 1 positional argument but 2 were given"),
        (
            F.cross_entropy,
            LABELS.reshape(6, 2),
            spec(6, 4),
            "does not run on the output of layer 'head' (Linear) ((6, 4) of float32) and targets ((6, 2) of int64, 0 to 3)",
        ),
        (F.binary_cross_entropy_with_logits, LABELS, spec(12, 1), "ValueError: Target size (torch.Size([12])) must be the same"),
        (
            lambda o, t: F.cross_entropy(o, t),
            torch.tensor([1, 2, 99, 3]),
            spec(4, 4),
            "and targets ((4,) of int64, 1 to 99): IndexError: Target 99 is out of bounds.",
        ),
        (mse, POINTS[:, 0], spec(6, 1), "mse: the model's output has shape (6, 1), the targets (6,); they must be equal"),
    ],
)
def test_what_no_loss_does(function: Any, targets: Tensor, output: TensorSpec, expected: str) -> None:
    assert expected in refused(function, targets, output)


@pytest.mark.parametrize("function", [cross_entropy, F.cross_entropy, nn.CrossEntropyLoss(), nn.NLLLoss()])
def test_a_label_that_is_no_class(function: Any) -> None:
    assert refused(function, torch.tensor([1, -100, 2, 99, 3]), spec(5, 4), weight="tokens") == (
        "the sample: the target of sample 3 is 99, but layer 'head' (Linear) gives 4 classes (0 to 3); -100 is ignored"
    )
    assert "the target of sample 1 is -1, but" in refused(function, torch.tensor([1, -1]), spec(2, 4))


@pytest.mark.parametrize("function", [cross_entropy, mse, lambda output, targets: 2 * output.sum()])
def test_outputs_that_no_loss_can_train_on(function: Any) -> None:
    """They ended with a line of code: an index out of range, or a loss that torch does not have for whole numbers."""
    assert refused(function, LABELS, spec(), rows=12) == (
        "layer 'head' (Linear), the last, gives one number for the whole batch (() of float32), which cannot be cut into "
        "micro-batches: let it give a row for each sample, and leave sums and means to the loss"
    )
    assert refused(function, LABELS, spec(12, dtype=torch.int64, requires_grad=False)) == (
        "layer 'head' (Linear), the last, gives whole numbers only ((12,) of int64), which have no gradient: let it give the "
        "numbers of which they were made (of an argmax, the logits)"
    )
    said = "layer 'head' (Linear), the last, gives no tensor: it must give what the loss is computed of"
    assert refused(function, LABELS, rows=12) == said


def test_a_model_may_give_its_own_loss() -> None:
    """One layer on every device, as FastSpeed's isModelOutputLoss has it: the number of a micro-batch is its loss."""
    said = tried(lambda output, targets: output, LABELS, spec(), rows=12)
    assert said is not None
    assert "does not have a row for each sample" in said


def test_a_model_of_which_nothing_would_be_trained() -> None:
    """It trained for as long as it was told to, and learned nothing."""

    class Detached(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).detach()

    layers, inputs = nn.Sequential(nn.Linear(3, 3), Detached(3, 4)), torch.ones(12, 3)
    model = Model(name="m", layers=layers, inputs=inputs, targets=LABELS, loss=Loss(function=cross_entropy))
    with pytest.raises(InputError, match=r"what layer '1' \(Detached\), the last, gives depends on no .* such as '0.weight', so"):
        check_sample(model, trace_boundaries(layers, inputs)[-1], "the sample")
    for parameter in layers.parameters():
        parameter.requires_grad_(False)
    check_sample(model, trace_boundaries(layers, inputs)[-1], "the sample")  # somebody wants it so


class Named(nn.CrossEntropyLoss):
    """Cross-entropy itself."""


def test_a_subclass_is_known_where_it_computes_the_same() -> None:
    """Classes were looked for in dimension 1, as torch's own has them."""
    assert tried(Shifted(), TOKENS, WORDS) is None
    assert "the target of sample 3 is 99, but layer" in refused(Named(), torch.tensor([1, 0, 2, 99, 3]), spec(5, 4))


@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_checkpointing_in_a_loss_is_refused(reentrant: bool) -> None:
    """The head's gradient stayed on each last stage, and could not be seen."""
    head = nn.Linear(4, 4)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(head, output, use_reentrant=reentrant), targets)

    said = refused(loss, LABELS, LOGITS)
    assert said.startswith("the loss uses reentrant checkpointing, under which a" if reentrant else "the loss depends on a param")


def test_weights_are_numbers_that_add_up() -> None:
    weight: Any
    for weight, expected in (
        (lambda t: WEIGHTS[t], "the loss's weight of a batch must be one number, found tensor([2.0000, 3.0000, "),
        (lambda t: None, "the loss's weight of a batch must be one number, found None"),
        (lambda t: -1.0, "the loss's weight of a batch is -1.0; it must be finite and not below 0"),
        (lambda t: torch.tensor(torch.nan), "the loss's weight of a batch is nan; it must be finite and not below 0"),
        (lambda t: WEIGHTS[t].mean(), "the weight of a batch must be the sum of its parts' (return the sum over the targets"),
    ):
        assert expected in refused(nn.CrossEntropyLoss(weight=WEIGHTS), torch.tensor([1, 2, 3, 0, 1]), LOGITS, weight=weight)


def test_rows_that_tell() -> None:
    labels = torch.tensor([1] * 300 + [7] + [1] * 90 + [0] + [1] * 9)
    assert {300, 391} <= set(telling_rows(labels, 5).tolist())
    assert telling_rows(torch.tensor([4, 4, 4, 6, 4, 5]), 3).tolist() == [0, 3, 5]
    assert telling_rows(torch.tensor([4]), 5).tolist() == [0, 0]
    assert telling_rows((POINTS, LABELS[:6]), 4).tolist() == [0, 1, 2, 5]


# ---- in wrap and auto ----
