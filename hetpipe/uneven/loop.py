"""Unequal batch sizes in a training loop that is already there: DDP, Accelerate, Lightning, the Hugging Face Trainer.

`ShareSampler` and `ShareLoader` give each rank its share of every global batch; `global_mean` makes of a rank's loss what
it has to call backward on, so that DDP's average over the ranks is the gradient of the mean over the whole global batch:

    loader = ShareLoader(dataset, ShareSampler(len(dataset), [6, 2]))
    ...
    loss = global_mean(cross_entropy(model(inputs), targets, reduction="sum"), global_count(targets))

DDP averages over its W ranks, so a rank's loss is its sum, times W, over the number of targets of all ranks. That number
is summed over the ranks in every step (one integer), which makes partial batches and token counts right by themselves.

A rank without a sample in a step (the last batch of an epoch may have fewer samples than there are ranks) gets a stand-in:
one sample whose targets are all ignored. It runs forward and backward like any other, so it takes part in every collective
of DDP and of the trainers, and adds zero to the loss, the count and the gradients. DDP's `join` would need no stand-in, but
knows nothing of the collectives of the trainers, nor of the count; and a batch of zero samples is more than the models of
`transformers` can reshape. The stand-in passes through dropout and BatchNorm as any sample does; where that matters
(BatchNorm counts it), run it in evaluation mode: `model.train(bool((targets != -100).any()))`.
"""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from hetpipe.building.data import EpochSampler, SamplerState, emptied, replica_slices
from hetpipe.files.messages import InputError
from hetpipe.planning.shares import proportional_shares
from hetpipe.processes.environment import launched, place, started_ranks
from hetpipe.processes.world import connect

IGNORED = -100  # the target that torch's losses, and transformers, leave out
T = TypeVar("T")


@contextmanager
def process_group() -> Iterator[None]:
    """A decorator for the function that trains: torch's process group is there while it runs, and ends after it.

        @process_group()
        def main() -> None: ...

    Under torchrun it makes the group (gloo for CPUs, NCCL for GPUs, of which the rank takes that of its LOCAL_RANK), also after
    a restart (--max-restarts); elsewhere that is left to the trainer. The order at the end matters: a DistributedDataParallel
    that is still there when its group is destroyed keeps it, with its threads, until the interpreter ends; one of them that
    is just letting go of its last message is then stopped where it must not be, and now and then the process aborts
    ("terminate called without an active exception") or hangs. So what holds the group belongs into the function.
    """
    if launched():
        connect(use_cuda=torch.cuda.is_available(), watched=False)
    yield
    gc.collect()  # models in cycles go before their group, too
    if dist.is_initialized():
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        if group() is not None:
            warnings.warn(
                "the process group is still held by something outside of the function that trains (a global "
                "DistributedDataParallel?): the process may abort or hang at its end",
                stacklevel=3,
            )


def batch_shares(shares: Sequence[int], batch: int) -> list[int]:
    """The shares of a batch of at most sum(shares) samples: proportional, but no rank with a share is left without a sample while
    there are enough, and none exceeds its share.

    >>> batch_shares([6, 2], 3), batch_shares([6, 2], 1)
    ([2, 1], [1, 0])
    """
    sharing = sum(share > 0 for share in shares)
    if batch == sum(shares):
        return list(shares)
    if batch < sharing:
        return proportional_shares(shares, batch)
    rest = proportional_shares([max(0, share - 1) for share in shares], batch - sharing)
    return [(share > 0) + more for share, more in zip(shares, rest, strict=True)]


class ShareSampler(Sampler[list[int]]):
    """Batches of sample indices for one rank, as `DataLoader(dataset, batch_sampler=…)` takes them.

    Every global batch has sum(shares) samples (the last of an epoch what is left; its shares are recomputed), of which this
    rank gets `shares[rank]`. Each sample comes exactly once an epoch, shuffled by seed + epoch, and all ranks get the same
    number of batches. With `accumulate` a global batch is one optimizer step of that many batches: the rank's share is cut
    into as many nearly equal parts.

    Args:
        samples: length of the dataset.
        shares: samples of each rank in a global batch, in rank order; 0 for a rank that only takes part in the sums.
        rank: this process; by default its rank in torch.distributed, or what torchrun says.
        accumulate: batches of one optimizer step.
        seed: decides, with the epoch, the order.
        shuffle: whether the order is shuffled.
    """

    def __init__(
        self,
        samples: int,
        shares: Sequence[int],
        *,
        rank: int | None = None,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.shares, self.accumulate = tuple(shares), accumulate
        if min(self.shares, default=0) < 0 or sum(self.shares) < 1:
            raise InputError(f"the shares {list(shares)} must not be negative, and not all zero")
        if accumulate < 1:
            raise InputError(f"accumulate must be at least 1, got {accumulate}")
        self.rank = _own_rank(len(self.shares)) if rank is None else rank
        if not 0 <= self.rank < len(self.shares):
            raise InputError(f"rank {rank} has no share in {list(shares)}, which are for {len(shares)} ranks")
        self.empty_batches = False  # whether [] may be yielded: ShareLoader makes a stand-in of it
        self._next = EpochSampler(samples, sum(self.shares), seed=seed, shuffle=shuffle)
        self._began = 0  # position of the running iteration's first sample

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return sum(self.shares)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration runs, or goes on with."""
        return self._next.epoch

    @property
    def sampler(self) -> ShareSampler:
        """Itself: Lightning and Accelerate call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration runs this epoch; from its beginning, unless a state in the midst of it was loaded."""
        if epoch != self._next.epoch:
            self._next.epoch, self._next.position = epoch, 0
        self._began = self._next.position

    def __len__(self) -> int:
        return len(self._next) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        self._check_empty()
        self._began = self._next.position
        for batch in copy.copy(self._next):
            own = replica_slices(batch, batch_shares(self.shares, len(batch)))[self.rank]
            for part in torch.tensor_split(own, self.accumulate):
                yield part.tolist()
        self._next.position = 0

    def _check_empty(self) -> None:
        """Every rank, not only the one concerned, refuses batches of no samples that nobody is prepared for."""
        last = (self._next.samples - self._next.position) % self.global_batch or self.global_batch
        for batch in {self.global_batch, last}:
            shares = batch_shares(self.shares, batch)
            if min(shares) < self.accumulate and not self.empty_batches:
                parts = f" in {self.accumulate} parts each" if self.accumulate > 1 else ""
                raise InputError(
                    f"a batch of {batch} samples has the shares {shares}{parts}, so that a rank has to run a batch of no "
                    "samples: use ShareLoader(dataset, sampler) in place of DataLoader(dataset, batch_sampler=sampler)"
                )

    def state_dict(self, batches: int) -> SamplerState:
        """Where training stands after this many batches of the running (or just ended) iteration; the same on every rank. The
        loop counts, since a loader with workers has drawn more batches than were trained on."""
        steps, inside = divmod(batches, self.accumulate)
        if inside:
            raise InputError(
                f"{batches} batches end within an optimizer step of {self.accumulate} batches. Save the state after a whole step"
            )
        here = copy.copy(self._next)
        here.position = min(self._began + steps * self.global_batch, here.samples)
        if here.position == here.samples:
            here.epoch, here.position = here.epoch + 1, 0
        return here.state_dict()

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue there. Ranks and shares may be others than those of the run that saved it: each sample of the epoch is
        still seen exactly once."""
        self._next.load_state_dict(state)
        self._began = self._next.position


def _own_rank(ranks: int) -> int:
    """This process's rank, if the job has that many."""
    if dist.is_available() and dist.is_initialized():
        rank, size, source = dist.get_rank(), dist.get_world_size(), "torch.distributed"
    elif launched():
        (rank, size, *_), source = place(), "torchrun"
    else:
        rank, size, source = 0, 1, "no process group, and no torchrun"
    if size != ranks:
        raise InputError(
            f"there are {ranks} shares for {size} ranks ({source}): give one share a rank, and make the sampler after the "
            "process group, or give it rank="
        )
    return rank


class ShareLoader(DataLoader[Any]):
    """A DataLoader for a ShareSampler, in which a rank without a sample gets a stand-in that counts nothing.

    Args:
        dataset: map-style.
        sampler: says which samples.
        collate_fn: makes a batch of samples, as for a DataLoader.
        stand_in: makes a batch of one sample count nothing; by default `ignore_targets`.
        options: what else a DataLoader takes (num_workers, pin_memory, …).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ShareSampler,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        stand_in: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        sampler.empty_batches = True
        collate = _Collate(dataset, collate_fn, stand_in or ignore_targets)
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **options)
        self._is_accelerate_prepared = True  # or Accelerator.prepare would deal the batches out once more

    def set_epoch(self, epoch: int) -> None:
        """The next iteration runs this epoch."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class _Collate:
    """Collates as `collate_fn` does, and makes a stand-in for no samples. A class, so that workers can be sent it."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], stand_in: Callable[[Any], Any]) -> None:
        self.dataset, self.collate_fn, self.stand_in = dataset, collate_fn, stand_in

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self.collate_fn(samples)
        many = getattr(self.dataset, "__getitems__", None)
        return self.stand_in(self.collate_fn(many([0]) if many is not None else [self.dataset[0]]))


def ignore_targets(batch: Any) -> Any:
    """The batch with every target ignored: the targets are the second of a pair, or the item "labels" of a mapping. Where
    they are no integers, which cannot be ignored, it has zero samples instead."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not pair and not (isinstance(batch, MutableMapping) and "labels" in batch):
        raise InputError(
            f"a batch is {_describe(batch)}, neither (inputs, targets) nor a mapping with 'labels'. Give ShareLoader a function "
            "stand_in=, which makes a batch of one sample count nothing"
        )
    targets = batch[1] if pair else batch["labels"]
    if not isinstance(targets, Tensor) or _counts_all(targets):
        return emptied(batch)
    ignored = torch.full_like(targets, IGNORED)
    if pair:
        return type(batch)([batch[0], ignored])
    batch["labels"] = ignored
    return batch


def _describe(batch: Any) -> str:
    what = f"a {type(batch).__name__}"
    if isinstance(batch, MutableMapping):
        return f"{what} of {', '.join(map(str, batch))}"
    return f"{what} of {len(batch)}" if isinstance(batch, tuple | list) else what


def _counts_all(targets: Tensor) -> bool:
    return targets.dtype == torch.bool or targets.is_floating_point() or targets.is_complex()


def global_count(*targets: Tensor, ignore_index: int = IGNORED, group: dist.ProcessGroup | None = None) -> Tensor:
    """What the mean of torch's losses divides by, over all ranks: the integer targets that differ from `ignore_index` (samples or
    tokens, as the targets are), or the elements of others. Several targets: the batches of one optimizer step, when gradients are
    accumulated. Every rank must call it; an int64 tensor [], on the targets' device.
    """
    counts = [torch.tensor(t.numel()) if _counts_all(t) else (t != ignore_index).sum() for t in targets]
    count = torch.stack([c.to(targets[0].device) for c in counts]).sum()
    if _world_size(group) > 1:
        summed = count
        if count.device.type == "cpu" and dist.get_backend(group) == dist.Backend.NCCL:
            summed = count.to("cuda")
        dist.all_reduce(summed, group=group)
        count = summed.to(count.device)
    return count


def global_mean(loss_sum: Tensor, count: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The loss to call backward on: this rank's `loss_sum` (reduction="sum"), times the ranks, over the global count. DDP's
    average of the gradients is then that of the mean over the whole global batch; the average of these losses is that mean. A
    count of zero gives zero, not NaN."""
    return loss_sum * _world_size(group) / count.clamp(min=1)


def _world_size(group: dist.ProcessGroup | None) -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    started = started_ranks()
    if started > 1:
        raise InputError(
            f"{started} processes were started (WORLD_SIZE), but torch.distributed is not initialised, so nothing averages their "
            "gradients: call torch.distributed.init_process_group() first (Accelerate without GPUs: Accelerator(cpu=True))"
        )
    return 1


def windows(batches: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` consecutive batches, the last as long as is left: those of one optimizer step."""
    iterator = iter(batches)
    while window := list(itertools.islice(iterator, size)):
        yield window
