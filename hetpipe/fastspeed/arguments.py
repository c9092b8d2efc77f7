"""FastSpeed's args.json: every key of it, checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from hetpipe.files.formats import Count, Flag, Name, Number, Positive, Samples, Strict, read_mapping, validated
from hetpipe.files.limits import MOST_COUNT
from hetpipe.files.messages import Faults

Switch = Annotated[Flag, BeforeValidator(lambda value: bool(value) if value in (0, 1) else value)]  # FastSpeed writes 0 and 1
Interval = Annotated[int, Field(strict=True, ge=-MOST_COUNT, le=MOST_COUNT)]  # 0 and below: never


class DataArguments(Strict):
    """The section `data`."""

    total_datasize: Positive
    train_loader_pin_memory: Switch = False
    train_loader_num_workers: Count = 0


class TrainArguments(Strict):
    """The section `train`."""

    epochs: Positive
    batch_size: Samples | None = None
    iter_log_interval: Interval = 0
    epoch_log_interval: Interval = 0
    gradient_accumulate_step: Samples = 1
    criterion: Literal["CrossEntropy"]
    optimizer: Literal["Adam"]
    learning_rate: Annotated[Number, Field(gt=0)]
    is_load_model: Annotated[Switch, Field(alias="isLoadModel")] = False
    load_model_path: Annotated[Name | None, Field(alias="loadModelPath")] = None
    save_model: Annotated[Switch, Field(alias="saveModel")] = False
    checkpoint_interval: Positive | None = None
    checkpoint_folder: Name | None = None


class StrategyArguments(Strict):
    """The section `strategy`. Its `runing_dependency` is spelled as FastSpeed spells it; `work_path` is of an older version."""

    model_type: Literal["ddp", "pipe", "hybrid"] = "ddp"
    partition_type: Literal["manual", "autobalanced"]
    manual_partition_list: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    manual_batchsize_list: Annotated[tuple[Samples, ...], Field(min_length=1)] | None = None
    unbalanced_strategy: Literal["time"] | None = None
    test_batchsize_bytime: Samples | None = None
    model_name: Name
    model_args: tuple[Any, ...] = ()
    runing_dependency: tuple[str, ...] = ()
    work_path: str | None = None


class Arguments(Strict):
    """A whole args.json."""

    data: DataArguments
    train: TrainArguments
    strategy: StrategyArguments

    @classmethod
    def parse(cls, data: Any, source: str) -> Arguments:
        """Validate `data`; an InputError lists every fault at once and names `source`."""
        return validated(cls, data, source, "args.json of FastSpeed")

    @classmethod
    def load(cls, path: str | Path) -> Arguments:
        """Read and check a file."""
        return cls.parse(read_mapping(path), str(path))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        faults = [*self._strategy_faults(), *self._checkpoint_faults()]
        if faults:
            raise Faults(faults)
        return self

    def _strategy_faults(self) -> list[str]:
        strategy, faults = self.strategy, list[str]()
        if strategy.model_type != "ddp":
            faults.append(
                f"strategy.model_type {strategy.model_type!r} trains nothing in FastSpeed, which only accepts the word; write "
                "'ddp', or a job of hetpipe whose model is an nn.Sequential, for which pipelines are planned"
            )
        needed = _MANUAL if strategy.partition_type == "manual" else _AUTOBALANCED
        faults += [
            f"partition_type {strategy.partition_type!r} needs {section}.{key}"
            for section, key in needed
            if getattr(getattr(self, section), key) is None
        ]
        if strategy.partition_type == "manual":
            faults += self._list_faults()
        return faults

    def _list_faults(self) -> list[str]:
        shares, batches = self.strategy.manual_partition_list, self.strategy.manual_batchsize_list
        if shares is None or batches is None:
            return []
        faults = []
        if len(shares) != len(batches):
            faults.append(
                f"strategy.manual_partition_list has {len(shares)} entries, manual_batchsize_list has {len(batches)}: "
                "both have one for each device"
            )
        if sum(shares) > self.data.total_datasize:
            faults.append(
                f"strategy.manual_partition_list sums to {sum(shares)} samples, but data.total_datasize is only "
                f"{self.data.total_datasize}: let it sum to that"
            )
        return faults

    def _checkpoint_faults(self) -> list[str]:
        train, faults = self.train, []
        if train.is_load_model and train.load_model_path is None:
            faults.append("train.isLoadModel needs train.loadModelPath")
        if train.save_model and (train.checkpoint_interval is None or train.checkpoint_folder is None):
            faults.append("train.saveModel needs train.checkpoint_interval and train.checkpoint_folder")
        return faults

    @property
    def batch_size(self) -> int:
        """Samples that all devices take together in one of FastSpeed's iterations."""
        return sum(self.strategy.manual_batchsize_list or ()) if self.is_manual else self.train.batch_size or 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, the last partial one included."""
        return -(-self.data.total_datasize // (self.batch_size * self.train.gradient_accumulate_step))

    @property
    def left_out(self) -> int:
        """Samples of an epoch that manual_partition_list gives to no device: none in FastSpeed, whose sampler asserts it."""
        shares = self.strategy.manual_partition_list if self.is_manual else None
        return self.data.total_datasize - sum(shares) if shares is not None else 0

    @property
    def is_manual(self) -> bool:
        """Whether the shares are given by hand."""
        return self.strategy.partition_type == "manual"


_MANUAL = (("strategy", "manual_partition_list"), ("strategy", "manual_batchsize_list"))
_AUTOBALANCED = (("train", "batch_size"), ("strategy", "unbalanced_strategy"), ("strategy", "test_batchsize_bytime"))
