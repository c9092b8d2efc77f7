"""What FastSpeed's users bring, for the tests: modules that are no nn.Sequential, data sets; and what the ranks run."""

from __future__ import annotations

import copy
import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import hetpipe
from bench.reference import ReferenceEngine
from hetpipe.building.data import EpochSampler, fetch
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.fastspeed import FastSpeed, Params, platform
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, Tensors
from hetpipe.processes.world import World
from hetpipe.training.session import open_session

TRAIN = {
    "epochs": 1,
    "batch_size": 100,
    "iter_log_interval": 50,
    "epoch_log_interval": 1,
    "gradient_accumulate_step": 1,
    "criterion": "CrossEntropy",
    "optimizer": "Adam",
    "learning_rate": 0.01,
}
STRATEGY: dict[str, Any] = {
    "model_type": "ddp",
    "partition_type": "manual",
    "manual_partition_list": [12, 4],
    "manual_batchsize_list": [6, 2],
    "unbalanced_strategy": "time",
    "test_batchsize_bytime": 10,
    "model_name": "Net",
    "model_args": [5, 8],
    "runing_dependency": ["from tests.support.fastspeed_parts import * "],
}


def arguments(data: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **strategy: Any) -> dict[str, Any]:
    """An args.json; total_datasize is the sum of the manual partition; None leaves a key out."""
    whole = STRATEGY | strategy
    total = sum(whole["manual_partition_list"] or ()) or 16
    sections = {
        "data": {"total_datasize": total, "train_loader_pin_memory": 0, "train_loader_num_workers": 0} | (data or {}),
        "train": TRAIN | (train or {}),
        "strategy": whole,
    }
    return {name: {k: v for k, v in section.items() if v is not None} for name, section in sections.items()}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


CLASSES, FEATURES = 5, 6


class Net(nn.Module):
    """A module with a forward of its own and positional arguments."""

    def __init__(self, classes: int = CLASSES, hidden: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(torch.tanh(self.first(x)))
        return logits + x.mean(1, keepdim=True)


class DictNet(nn.Module):
    """Takes a dict, as FastSpeed's BERT: the mean of the embeddings of what is not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        mask = given["attention_mask"].unsqueeze(-1).to(self.head.weight.dtype)
        logits: Tensor = self.head((self.embedding(given["input_ids"]) * mask).sum(1) / mask.sum(1))
        return logits


class LossNet(nn.Module):
    """Returns its own loss, as FastSpeed's T5: the mean over the labels that are not padding (0)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        logits = self.head(self.embedding(given["source_ids"]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), loss_tokens(given, None).flatten())


def loss_tokens(given: dict[str, Tensor], label: object) -> Tensor:
    ids = given["target_ids"]
    return torch.where(ids == 0, -100, ids)


class Dicts(Dataset[Any]):
    """Samples of dicts; the targets have 1 to 6 tokens. `label` {} is FastSpeed's for a model that returns its loss."""

    def __init__(self, samples: int, *, own_loss: bool) -> None:
        draw = torch.Generator().manual_seed(5)
        self.ids = torch.randint(1, 20, (samples, 6), generator=draw)
        self.lengths = torch.randint(1, 7, (samples,), generator=draw)
        self.labels = torch.randint(CLASSES, (samples,), generator=draw)
        self.own_loss = own_loss

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Any]:
        mask = (torch.arange(6) < self.lengths[index]).long()
        if self.own_loss:
            return {"source_ids": self.ids[index], "target_ids": self.ids[index] * mask}, {}
        return {"input_ids": self.ids[index], "attention_mask": mask}, self.labels[index]


def points(samples: int) -> tuple[TensorDataset, None]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(samples, FEATURES, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=draw)), None


def dicts(samples: int) -> tuple[Dicts, None]:
    return Dicts(samples, own_loss=False), None


# ---- on the ranks ----


class Compared(NamedTuple):
    """One step: the samples of all ranks, the gradient found over the true one (along it), and the largest difference."""

    samples: int
    ratio: float
    difference: float
    loss_difference: float


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1).clone() for p in module.parameters() if p.grad is not None])


def compare(layers: nn.Module, loss: float, true: nn.Module, true_loss: float, samples: int) -> Compared:
    found, wanted = gradients(layers), gradients(true)
    return Compared(
        samples, float(found @ wanted / (wanted @ wanted)), float((found - wanted).abs().max()), abs(loss - true_loss)
    )


def converted_epoch(job_file: str) -> list[Compared]:
    """Every step of an epoch of a converted job, in float64."""
    session = open_session(Job.read(job_file, ["train.dtype=float64"]))
    assert session.job.plan.file is not None
    plan = Plan.load(session.job.plan.file)
    model, loss = session.model, session.model.loss
    true = ReferenceEngine(copy.deepcopy(model.layers), loss)
    engine = hetpipe.wrap(model.layers, plan, model.inputs, loss.function, loss_weight=loss.weight, cluster=session.cluster)
    optimizer = torch.optim.Adam(engine.parameters(), lr=0.05)
    steps = []
    for batch in EpochSampler(len(session.data.train), plan.global_batch):  # type: ignore[arg-type]
        inputs, targets = fetch(session.data.train, batch)
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        true.layers.load_state_dict(model.layers.state_dict())
        wanted = true.step(inputs, targets)
        own = engine.share(batch)
        found = engine.step(*_take(session.data.train, own))
        steps.append(compare(model.layers, found, true.layers, wanted, len(batch)))
        optimizer.step()
    return steps


def _take(data: Any, indices: Any) -> tuple[Tensors | None, Tensor | None]:
    if len(indices) == 0:
        return None, None
    inputs, targets = fetch(data, indices)
    return (tuple(inputs) if isinstance(inputs, list) else inputs), targets


class Surface(NamedTuple):
    """What a rank got from FastSpeed's five calls."""

    steps: list[Compared]
    epoch_losses: list[float]
    seconds: float
    throughputs: tuple[float, float]
    shares: list[int]
    partition: list[int]
    state: dict[str, Tensor]
    parameters: dict[str, int]


def surface(world: World, args_file: str, kind: str = "plain") -> Surface:
    """The calls of FastSpeed's main.py, with each step's gradient compared to the true one. Ranks draw different weights."""
    torch.manual_seed(world.rank)
    params = Params(args_file)
    net, dataset = {
        "plain": (Net(), points(params.data["total_datasize"])[0]),
        "dict": (DictNet(), Dicts(params.data["total_datasize"], own_loss=False)),
        "loss": (LossNet(), Dicts(params.data["total_datasize"], own_loss=True)),
    }[kind]
    net = net.double()
    inputs, label = next(iter(torch.utils.data.DataLoader(dataset, batch_size=1)))
    if isinstance(inputs, dict):  # FastSpeed's BERT writes its keys in another order than its dataset
        inputs = dict(reversed(inputs.items()))
    args = Namespace(local_rank=world.rank, global_rank=world.rank, world_size=world.size)
    options: dict[str, Any] = {"loss_tokens": loss_tokens} if kind == "loss" else {}
    made = FastSpeed(params, args, inputs, label, kind == "loss", **options)
    steps: list[Compared] = []
    loader = made.unbalanced_datasplit(dataset=dataset, model=net)
    wrapped = made.model_wrap(net)
    with watched(made, dataset, steps):
        trained, losses, seconds, own, total = made.train(train_loader=loader, wrapped_model=wrapped)
    assert trained is wrapped
    assert trained.module is net
    trained.eval()
    with torch.no_grad():
        assert torch.equal(trained(inputs), net(inputs))
    return Surface(
        steps,
        losses,
        seconds,
        (own, total),
        made.batchsize_split,
        made.partition_split,
        {k: v.clone() for k, v in net.state_dict().items()},
        made.get_parameter(net),
    )


class watched:  # noqa: N801  # a context
    """While it lasts, each step of the engine that `train` makes is compared with the same samples on one device."""

    def __init__(self, made: FastSpeed, dataset: Any, steps: list[Compared]) -> None:
        self.made, self.dataset, self.steps, self.wrap = made, dataset, steps, vars(platform)["wrap"]

    def __enter__(self) -> None:
        vars(platform)["wrap"] = self._wrap

    def __exit__(self, *_: object) -> None:
        vars(platform)["wrap"] = self.wrap

    def _wrap(self, layers: nn.Sequential, *arguments: Any, **options: Any) -> Any:
        engine = self.wrap(layers, *arguments, **options)
        loss = Loss(function=self.made._loss, weight="tokens")
        true = ReferenceEngine(copy.deepcopy(layers), loss)
        step: Callable[..., float] = engine.step

        def compared(inputs: Any, targets: Any) -> float:
            batch = self._samples(len(self.steps))
            true.layers.load_state_dict(layers.state_dict())
            wanted = true.step(*self._whole(batch))
            found = step(inputs, targets)
            self.steps.append(compare(layers, found, true.layers, wanted, len(batch)))
            return found

        engine.step = compared
        return engine

    def _samples(self, step: int) -> list[int]:
        """The samples of all ranks in a step, by FastSpeed's rule: contiguous parts of the epoch's permutation."""
        train = self.made.config.train
        sizes = [b * train["gradient_accumulate_step"] for b in self.made.batchsize_split]
        parts = self.made.partition_split
        total = self.made.config.data["total_datasize"]
        epoch, at = divmod(step, max(-(-p // s) for p, s in zip(parts, sizes, strict=True)))
        draw = torch.Generator().manual_seed(epoch)
        order = torch.randperm(total, generator=draw).tolist()
        found: list[int] = []
        for r, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            own = order[sum(parts[:r]) :][:part]
            found += own[at * size : (at + 1) * size]
        return found

    def _whole(self, batch: list[int]) -> tuple[Tensors, Tensor]:
        return self.made._batch(*torch.utils.data.default_collate([self.dataset[i] for i in batch]))


def both(world: World, cases: dict[str, tuple[str, str]]) -> dict[str, tuple[Surface, list[Compared]]]:
    """Name → (args.json, converted job): both on these ranks, one after the other."""
    return {name: (surface(world, args), converted_epoch(job)) for name, (args, job) in cases.items()}


def surfaces(world: World, folder: str, args: dict[str, tuple[str, str]]) -> dict[str, Surface | str]:
    """Name → (args.json, kind): what the surface gave there in a folder of its own, or the message with which it refused."""
    os.chdir(folder)
    found: dict[str, Surface | str] = {}
    for name, case in args.items():
        try:
            found[name] = surface(world, *case)
        except InputError as error:
            found[name] = str(error)
    return found
