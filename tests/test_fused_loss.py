"""`loss: {fused: true}`: the head computes the loss, a chunk of tokens at a time, and nothing else changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["HF_HUB_OFFLINE"] = "1"

from safetensors.torch import load_file

import hetpipe
from bench.reference import ReferenceEngine, train_reference
from hetpipe.building.build import build_data, build_layers, build_loss, build_metric, build_model
from hetpipe.building.data import fetch
from hetpipe.building.datasets import DataSplits
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.device import one_thread
from hetpipe.layers.losses import chunked
from hetpipe.layers.losses.chunked import losses_of_logits, token_losses
from hetpipe.layers.losses.fused import fused_cross_entropy
from hetpipe.layers.model import Loss, Model, as_tuple
from hetpipe.layers.weights import materialise
from hetpipe.measuring.profiler import profile_model
from hetpipe.models import causal_lm
from hetpipe.spec.job import Job, LossSection
from tests.support.fused import CHAINS, FUSED, MANY, PLAIN, build, samples, train
from tests.support.ranks import cluster_of, run_ranks
from tests.support.zoo import optimizer_of

F32 = torch.finfo(torch.float32).eps
BF16 = torch.finfo(torch.bfloat16).eps


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(torch.device("cpu")):
        yield


# ---- the function ----


class Head:
    """A head's features, weight, bias, and labels of which some are ignored; `upstream`, the gradient of each token's loss."""

    def __init__(self, *, tokens: int = 23, words: int = 50, bias: bool = True, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.features = torch.randn(tokens, 16, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(words, 16, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(words, dtype=dtype, requires_grad=True) if bias else None
        self.labels = torch.randint(words, (tokens,))
        self.labels[::5] = -100
        self.upstream = torch.randn(tokens, dtype=torch.promote_types(dtype, torch.float32))

    def fused(self) -> tuple[Tensor, Tensor]:
        return token_losses(self.features, self.weight, self.bias, self.labels)

    def plain(self) -> tuple[Tensor, Tensor]:
        return losses_of_logits(nn.functional.linear(self.features, self.weight, self.bias), self.labels)

    def gradients(self, losses: Tensor) -> list[Tensor]:
        leaves = [t for t in (self.features, self.weight, self.bias) if t is not None and t.requires_grad]
        return list(torch.autograd.grad(losses, leaves, self.upstream))


def far(found: Tensor, wanted: Tensor) -> float:
    """Relative to the greatest."""
    return float(((found - wanted).abs().max() / wanted.abs().max()).detach())


@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients_are_those_of_whole_logits(chunk: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK", chunk)
    head = Head(bias=bias)
    (losses, right), (wanted, also) = head.fused(), head.plain()
    assert far(losses, wanted) < 1e-13
    assert torch.equal(right, also)
    assert bool((losses[::5] == 0).all())
    for mine, theirs in zip(head.gradients(losses), head.gradients(wanted), strict=True):
        assert far(mine, theirs) < 1e-13


def test_only_ignored_tokens_and_none_at_all() -> None:
    head = Head()
    head.labels[:] = -100
    losses, right = head.fused()
    assert not bool(losses.any() | right.any())
    assert not any(bool(g.any()) for g in head.gradients(losses))
    losses, right = token_losses(head.features[:0].view(2, 0, 16), head.weight, None, head.labels[:0].view(2, 0))
    assert losses.shape == right.shape == (2, 0)
    assert not bool(torch.autograd.grad(losses.sum(), head.weight)[0].any())


def test_what_does_not_train_gets_no_gradient() -> None:
    head = Head()
    head.weight.requires_grad_(False)
    losses, _ = head.fused()
    losses.backward(head.upstream)
    wanted, _ = head.plain()
    assert head.weight.grad is None
    assert far(head.features.grad, torch.autograd.grad(wanted, head.features, head.upstream)[0]) < 1e-13  # type: ignore[arg-type]
    with torch.no_grad():
        assert not head.fused()[0].requires_grad


def test_nothing_as_large_as_the_logits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK", 8)
    head, kept, made = Head(tokens=64, words=1000), dict[int, int](), list[int]()

    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            every = found if isinstance(found, tuple | list) else (found,)
            made.extend(t.numel() for t in every if isinstance(t, Tensor))
            return found

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Sizes():
        losses, _ = head.fused()
        losses.backward(head.upstream)
    assert sum(kept.values()) == 1000 * 16 + 1000 + 64 * 16 + 64 + 64  # weight, bias, features, labels, sums
    assert max(made) == 1000 * 16  # the weight's gradient; the logits of a chunk are half as many


# ---- a head that does not train ----


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def frozen(dtype: torch.dtype = torch.float64, **options: Any) -> Head:
    head = Head(dtype=dtype, **options)
    for parameter in (head.weight, head.bias):
        if parameter is not None:
            parameter.requires_grad_(False)
    return head


@pytest.mark.parametrize(("kind", "forward", "backward"), [
    ("frozen", 2, 0), ("trained", 1, 3), ("only the bias trains", 1, 2), ("float32 weight of bfloat16 features", 1, 2),
    ("no gradient is wanted", 1, None), ("features want none", 1, None),
])  # fmt: skip
def test_how_many_products_there_are(kind: str, forward: int, backward: int | None) -> None:
    """In one chunk. Where the head is frozen, the features' gradient is made in forward, if anything wants it."""
    head = Head() if kind == "trained" else frozen()
    if kind == "only the bias trains":
        assert head.bias is not None
        head.bias.requires_grad_()
    elif kind == "float32 weight of bfloat16 features":
        head.features = head.features.detach().bfloat16().requires_grad_()
        head.weight, head.bias = head.weight.float(), None
    elif kind == "features want none":
        head.features.requires_grad_(False)
    with torch.set_grad_enabled(kind != "no gradient is wanted"), Products() as products:
        losses, _ = head.fused()
    assert products.count == forward
    assert losses.requires_grad == (backward is not None)
    if backward is not None:
        with Products() as products:
            head.gradients(losses)
        assert products.count == backward


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "autocast"), [
    (torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None),
    (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16),
])  # fmt: skip
def test_a_gradient_made_in_forward_is_as_near(
    dtype: torch.dtype, autocast: torch.dtype | None, bias: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is the same bit by bit, and the gradient as near to that of float64 as one that is made in backward."""
    monkeypatch.setattr(chunked, "CHUNK", chunk)
    head = frozen(dtype, tokens=200, words=300, bias=bias)
    exact = frozen(tokens=200, words=300, bias=bias)
    exact.features = head.features.detach().double().requires_grad_()
    exact.weight, exact.bias = head.weight.double(), head.bias.double() if head.bias is not None else None
    exact.labels = head.labels
    (truth,) = torch.autograd.grad(exact.plain()[0], exact.features, head.upstream.double())
    found = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(chunked, "_is_made_early", lambda *_: False)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            losses, right = head.fused()
        (gradient,) = head.gradients(losses)
        assert gradient.dtype == dtype
        assert not bool(gradient[::5].any()), "ignored"
        found.append((losses, right, (gradient.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] <= 1.05 * found[1][2] + 1e-15
    if dtype == torch.float64:
        assert found[0][2] < 1e-14


def test_what_is_kept_of_a_frozen_head_has_the_features_size() -> None:
    kept, head = list[Tensor](), frozen(torch.float32, tokens=64, words=1000)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        losses, _ = head.fused()
    assert {(t.dtype, t.numel()) for t in kept} == {(torch.float32, 64 * 16), (torch.int64, 64)}
    (gradient,) = torch.autograd.grad(losses, head.features, head.upstream.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ---- types ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_product_is_low_and_the_softmax_is_not(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain: the same logits, rounded to bfloat16. Sums over words then round as float32 does, and gradients, whose products
    are of bfloat16 in both, by half a unit of it in what is multiplied and once a chunk."""
    monkeypatch.setattr(chunked, "CHUNK", 8)
    head = Head(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        (losses, right), (wanted, also) = head.fused(), head.plain()
    assert losses.dtype == torch.float32
    assert far(losses, wanted) < 50 * F32
    assert torch.equal(right, also)
    exact = Head(dtype=dtype)
    with torch.no_grad():
        assert exact.bias is not None
        rounded = nn.functional.linear(*(t.bfloat16().float() for t in (exact.features, exact.weight, exact.bias)))
    assert far(losses, losses_of_logits(rounded, exact.labels)[0]) < 4 * BF16
    for mine, theirs in zip(head.gradients(losses), head.gradients(wanted), strict=True):
        assert mine.dtype == dtype
        assert far(mine.float(), theirs.float()) < 4 * BF16


def test_parameters_in_half_precision_have_a_loss_of_float32() -> None:
    low = Head(dtype=torch.bfloat16)
    losses, _ = low.fused()
    exact = nn.functional.linear(low.features, low.weight, low.bias).double()
    assert losses.dtype == torch.float32
    assert far(losses, losses_of_logits(exact, low.labels)[0]) < 50 * F32


@pytest.mark.parametrize("label", [50, -1])
def test_a_label_that_is_no_word_is_no_loss(label: int) -> None:
    head = Head()
    head.labels[3] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        head.fused()


# ---- chains ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train, cluster_of(3, 2), str(tmp_path_factory.mktemp("fused")))


@pytest.mark.parametrize("name", CHAINS)
def test_unequal_replicas_train_as_one_device_does_with_all_logits(name: str, trained: list[dict[str, Any]]) -> None:
    reference = ReferenceEngine(build(name, labels=False), PLAIN)
    optimizer, losses = optimizer_of(reference.parameters()), []
    for step in range(3):
        tokens, mask, targets = samples(step)
        losses.append(reference.step((tokens, mask), targets))
        optimizer.step()
    tokens, mask, targets = samples(3)
    seen, state = reference.evaluate((tokens, mask), targets, build_metric(PLAIN)), reference.layers.state_dict()
    for rank in trained:
        assert rank[name]["losses"] == pytest.approx(losses, abs=1e-10, rel=0)
        assert rank[name]["seen"].loss == pytest.approx(seen.loss, abs=1e-10)
        assert rank[name]["seen"].metric == pytest.approx(seen.metric)
        assert all(float((value - state[key]).abs().max()) < 1e-10 for key, value in rank[name]["state"].items())
    assert {key for rank in trained for key in rank[name]["state"]} == state.keys()


@pytest.mark.parametrize("name", CHAINS)
def test_a_checkpoint_exports_the_same_folder_with_labels_and_without(
    name: str, trained: list[dict[str, Any]], tmp_path: Path
) -> None:
    chains = {labels: build(name, labels=labels) for labels in (False, True)}
    assert list(chains[False].state_dict()) == list(chains[True].state_dict())
    assert [n for n, _ in chains[False].named_parameters()] == [n for n, _ in chains[True].named_parameters()]
    for labels, layers in chains.items():
        export_weights(layers, Path(trained[0][name]["checkpoint"]), tmp_path / str(labels))
    one, other = (load_file(tmp_path / each / "model.safetensors") for each in ("False", "True"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (tmp_path / "False" / "config.json").read_text() == (tmp_path / "True" / "config.json").read_text()


def test_the_profile_and_the_meter_see_as_many_bytes_less(trained: list[dict[str, Any]]) -> None:
    tokens, mask, targets = samples(0)
    kept = []
    for labels, loss in ((False, PLAIN), (True, FUSED)):
        inputs = (tokens, mask, targets) if labels else (tokens, mask)
        layers = build("tied", labels=labels, vocab_size=MANY)
        model = Model(name="m", layers=layers, inputs=inputs, targets=targets, loss=loss)
        profile = profile_model(model, microbatch_sizes=[1], repeats=1)
        kept.append(profile.layers[-1].saved_bytes_per_sample + profile.layers[-1].output_bytes_per_sample)
    assert kept[0] - kept[1] > 1.9 * MANY * tokens.shape[1] * 8  # the logits of a sample, and what their softmax keeps
    for last in (2, 4):  # the ranks of last stages, whose largest micro-batch has two samples
        (plain,), (fused,) = trained[last]["bytes"]
        assert plain - fused == pytest.approx(2 * (kept[0] - kept[1]), rel=0.02)


@pytest.mark.parametrize(
    ("kind", "linear"),
    [("llama", True), ("gpt2", True), ("phi", True), ("gemma2", False), ("granite", False), ("cohere", False)],
)
def test_which_heads_can_is_found_by_what_they_compute(kind: str, linear: bool) -> None:
    """Of gemma2 the logits are capped, of granite and cohere scaled."""
    from hetpipe.hf.replay.classes import causal_lm_of
    from hetpipe.hf.replay.tiny import tiny

    import transformers  # isort: skip

    config = tiny(*causal_lm_of(transformers.CONFIG_MAPPING[kind]())).to_dict()
    small = {key: config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                                          "intermediate_size", "num_key_value_heads", "n_embd", "n_layer", "n_head")
             if config.get(key) is not None and not (kind == "gpt2" and not key.startswith(("n_", "vocab")))}  # fmt: skip
    if not linear:
        with pytest.raises(InputError, match=rf"of type '{kind}' cannot be computed a chunk of tokens at a time: its logits are"):
            causal_lm.build(type=kind, labels=True, **small)
    found = []
    tokens, _, targets = samples(0)
    for labels in (False, True if linear else "auto"):
        torch.manual_seed(1)
        layers = causal_lm.build(type=kind, labels=labels, **small).eval().to(torch.float64)
        materialise(layers)
        assert (layers[-1].linear is not None) == linear
        assert layers[-1].words == small["vocab_size"]
        found.append(layers((tokens, targets) if labels else tokens))
    losses, right = losses_of_logits(found[0], targets)
    assert float((found[1][0] - losses).detach().abs().max()) < 1e-10
    assert torch.equal(found[1][1], right)


def test_labels_that_are_missing_and_heads_that_were_changed_are_told() -> None:
    layers = build("untied", labels=True)
    materialise(layers)
    tokens, mask, targets = samples(0)
    for given in (tokens, (tokens, mask.bool())):
        with pytest.raises(ValueError, match="the last tensor of a sample's inputs must be its labels"):
            layers(given)
    layers[-1].lm_head = nn.utils.parametrizations.weight_norm(layers[-1].lm_head)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight of 'lm_head', which must be a plain nn.Linear and is of type Parametrized"):
        layers((tokens, mask, targets))


# ---- jobs ----

MODEL = {"name": "causal_lm", "args": {**CHAINS["tied"], "vocab_size": 256}}


def job(loss: dict[str, Any], model: dict[str, Any] = MODEL, data: dict[str, Any] | None = None) -> Job:
    return Job.parse({"format": "hetpipe.job/1", "model": model, "loss": loss, "train": {"global_batch": 4, "steps": 3},
                      "data": data or {"name": "text", "args": {"context": 16, "limit_bytes": 4000}}}, "job")  # fmt: skip


def masked(ignored: int = -100, kind: str = "int64") -> DataSplits:
    """Data without `__getitems__`, of pairs."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(1, 200, (9, 12), generator=draw)
    targets = words.roll(-1, 1).to(getattr(torch, kind))
    targets[:, -1] = ignored
    mask = torch.ones_like(words)
    return DataSplits(train=[((w, m), t) for w, m, t in zip(words, mask, targets, strict=True)])  # type: ignore[arg-type]


def test_a_job_trains_and_evaluates_the_same_with_a_fused_loss() -> None:
    sections: list[dict[str, Any]] = [{}, {"fused": True}, {"fused": "auto"}]
    plain, fused, auto = (train_reference(job({"name": "cross_entropy", **section})) for section in sections)
    assert plain.evaluation is not None
    for other in (fused, auto):
        assert other.losses == pytest.approx(plain.losses, rel=1e-5)
        assert other.evaluation is not None
        assert other.evaluation.loss == pytest.approx(plain.evaluation.loss, rel=1e-5)
        assert other.evaluation.metric == pytest.approx(plain.evaluation.metric)


@pytest.mark.parametrize(("ignored", "kind"), [(-100, "int64"), (0, "uint8"), (255, "uint8"), (-100, "int32")])
def test_labels_come_last_and_what_is_ignored_is(ignored: int, kind: str) -> None:
    data = {"target": "tests.test_fused_loss:masked", "args": {"ignored": ignored, "kind": kind}}
    loss = {"fused": True, "weight": "tokens", "ignore_index": ignored}
    given = job(loss, data=data)
    found = build_data(given)
    (words, mask, labels), targets = fetch(found.train, torch.arange(4))
    assert labels.dtype == torch.int64
    assert bool((labels[:, -1] == -100).all())
    assert torch.equal(labels[:, :-1], targets[:, :-1].long())
    model = build_model(given, found.train)
    materialise(model.layers)
    plain = build_loss(LossSection(weight="tokens", ignore_index=ignored))
    layers = build_layers(job({}))
    materialise(layers)
    with torch.no_grad():
        value = float(model.loss.function(model.layers((words, mask, labels)), targets))
        assert value == pytest.approx(float(plain.function(layers((words, mask)), targets.long())), rel=1e-5)
    assert model.loss.count(targets) == 4 * 11


def with_labels(labels: Any = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(("change", "message"), [
    ({"model": {"name": "gpt2"}}, "loss.fused is true, but model 'gpt2' has no argument 'labels'"),
    ({"model": {"name": "causal_lm", "args": {"type": "qwen3", "labels": True}}}, "model.args has 'labels', which 'fused' in"),
    ({"model": {"name": "causal_lm", "args": {"type": "gemma2"}}}, "'gemma2' cannot be computed a chunk of tokens at a time"),
    ({"data": {"name": "random_classification"}, "model": {"target": "tests.test_fused_loss:with_labels"}},
     r"layer '0' \(Linear\) does not run on the inputs"),
    ({"data": {"target": "tests.test_fused_loss:masked", "args": {"ignored": 300}}},
     r"the target of sample 0 is 300, but layer 'head' \(Head\) gives 256 classes"),
])  # fmt: skip
def test_jobs_that_cannot_are_told_why(change: dict[str, Any], message: str) -> None:
    wrong = job({"fused": True}, **change)
    with pytest.raises(InputError, match=message):
        build_model(wrong, build_data(wrong).train)


def test_auto_stays_plain_where_a_model_has_no_labels() -> None:
    made = job({"fused": "auto"}, model={"name": "mlp", "args": {"inputs": 32, "width": 8, "outputs": 10}},
               data={"name": "random_classification"})  # fmt: skip
    model = build_model(made, build_data(made).train)
    assert len(as_tuple(model.inputs)) == 1
    assert getattr(model.loss.function, "func", None) is not fused_cross_entropy


def test_a_target_that_would_be_ignored_by_another_number_is_refused() -> None:
    data = {"target": "tests.test_fused_loss:masked", "args": {"ignored": -100}}
    wrong = job({"fused": True, "ignore_index": 0}, data=data)
    with pytest.raises(InputError, match=r"a target is -100, but loss.ignore_index is 0"):
        build_model(wrong, build_data(wrong).train)


@pytest.mark.parametrize(("section", "message"), [
    ({"name": "mse", "fused": True}, "'fused' is for name: cross_entropy"),
    ({"target": "a:b", "fused": "auto"}, "'fused' is for name: cross_entropy"),
    ({"fused": True, "class_weights": [1, 2]}, "leave 'class_weights' out, or 'fused'"),
    ({"fused": "yes"}, "fused"),
    ({"liger": True}, "computes the logits of a large vocabulary a chunk at a time"),
])  # fmt: skip
def test_wrong_sections_are_told(section: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(section)


def test_a_fused_loss_of_logits_is_told() -> None:
    tokens, mask, targets = samples(0)
    layers = build("tied", labels=False)
    materialise(layers)
    with pytest.raises(InputError, match=r"of the targets' shape; the last layer gives \(6, 10, 64\) for targets of "):
        hetpipe.fused_cross_entropy(layers((tokens, mask)), targets)
    assert Loss(function=hetpipe.fused_cross_entropy, weight="tokens").count(targets) < targets.numel()
