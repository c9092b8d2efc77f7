"""Names and targets of a job file become models, data, losses, optimizers and schedules, or a message."""

from __future__ import annotations

import logging
import logging.handlers
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.building.build import build_data, build_loss, build_model, build_scheduler, check_training, optimizer_factory
from hetpipe.building.evaluated import counted_by
from hetpipe.documents.job import Job, ProfileSection
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.loss import LossSection
from hetpipe.documents.sections.torch_named import SchedulerSection, TorchNamed
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, cross_entropy, mse
from hetpipe.layers.numbers import as_type
from hetpipe.measuring.measure import profile_cluster
from hetpipe.processes.world import alone
from tests.support.jobs import MLP, POINTS
from tests.support.ranks import cluster_of
from tests.support.user_parts import CLASS_WEIGHTS, weighted

USER = "tests.support.user_parts:"


def job(**sections: Any) -> Job:
    content = {"format": "hetpipe.job/1", "model": MLP, "data": POINTS, "train": {"global_batch": 8, "steps": 5}}
    return Job.parse({**content, **sections}, "job")


def training(**keys: Any) -> Job:
    return job(train={"global_batch": 8, "steps": 5, **keys})


def message(job: Job) -> str:
    """What building the job's data and model says."""
    with pytest.raises(InputError) as caught:
        build_model(job, build_data(job))
    return str(caught.value)


def test_a_model_of_the_registry_with_the_seed_of_the_job() -> None:
    data = build_data(job())
    first, again, other = (build_model(training(seed=seed), data) for seed in (3, 3, 4))
    assert (first.name, len(first.layers)) == ("mlp", 6)
    assert (first.inputs.shape, first.targets.shape) == ((4, 8), (4,))  # type: ignore[union-attr]
    equal = [torch.equal(a, b) for a, b in zip(first.layers.parameters(), again.layers.parameters(), strict=True)]
    assert all(equal)
    assert not torch.equal(next(first.layers.parameters()), next(other.layers.parameters()))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_and_floating_inputs_have_the_job_s_type(dtype: str) -> None:
    made = training(dtype=dtype)
    model = build_model(made, build_data(made))
    wanted = getattr(torch, dtype)
    assert {p.dtype for p in model.layers.parameters()} == {wanted}
    assert model.inputs.dtype is wanted  # type: ignore[union-attr]
    assert model.targets.dtype is torch.int64  # type: ignore[union-attr]


def test_a_user_s_own_model_data_and_loss() -> None:
    data = {"target": USER + "regression", "args": {"samples": 6}}
    own = job(model={"target": USER + "two_layers", "args": {"width": 5}}, data=data, loss={"target": USER + "absolute"})
    found = build_data(own)
    model = build_model(own, found)
    assert (len(found.train), found.test, model.name) == (6, None, USER + "two_layers")  # type: ignore[arg-type]
    assert model.layers[0].out_features == 5
    assert float(model.loss.function(torch.ones(2), torch.zeros(2))) == 1.0


def test_floating_targets_have_the_model_s_type() -> None:
    """float64 targets beside a float32 model end in "Found dtype Double but expected Float" in the backward of mse."""
    own = job(model={"target": USER + "two_layers"}, data={"target": USER + "regression"}, loss={"name": "mse"})
    model = build_model(own, build_data(own))
    assert model.targets.dtype is torch.float32  # type: ignore[union-attr]
    mse(model.layers(model.inputs), model.targets).backward()


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"name": "gtp"}}, "unknown model 'gtp'; did you mean 'gpt'? known: alexnet, bert, causal_lm, cifar_cnn,"),
        ({"model": {"name": "mlp", "args": {"widht": 3}}}, "model 'mlp' has no argument 'widht'; did you mean 'width'?"),
        ({"model": {"name": "mlp", "args": {"layers": -1}}}, "model 'mlp' refuses its arguments {'layers': -1}: "),
        ({"model": {"name": "mlp", "args": {"layers": 20_000}}}, "mlp: layers must be at most 10000, got 20000"),
        ({"model": {"name": "mlp", "args": {"width": 10**9}}}, "mlp: width must be at most 16777216, got 1000000000"),
        ({"model": {"name": "mlp", "args": {"width": 2**24, "inputs": 2**24}}}, "refuses its arguments {'inputs': 16777216, 'wi"),
        ({"data": {"name": "random_classification", "args": {"samples": 10**18}}}, "refuses its arguments {'samples': 10000000"),
        ({"model": {"target": USER + "two_layer"}}, "(target 'tests.support.user_parts:two_layer'); did you mean 'two_layers'?"),
        ({"model": {"target": "tests.nowhere:net"}}, "for the target 'tests.nowhere:net': ModuleNotFoundError: No module"),
        ({"model": {"target": "net"}}, "cannot read the target 'net': write it as 'package.module:function'"),
        ({"model": {"target": USER + "NOT_A_FUNCTION"}}, "is a int, expected a function"),
        ({"model": {"target": USER + "not_sequential"}}, "expected an nn.Sequential whose children are the layers, found Linear"),
        ({"model": {"target": USER + "refuses", "args": {"width": 3}}}, "refuses its arguments {'width': 3}: width 3 is odd"),
        ({"model": {"target": USER + "refuses"}}, "refuses its arguments {}: "),
        ({"data": {"name": "txt"}}, "unknown data 'txt'; did you mean 'text'? known: chat, cifar10, function_docs, instructio"),
        ({"data": {"name": "cifar10", "args": {"folder": "/nowhere"}}}, "cannot read the folder /nowhere: No such file"),
        ({"data": {"name": "text", "args": {"files": 5}}}, "data 'text' refuses its arguments {'files': 5}: "),
        (
            {"data": {"target": USER + "unreadable"}},
            "of type _Unreadable, which has no length or no index. Give a map-style dataset",
        ),
        ({"data": {"target": USER + "no_samples"}}, "has no training samples"),
        ({"data": {"target": USER + "only_training"}}, "must return DataSplits(train, test) or a pair, found list"),
        ({"data": {"target": USER + "dictionaries"}}, "samples hold tensors or tuples of tensors, found dict"),
        ({"data": {"target": USER + "triples"}}, "sample 0 of list is not a pair (inputs, target) but a tuple of 3"),
        (
            {"data": {"target": USER + "points", "args": {"label": 99}}, "model": {"target": USER + "two_layers"}},
            (
                "data 'tests.support.user_parts:points': the target of sample 9 is 99, "
                "but layer '1' (Linear) gives 3 classes (0 to 2)"
            ),
        ),
        (
            {"data": {"target": USER + "whole_numbers"}, "model": {"target": USER + "two_layers"}},
            "layer '0' (Linear) does not run on the inputs: (4, 4) of int64: its input is int64, and its weight float32; where",
        ),
        ({"data": {"target": USER + "ragged"}}, "the inputs of samples 0 and 5 of list differ: shape (4,) and shape (3,); "),
        ({"loss": {"name": "cross_entropi"}}, "unknown loss 'cross_entropi'; did you mean 'cross_entropy'?"),
    ],
)
def test_message(sections: dict[str, Any], expected: str) -> None:
    assert expected in message(job(**sections))


def test_a_model_that_does_not_take_the_data() -> None:
    said = logging.handlers.BufferingHandler(1000)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # torch logs a traceback of its own
    logger.addHandler(said)
    text = message(job(model={"name": "mlp", "args": {"inputs": 9}}))
    assert text.startswith("layer 'embed' (Linear) does not run on")
    assert "(4, 8)" in text
    logger.removeHandler(said)
    assert said.buffer == []


def test_mse_does_not_broadcast() -> None:
    with pytest.raises(InputError, match=r"mse: the model's output has shape \(3, 1\), the targets \(3,\)"):
        mse(torch.ones(3, 1), torch.ones(3))


def test_a_job_weighs_its_classes() -> None:
    """As torch does: a mean over the sum of the weights; three micro-batches make the whole."""
    own: dict[str, Any] = {"data": {"target": USER + "points"}, "model": {"target": USER + "two_layers"}}
    assert "the loss is no mean weighed by samples: " in message(job(loss={"target": USER + "weighted"}, **own))
    for weights, said in (
        ([1.0] * 4, "class_weights has 4 entries, and the model's output 3 classes"),
        ([1.0] * 2, "a target is 2, and class_weights has 2 entries"),
    ):
        assert said in message(job(loss={"class_weights": weights}, **own))
    output, targets = torch.randn(7, 3), torch.tensor([0, 2, 1, 1, 2, 0, 1])
    expected = float(weighted(output, targets))
    for section in ({"class_weights": CLASS_WEIGHTS.tolist()}, {"target": USER + "weighted", "weight_fn": USER + "weight_of"}):
        made = job(loss=section, **own)
        loss = build_model(made, build_data(made)).loss
        assert loss.count(targets) == pytest.approx(float(CLASS_WEIGHTS[targets].sum()))
        parts = zip(output.split(3), targets.split(3), strict=True)
        assert float(sum(loss.share(*part, loss.count(targets)) for part in parts)) == pytest.approx(expected)
    with_metric = counted_by(build_loss(LossSection(class_weights=(1.0, 2.0))))
    assert with_metric is not None
    assert with_metric(torch.eye(2), torch.tensor([0, 0])) == (1.0, 2), "accuracy counts samples"


def test_batch_norm_needs_a_choice() -> None:
    own: dict[str, Any] = {"data": {"target": USER + "points"}}
    net = {"target": USER + "with_batch_norm"}
    text = message(job(model=net, **own))
    assert "the model has BatchNorm (first: '2')" in text
    assert "write 'batch_norm: per_microbatch' in the job's model section" in text
    assert "deferred needs the fairscale or torchgpipe back end" in message(job(model={**net, "batch_norm": "deferred"}, **own))
    chosen = job(model={**net, "batch_norm": "per_microbatch"}, **own)
    assert len(build_model(chosen, build_data(chosen)).layers) == 5


def test_a_job_says_that_layers_may_couple_samples_before_anything_is_measured() -> None:
    options, cluster = ProfileSection(microbatch_sizes=(1,), repeats=1), cluster_of(1)
    world = replace(alone(), device_id="n0/0", rank_of={"n0/0": 0}, hosts=("here",))

    def profile(**section: Any) -> Profile:
        own = job(model={"target": USER + "with_centring", **section}, data={"target": USER + "points"})
        return profile_cluster(build_model(own, build_data(own)), cluster, world, options, torch.optim.SGD)

    with pytest.raises(InputError, match=r"^layer '1' \(Centre\) couples the samples of a batch: .*'coupled_layers: "):
        profile()
    assert [layer.name for layer in profile(coupled_layers="per_microbatch").layers] == ["0", "1", "2"]


def test_the_loss_ignores_the_index_that_its_weight_does_not_count() -> None:
    loss = build_loss(LossSection(weight="tokens", ignore_index=0))
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[0, 2, 0], [4, 0, 1]])
    kept = labels.flatten() != 0
    expected = nn.functional.cross_entropy(logits.reshape(-1, 5)[kept], labels.flatten()[kept])
    torch.testing.assert_close(loss.share(logits, labels, loss.count(labels)), expected)
    metric = counted_by(loss)
    assert metric is not None
    right = logits.argmax(-1)
    assert metric(logits, torch.where(labels == 0, labels, right)) == (
        float((right != 0)[labels != 0].sum()),
        int((right != 0)[labels != 0].sum()),
    )


def test_what_is_counted_beside_the_loss() -> None:
    assert counted_by(build_loss(LossSection())) is not None
    assert counted_by(build_loss(LossSection(name="mse"))) is None
    assert counted_by(Loss(function=cross_entropy)) is not None


def test_a_batch_in_another_type_goes_into_tuples_and_leaves_integers() -> None:
    found = as_type([torch.ones(2), (torch.ones(1), torch.tensor([3]))], "float64")
    assert isinstance(found, tuple)
    assert (found[0].dtype, found[1][0].dtype, found[1][1].dtype) == (torch.float64, torch.float64, torch.int64)


OPTIMIZERS = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_by_their_torch_names(name: str) -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = optimizer_factory(TorchNamed.model_validate({"name": name, "lr": 0.125}))([weight])
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.param_groups[0]["lr"] == 0.125
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(weight, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"name": "adamw"}, "unknown optimizer 'adamw'; did you mean 'AdamW'?"),
        ({"name": "sgd"}, "unknown optimizer 'sgd'; did you mean 'SGD'?"),
        ({"name": "Optimizer"}, "unknown optimizer 'Optimizer'"),
        ({"name": "AdamW", "learning_rate": 1.0}, "'AdamW' has no argument 'learning_rate': it is called 'lr'"),
        ({"name": "AdamW", "rho": 0.9}, "'AdamW' has no argument 'rho'; known: lr, betas"),
        ({"name": "SGD", "momentun": 0.9}, "'SGD' has no argument 'momentun'; did you mean 'momentum'?"),
        ({"name": "SGD", "lr": -1.0}, "optimizer 'SGD' refuses its arguments {'lr': -1.0}: Invalid learning rate"),
        ({"name": "SGD", "lr": "fast"}, "optimizer 'SGD' refuses its arguments {'lr': 'fast'}: "),
        ({"name": "LBFGS"}, "optimizer 'LBFGS' cannot train a pipeline: it evaluates the model several times a step"),
        ({"name": "SparseAdam"}, "it needs sparse gradients"),
        ({"name": "Muon"}, "it takes matrices only"),
        ({"name": "AdamW", "capturable": True}, "optimizer 'AdamW' cannot take a step on CPUs with {'capturable': True}: If"),
        ({"name": "ASGD", "capturable": True}, "optimizer 'ASGD' cannot take a step on CPUs with {'capturable': True}: If"),
        ({"name": "SGD", "differentiable": True}, "'SGD' cannot take a step on CPUs with {'differentiable': True}: a leaf Var"),
        ({"name": "Rprop", "differentiable": True}, "'Rprop' cannot take a step on CPUs with {'differentiable': True}"),
    ],
)
def test_message_of_an_optimizer(optimizer: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        check_training(training(optimizer=optimizer))
    assert expected in str(caught.value)


def rates(scheduler: dict[str, Any], steps: int, **optimizer: Any) -> list[float]:
    """The learning rates of the first steps, of a rate of 1."""
    used = optimizer_factory(TorchNamed.model_validate({"name": "SGD", "lr": 1.0, **optimizer}))([nn.Parameter(torch.zeros(1))])
    made = build_scheduler(SchedulerSection.model_validate(scheduler), used)
    assert made is not None
    found = []
    for _ in range(steps):
        found.append(used.param_groups[0]["lr"])
        used.step()
        made.step()
    return found


def test_linear_warm_up_is_linear_lr() -> None:
    assert rates({"name": "LinearLR", "warmup_steps": 4}, 6) == pytest.approx([1 / 4, 2 / 4 - 1 / 16, 10 / 16, 13 / 16, 1, 1])


def test_any_schedule_begins_after_its_warm_up() -> None:
    found = rates({"name": "StepLR", "step_size": 2, "gamma": 0.1, "warmup_steps": 2}, 7)
    assert found == pytest.approx([0.5, 0.75, 1, 1, 0.1, 0.1, 0.01])
    cosine = [0.5 * (1 + math.cos(math.pi * t / 10)) for t in range(4)]
    assert rates({"name": "CosineAnnealingLR", "T_max": 10, "warmup_steps": 3}, 7)[3:] == pytest.approx(cosine)
    assert rates({"name": "CosineAnnealingLR", "T_max": 10}, 4) == pytest.approx(cosine)
    assert build_scheduler(None, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)) is None


@pytest.mark.parametrize(
    "scheduler",
    [
        {"name": "ConstantLR", "factor": 0.5},
        {"name": "MultiStepLR", "milestones": [2, 3]},
        {"name": "ExponentialLR", "gamma": 0.9},
        {"name": "PolynomialLR", "total_iters": 5},
        {"name": "CosineAnnealingWarmRestarts", "T_0": 3},
        {"name": "OneCycleLR", "max_lr": 1.0, "total_steps": 20},
        {"name": "CyclicLR", "base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2},
    ],
)
@pytest.mark.parametrize("warmup", [0, 2])
def test_schedulers_by_their_torch_names(scheduler: dict[str, Any], warmup: int) -> None:
    found = rates({**scheduler, "warmup_steps": warmup}, 6, momentum=0.9)
    assert len(set(found)) > 1


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"name": "CosineLR"}, "unknown scheduler 'CosineLR'; did you mean '"),
        ({"name": "StepLR", "step": 3}, "'StepLR' has no argument 'step'; did you mean 'step_size'?"),
        ({"name": "StepLR"}, "scheduler 'StepLR' refuses its arguments {}: "),
        ({"name": "LambdaLR", "lr_lambda": "x"}, "scheduler 'LambdaLR' cannot be written in a job file: it takes a function"),
        ({"name": "ReduceLROnPlateau"}, "it takes a metric at every step; use, for example, CosineAnnealingLR with warmup_steps"),
        ({"name": "SequentialLR", "schedulers": []}, "it takes other schedulers"),
        ({"name": "CosineAnnealingLR", "T_max": 0}, "scheduler 'CosineAnnealingLR' does not run with {'T_max': 0}: Zero"),
        ({"name": "CosineAnnealingLR", "T_max": 0, "warmup_steps": 3}, "modulo by zero: what counts steps must be above 0"),
        ({"name": "StepLR", "step_size": 0}, "does not run with {'step_size': 0}: ZeroDivisionError"),
        ({"name": "StepLR", "step_size": 4, "gamma": "half"}, "does not run with {'gamma': 'half', 'step_size': 4}: TypeError"),
        (
            {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 2, "warmup_steps": 2},
            "scheduler 'OneCycleLR' has total_steps: 2, but the job trains 5 steps, 2 of them its warm-up",
        ),
    ],
)
def test_message_of_a_scheduler(scheduler: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        check_training(training(scheduler=scheduler))
    assert expected in str(caught.value)


def test_the_partitioner_is_known_before_anything_is_measured() -> None:
    check_training(job())
    with pytest.raises(InputError, match="unknown partitioner 'chian'; did you mean 'chain'?"):
        check_training(job(plan={"partitioner": "chian"}))
