"""FastSpeed's Python surface: the same calls in the same order, the same data on every device, and the true gradient.

    platform = FastSpeed(Params("args.json"), args, test_input, test_label)
    loader = platform.unbalanced_datasplit(dataset=dataset, model=model)
    wrapped = platform.model_wrap(model)
    wrapped, epoch_losses, seconds, throughput, total_throughput = platform.train(train_loader=loader, wrapped_model=wrapped)

Under torchrun, one process a device. A rank takes its part of each epoch's permutation, as in FastSpeed; one that has run
out of data goes on without any, and without dummy work.
"""

from __future__ import annotations

import copy
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from hetpipe.building.data import EpochSampler
from hetpipe.documents.job import ProfileSection
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Plan
from hetpipe.documents.sections.torch_named import TorchNamed
from hetpipe.fastspeed.arguments import Arguments
from hetpipe.fastspeed.convert import BY_DEVICE, MODEL, accumulated, manual_plan, measured_sizes
from hetpipe.fastspeed.module import as_one_layer, load_optimizer, put_weights, read_checkpoint
from hetpipe.files.messages import InputError
from hetpipe.files.writing import make_folder
from hetpipe.layers.model import Loss, Model, Tensors, as_tuple, as_value
from hetpipe.layers.weights import state_of
from hetpipe.planning.shares import proportional_shares
from hetpipe.processes.environment import place
from hetpipe.processes.world import World, connect
from hetpipe.runtime.base import Engine
from hetpipe.training.own.loop import wrap
from hetpipe.training.session import Request, Setting, meet, prepare

LossTokens = Callable[[Any, Any], Tensor]


class Params:
    """An args.json, checked; its sections are dicts, as in FastSpeed: `params.train["epochs"]`."""

    data: dict[str, Any]
    train: dict[str, Any]
    strategy: dict[str, Any]

    def __init__(self, json_path: str) -> None:
        self.__dict__.update(Arguments.load(json_path).model_dump(mode="json", by_alias=True))


class TrainReturn(NamedTuple):
    """What `train` returns. `epoch_loss_list` has, for every epoch_log_interval epochs, the mean loss of all their samples on all
    devices (FastSpeed: the sum over the last epoch's iterations of this device); throughputs are samples per second of this
    device, and of all."""

    wrapped_model: nn.Module
    epoch_loss_list: list[float]
    seconds: float
    throughput: float
    total_throughput: float


class Wrapped(nn.Module):
    """The user's model, on its device, as `.module`; called as the model is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        """The model's output."""
        return self.module(*arguments)


class Partition(Sampler[int]):
    """This rank's part [start, stop) of every epoch's permutation, which is the same on all ranks."""

    def __init__(self, samples: int, start: int, stop: int) -> None:
        self.order, self.start, self.stop = EpochSampler(samples, 1), start, stop
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which permutation comes next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.order(self.epoch)[self.start : self.stop].tolist())

    def __len__(self) -> int:
        return self.stop - self.start


class FastSpeed:
    """Unequal data parallelism. `args`, `test_input` and `test_label` are FastSpeed's and not used: ranks are torchrun's, and the
    dataset's first sample serves for measuring. With `isModelOutputLoss` the model returns its mean loss, over the samples or,
    where `loss_tokens(input, label)` is given, over the entries of its result that are not -100 (FastSpeed weights such a
    loss by samples, which is not the mean over the tokens of all devices)."""

    def __init__(
        self,
        param_config: Params,
        args: Namespace | None = None,
        test_input: Any = None,
        test_label: Any = None,
        isModelOutputLoss: bool = False,
        *,
        loss_tokens: LossTokens | None = None,
    ) -> None:
        self.config = param_config
        self.arguments = Arguments.parse(vars(param_config), "the parameters")
        self.gives_loss, self.loss_tokens = isModelOutputLoss, loss_tokens
        self.names: list[str] | None = None
        self.partition_split: list[int] = []
        self.batchsize_split: list[int] = []
        self.plan: Plan | None = None

    def _batch(self, given: Any, label: Any) -> tuple[Tensors, Tensor]:
        """A batch as the engine takes it: a dict of inputs as a tuple; and what its loss is the mean over."""
        inputs = as_value([given[name] for name in self.names]) if self.names is not None else given
        if self.loss_tokens is not None:
            return inputs, self.loss_tokens(given, label)
        if self.gives_loss:
            return inputs, torch.zeros(len(as_tuple(inputs)[0]), dtype=torch.int64)
        return inputs, label

    def _loss(self, output: Tensors, targets: Tensors) -> Tensor:
        (value,), (labels,) = as_tuple(output), as_tuple(targets)
        return value if self.gives_loss else nn.functional.cross_entropy(value, labels)

    def unbalanced_datasplit(self, dataset: Dataset[Any], model: nn.Module) -> DataLoader[Any]:
        """This rank's loader: its share is the manual list's, or by the measured speed and memory of every device. Collective."""
        total, given = self.arguments.data.total_datasize, len(dataset)  # type: ignore[arg-type]
        if given != total:
            raise InputError(f"data.total_datasize is {total}, but the dataset has {given} samples")
        strategy = self.arguments.strategy
        first, label = default_collate([dataset[0]])
        self.names = list(first) if isinstance(first, dict) else None
        self.sample = self._batch(first, label)
        world, self.cluster = meet(None)
        devices = sorted(world.rank_of, key=lambda device: world.rank_of[device])
        if self.arguments.is_manual:
            batches = list(strategy.manual_batchsize_list or ())
            plan = manual_plan(batches, devices)
            self.partition_split = list(strategy.manual_partition_list or ())
            self._say_what_is_left_out(total)
        else:
            plan = self._measured_plan(model, world, devices)
            batches = [replica.samples for replica in plan.replicas]
            self.partition_split = proportional_shares(batches, total)
        self.plan = accumulated(plan, self.arguments.train.gradient_accumulate_step)
        self.batchsize_split = batches
        start = sum(self.partition_split[: world.rank])
        return DataLoader(
            dataset,
            batch_size=batches[world.rank],
            sampler=Partition(total, start, start + self.partition_split[world.rank]),
            pin_memory=self.arguments.data.train_loader_pin_memory and torch.cuda.is_available(),
            num_workers=self.arguments.data.train_loader_num_workers,
        )

    def _say_what_is_left_out(self, total: int) -> None:
        if left := self.arguments.left_out:
            self._say(
                f"strategy.manual_partition_list sums to {total - left} of the {total} samples: in each epoch {left} samples are "
                "not trained on, others every time, since their order is drawn anew. (FastSpeed's own sampler ends with an "
                f"AssertionError on such a list.) Let it sum to {total} to train on all."
            )

    def _measured_plan(self, model: nn.Module, world: World, devices: list[str]) -> Plan:
        """Shares of batch_size by speed and memory, in the order of ranks."""
        inputs, targets = self.sample
        loss = Loss(function=self._loss, weight="tokens")
        layers = as_one_layer(copy.deepcopy(model), self.names)
        whole = Model(
            name=MODEL, layers=layers, inputs=inputs, targets=targets, loss=loss, batch_norm=BY_DEVICE, coupled_layers=BY_DEVICE
        )
        setting = Setting(world=world, cluster=self.cluster, model=whole, found=True)
        profiler = ProfileSection(microbatch_sizes=measured_sizes(self.arguments))
        plan, _ = prepare(
            setting,
            Request(
                global_batch=self.arguments.batch_size,
                options=PlanOptions(partitioner="uneven-data-parallel"),
                profiler=profiler,
                optimizer=TorchNamed(name="Adam"),
            ),
        )
        of = {replica.stages[0].device: replica for replica in plan.replicas}
        idle = [device for device in devices if device not in of]
        if idle:
            raise InputError(
                f"train.batch_size is {self.arguments.batch_size}, so {', '.join(idle)} would get no samples. Raise it, or "
                "start no process there"
            )
        return plan.model_copy(update={"replicas": tuple(of[device] for device in devices)})

    def model_wrap(self, model: nn.Module) -> Wrapped:
        """The model on this rank's device, with the weights that rank 0 has, as under DistributedDataParallel. Collective."""
        cuda = torch.cuda.is_available()
        connect(use_cuda=cuda)
        model.to(torch.device("cuda", place().local_rank) if cuda else torch.device("cpu"))
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        return Wrapped(model)

    def train(self, train_loader: DataLoader[Any], wrapped_model: Wrapped) -> TrainReturn:
        """All epochs, by Adam; every step's gradient is that of the mean loss over the samples of all devices. Collective."""
        if self.plan is None:
            raise InputError("call unbalanced_datasplit before train: it decides how many samples each device takes")
        section, path, first = self.arguments.train, self.arguments.train.load_model_path, 0
        state = read_checkpoint(path) if section.is_load_model and path is not None else None
        if state is not None:
            put_weights(wrapped_model.module, state, str(path))
        layers = as_one_layer(wrapped_model.module, self.names)
        engine = wrap(
            layers,
            self.plan,
            self.sample[0],
            self._loss,
            loss_weight="tokens",
            cluster=self.cluster,
            batch_norm=BY_DEVICE,
            coupled_layers=BY_DEVICE,
        )
        optimizer = torch.optim.Adam(engine.trained_parameters(), lr=section.learning_rate)
        if state is not None:
            load_optimizer(optimizer, state, str(path))
            first = state["epoch"] + 1
        losses, kept = [], list[float]()
        began = time.perf_counter()
        for epoch in range(first, first + section.epochs):
            losses.append(self._epoch(epoch, train_loader, engine, optimizer))
            done, every = epoch - first + 1, section.epoch_log_interval
            if every > 0 and done % every == 0:
                kept.append(sum(losses[-every:]) / every)
                self._say(f"[EPOCH {epoch + 1}] mean loss {kept[-1]:.4f}")
            if section.save_model and done % (section.checkpoint_interval or 1) == 0 and dist.get_rank() == 0:
                self._save(epoch, wrapped_model.module, optimizer)
        seconds = time.perf_counter() - began
        own, total = self.partition_split[dist.get_rank()], sum(self.partition_split)
        return TrainReturn(wrapped_model, kept, seconds, section.epochs * own / seconds, section.epochs * total / seconds)

    def _epoch(self, epoch: int, loader: DataLoader[Any], engine: Engine, optimizer: torch.optim.Optimizer) -> float:
        """The mean loss of the epoch's samples, as they were trained on."""
        assert isinstance(loader.sampler, Partition)
        loader.sampler.set_epoch(epoch)
        accumulate, every = (self.arguments.train.gradient_accumulate_step, self.arguments.train.iter_log_interval)
        batches, losses, counts = iter(loader), list[float](), self._samples_of_steps()
        for step in range(len(counts)):
            losses.append(engine.step(*self._joined(list(islice(batches, accumulate)))))
            optimizer.step()
            lines = max(1, every // accumulate)
            if every > 0 and (step + 1) % lines == 0:
                self._say(f"[EPOCH {epoch + 1}][STEP {step + 1}] mean loss {sum(losses[-lines:]) / lines:.4f}")
        return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)

    def _samples_of_steps(self) -> list[int]:
        """How many samples all ranks together have in each step of an epoch: ranks run out of theirs at different times."""
        sizes = [batch * self.arguments.train.gradient_accumulate_step for batch in self.batchsize_split]
        shares = list(zip(self.partition_split, sizes, strict=True))
        steps = max(-(-share // size) for share, size in shares)
        return [sum(max(0, min(size, share - step * size)) for share, size in shares) for step in range(steps)]

    def _joined(self, batches: list[Any]) -> tuple[Tensors | None, Tensor | None]:
        """The loader's batches of one step as one."""
        if not batches:
            return None, None
        parts = [self._batch(*batch) for batch in batches]
        columns = zip(*(as_tuple(inputs) for inputs, _ in parts), strict=True)
        return as_value([torch.cat(column) for column in columns]), torch.cat([targets for _, targets in parts])

    def _save(self, epoch: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """A file as FastSpeed's, whole or not at all."""
        folder = make_folder(str(self.arguments.train.checkpoint_folder))
        path = folder / f"{self.arguments.strategy.model_name}_DDP_Epoch{epoch}.pth"
        partial = path.with_suffix(".partial")
        torch.save({"epoch": epoch, "model": state_of(module), "optimizer": optimizer.state_dict()}, partial)
        os.replace(partial, path)

    @staticmethod
    def _say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    @staticmethod
    def get_parameter(model: nn.Module) -> dict[str, int]:
        """How many parameters the model has, and how many of them are trained."""
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        return {"Total": sum(n for n, _ in counts), "Trainable": sum(n for n, trained in counts if trained)}
