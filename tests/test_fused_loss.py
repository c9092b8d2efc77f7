"""`loss: {fused: true}` in chains and jobs: the head computes the loss, and nothing else changes. What computes it is tried in
test_chunked_loss.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"

from safetensors.torch import load_file

import hetpipe
from bench.reference import ReferenceEngine, train_reference
from hetpipe.building.build import build_data, build_layers, build_loss, build_model
from hetpipe.building.data import fetch
from hetpipe.building.datasets import DataSplits
from hetpipe.building.evaluated import counted_by
from hetpipe.documents.job import Job
from hetpipe.documents.sections.loss import LossSection
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.device import one_thread
from hetpipe.layers.losses.chunked import losses_of_logits
from hetpipe.layers.losses.fused import fused_cross_entropy
from hetpipe.layers.model import Loss, Model, as_tuple
from hetpipe.layers.weights import materialise
from hetpipe.measuring.profiler import profile_model
from hetpipe.models import causal_lm
from tests.support.fused import CHAINS, FUSED, MANY, PLAIN, build, samples, train
from tests.support.ranks import cluster_of, run_ranks
from tests.support.zoo import optimizer_of

F32 = torch.finfo(torch.float32).eps
BF16 = torch.finfo(torch.bfloat16).eps


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(torch.device("cpu")):
        yield


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
    seen, state = reference.evaluate((tokens, mask), targets, counted_by(PLAIN)), reference.layers.state_dict()
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
    ("kind", "linear"), [("llama", True), ("gpt2", True), ("phi", True), ("gemma2", False), ("granite", False), ("cohere", False)]
)
def test_which_heads_can_is_found_by_what_they_compute(kind: str, linear: bool) -> None:
    """Of gemma2 the logits are capped, of granite and cohere scaled."""
    from hetpipe.hf.replay.classes import causal_lm_of
    from hetpipe.hf.replay.tiny import tiny

    import transformers  # isort: skip

    config = tiny(*causal_lm_of(transformers.CONFIG_MAPPING[kind]())).to_dict()
    small = {
        key: config[key]
        for key in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
            "intermediate_size",
            "num_key_value_heads",
            "n_embd",
            "n_layer",
            "n_head",
        )
        if config.get(key) is not None and not (kind == "gpt2" and not key.startswith(("n_", "vocab")))
    }
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
    return Job.parse(
        {
            "format": "hetpipe.job/1",
            "model": model,
            "loss": loss,
            "train": {"global_batch": 4, "steps": 3},
            "data": data or {"name": "text", "args": {"context": 16, "limit_bytes": 4000}},
        },
        "job",
    )


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
    model = build_model(given, found)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"name": "bert"}}, "loss.fused is true, but model 'bert' has no argument 'labels'"),
        ({"model": {"name": "causal_lm", "args": {"type": "qwen3", "labels": True}}}, "model.args has 'labels', but 'fused' in"),
        ({"model": {"name": "causal_lm", "args": {"type": "gemma2"}}}, "'gemma2' cannot be computed a chunk of tokens at a time"),
        (
            {"data": {"name": "random_classification"}, "model": {"target": "tests.test_fused_loss:with_labels"}},
            r"layer '0' \(Linear\) does not run on the inputs",
        ),
        (
            {"data": {"target": "tests.test_fused_loss:masked", "args": {"ignored": 300}}},
            r"the target of sample 0 is 300, but layer 'head' \(Head\) gives 256 classes",
        ),
    ],
)
def test_jobs_that_cannot_are_told_why(change: dict[str, Any], message: str) -> None:
    wrong = job({"fused": True}, **change)
    with pytest.raises(InputError, match=message):
        build_model(wrong, build_data(wrong))


def test_auto_stays_plain_where_a_model_has_no_labels() -> None:
    made = job(
        {"fused": "auto"},
        model={"name": "mlp", "args": {"inputs": 32, "width": 8, "outputs": 10}},
        data={"name": "random_classification"},
    )
    model = build_model(made, build_data(made))
    assert len(as_tuple(model.inputs)) == 1
    assert getattr(model.loss.function, "func", None) is not fused_cross_entropy


def test_a_target_that_would_be_ignored_by_another_number_is_refused() -> None:
    data = {"target": "tests.test_fused_loss:masked", "args": {"ignored": -100}}
    wrong = job({"fused": True, "ignore_index": 0}, data=data)
    with pytest.raises(InputError, match=r"a target is -100, which is no class, but loss.ignore_index is 0"):
        build_model(wrong, build_data(wrong))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "mse", "fused": True}, "'fused' is for name: cross_entropy"),
        ({"target": "a:b", "fused": "auto"}, "'fused' is for name: cross_entropy"),
        ({"fused": True, "class_weights": [1, 2]}, "Leave 'class_weights' out, or 'fused'"),
        ({"fused": "yes"}, "fused"),
        ({"liger": True}, "computes the logits of a large vocabulary a chunk at a time"),
    ],
)
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
