"""The state: the plain part of a checkpoint, that is, all of a run but its tensors. What was damaged is refused by its key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Discriminator, Field, Tag, model_validator
from torch import Tensor

from hetpipe.building.content import Content
from hetpipe.building.streams.records import Bookmark
from hetpipe.checkpoints.best import SavedBest
from hetpipe.checkpoints.digests import Digest, Written, digest_of
from hetpipe.checkpoints.schedule import Scheduled, state_differences
from hetpipe.checkpoints.stores.store import Stored
from hetpipe.files.formats import UNNAMED, Count, Document, Flag, Name, Number, Positive, Seed, Strict, read_mapping
from hetpipe.files.messages import InputError, listed, shown

FORMAT = "hetpipe.checkpoint/1"
FileName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=255)]


class SavedScale(Strict):
    """Where the scale of a loss in float16 stands."""

    scale: Annotated[Number, Field(gt=0)]
    good_steps: Count


class BaseNumbers(Strict):
    """Hashes of all numbers of a model that adapters were added to: `digest`, and a shorter one of each of its layers, behind
    whether they are of numbers as they were read, or as they were held in memory, which may be of other types and of fewer bits,
    or of both."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    layers: dict[Name, Annotated[str, Field(pattern=r"^(read|held|both):[0-9a-f]{8}$")]]


class SavedState(Document):
    """What every checkpoint has. `tensors` is how many lie beside it, `files` what they lie in; `scheduler_state` is what the
    schedule's `state_dict` has in plain values; `loss_scale` is given once a loss was scaled; `base_numbers` where adapters
    train; `digest` is of all other keys."""

    called: ClassVar[str] = "checkpoint"
    format: Literal["hetpipe.checkpoint/1"]
    step: Count
    tensors: Count | None = None
    files: dict[FileName, Written] | None = None
    digest: Digest | None = None
    scheduler: Name | None = None
    scheduler_state: dict[str, Any] | None = None
    scheduled: tuple[Scheduled, ...] = ()
    loss_scale: SavedScale | None = None
    base_numbers: BaseNumbers | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.scheduler is None) != (self.scheduler_state is None):
            raise ValueError(f"scheduler is {shown(self.scheduler)}, but scheduler_state is {shown(self.scheduler_state)}")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and check the file, and that it is as it was written."""
        return cls.whole(read_mapping(path), str(path))

    @classmethod
    def whole(cls, data: Any, source: str) -> Self:
        """These values, checked, and that they are as they were written."""
        state = cls.parse(data, source)
        if state.digest is not None and (found := digest_of(data)) != state.digest:
            raise InputError(
                f"{source} is not as it was written: its digest is {found[:16]}…, but {state.digest[:16]}… was written; remove "
                "this checkpoint to resume from the one before"
            )
        return state

    def of(self, layers: Sequence[str], source: str) -> SavedState:
        """As the rank that trains these layers takes it over; `source` is its file, for messages."""
        return self

    def check(self, own_state: Mapping[str, Any] | None, groups: int, source: str) -> None:
        """Compare with a new schedule's own plain state (None: there is none) and the number of the optimizer's groups: an
        InputError lists the keys whose values are not of the kind that the schedule wants."""
        faults = state_differences(self.scheduler_state, own_state, "scheduler_state")
        if len(self.scheduled) != groups:
            faults.append(f"scheduled: {len(self.scheduled)} groups of parameters, the optimizer has {groups}")
        if faults:
            raise InputError(f"{source}: {len(faults)} fault(s) in this checkpoint\n{listed(faults)}")


class StageSchedule(Strict):
    """The schedule of the ranks that train these layers."""

    layers: tuple[str, ...]
    scheduler_state: dict[str, Any]
    scheduled: tuple[Scheduled, ...]


class EpochPosition(Strict):
    """Where an EpochSampler stands: `position` samples of epoch `epoch` have been seen, of one with chunks of so many samples
    where these have groups. `kind` tells it from the places of other
    samplers; of this one it need not be given, and is not written."""

    kind: Annotated[Literal["epochs"], Field(exclude=True)] = "epochs"
    samples: Positive
    seed: Seed
    shuffle: Flag
    epoch: Count
    position: Count
    chunk: Positive | None = None

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if self.position > self.samples:
            raise ValueError(f"position {self.position} is outside an epoch of {self.samples} samples")
        return self


class StreamPosition(Strict):
    """Where a StreamSampler stands: `position` records of the stream have been seen."""

    kind: Literal["stream"]
    seed: Seed
    block: Positive
    position: Count


def _kind_of(value: Any) -> str:
    said = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return "stream" if said == "stream" else UNNAMED


SamplerPosition = Annotated[
    Annotated[EpochPosition, Tag(UNNAMED)] | Annotated[StreamPosition, Tag("stream")], Discriminator(_kind_of)
]


class LastStep(Strict):
    """The last step of a run that has lost a rank: what comes behind it (a line in the log, an evaluation) may not have been
    done."""

    epoch: Count
    samples: Count
    grad_norm: Number | None = None
    left_out: Flag = False


class TrainerState(SavedState):
    """Of a job's run: its place in the data, optimizer and schedule. `loss` is that of the last step; `job` is what the run
    depended on (see `resume`), `data` what was in its data; `stream` is given where these are a stream;
    `evaluated` is given once evaluations were compared, `reference` (digests of what it says) where there is one; `last` in what
    was kept without a lost rank."""

    loss: Number | None = None
    evaluated: SavedBest | None = None
    reference: dict[Name, Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]] = Field(default_factory=dict)
    data: Content | None = None
    sampler: SamplerPosition
    stream: Bookmark | None = None
    last: LastStep | None = None
    optimizer: Name
    scheduler: Name | None
    scheduler_state: dict[str, Any] | None
    scheduled: tuple[Scheduled, ...]
    job: dict[str, Any] | None = None


class LoopState(SavedState):
    """Of one's own loop: `steps` are those that its engine had begun; `schedules` are given where those of the stages differ, as
    with a learning rate for each layer, or where one stage has no parameters of a group; `base` is a digest of the model that
    adapters were added to, `adapter` says as which, and `adapter_names` what their tensors are called outside (see `InLibrary`);
    `data` is what was in the data, if the loop has given them; `loop` is what else the run depended on, as far as the engine and
    the optimizer know it."""

    data: Content | None = None
    loop: dict[str, Any] | None = None
    steps: Count | None = None
    base: Name | None = None
    adapter: dict[str, Any] | None = None
    adapter_names: dict[str, str] | None = None
    schedules: tuple[StageSchedule, ...] | None = None

    def of(self, layers: Sequence[str], source: str) -> SavedState:
        """As the rank that trains these layers takes it over. InputError if there is no schedule for them."""
        if self.schedules is None:
            return self
        found = next((s for s in self.schedules if s.layers == tuple(layers)), None)
        if found is None:
            raise InputError(
                f"{source} holds a different schedule for each stage of the plan under which it was saved, and none for "
                f"{_told(layers)}. Resume under that plan, or give the optimizer of every rank the same groups with the same "
                "learning rates, so that one schedule is saved for all"
            )
        return self.model_copy(update={"scheduler_state": found.scheduler_state, "scheduled": found.scheduled})


def _told(layers: Sequence[str]) -> str:
    return f"layers {shown(layers[0])} to {shown(layers[-1])}" if layers else "no layers"


def take_over(scheduler: torch.optim.lr_scheduler.LRScheduler, optimizer: torch.optim.Optimizer, state: SavedState) -> None:
    """Let a schedule and its optimizer go on from what was saved, once that is checked."""
    scheduler.load_state_dict(state.scheduler_state or {})
    for group, values in zip(optimizer.param_groups, state.scheduled, strict=True):
        for key, value in values.model_dump(exclude_none=True).items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def said_of(checkpoint: Stored) -> Mapping[str, Any]:
    """What a checkpoint says that its run depended on; nothing where it is of one's own loop."""
    return getattr(read_saved(checkpoint), "job", None) or {}


def read_saved(checkpoint: Stored) -> TrainerState | LoopState:
    """The plain part of a checkpoint, whosever it is."""
    data = checkpoint.describe()
    kind = TrainerState if isinstance(data, Mapping) and "sampler" in data else LoopState
    return kind.whole(data, checkpoint.source)


def state_text(state: Mapping[str, Any]) -> str:
    """What stands in the file of such a state."""
    plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **state}))
    return json.dumps({**plain, "digest": digest_of(plain)}, indent=1)
