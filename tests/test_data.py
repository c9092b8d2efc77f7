"""hetpipe/building/data.py: each sample exactly once an epoch, resuming, unequal parts."""

from itertools import chain, islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hetpipe.building.data import EpochSampler, fetch, replica_slices
from hetpipe.checkpoints.training_state import EpochPosition
from hetpipe.files.messages import InputError

samples_and_batch = st.tuples(st.integers(1, 60), st.integers(1, 70))


def flat(batches: list[Tensor]) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


@given(samples_and_batch, st.integers(0, 1000))
def test_each_sample_exactly_once_an_epoch(sizes: tuple[int, int], seed: int) -> None:
    samples, global_batch = sizes
    sampler = EpochSampler(samples, global_batch, seed=seed)
    for epoch in range(3):
        assert (sampler.epoch, len(sampler)) == (epoch, sampler.batches_per_epoch)
        batches = list(sampler)
        assert sorted(flat(batches)) == list(range(samples))
        assert [len(batch) for batch in batches[:-1]] == [global_batch] * (len(batches) - 1)
        assert len(batches) == sampler.batches_per_epoch


@given(samples_and_batch, st.integers(0, 100))
def test_resuming_equals_going_on(sizes: tuple[int, int], seed: int) -> None:
    samples, global_batch = sizes
    steps = 3 * EpochSampler(samples, global_batch).batches_per_epoch
    whole = [batch.tolist() for batch in islice(EpochSampler(samples, global_batch, seed=seed).forever(), steps)]
    sampler = EpochSampler(samples, global_batch, seed=seed)
    running = sampler.forever()
    for done in range(1, steps):
        next(running)
        resumed = EpochSampler(samples, global_batch, seed=seed + 1)  # the seed is the checkpoint's
        resumed.load_state_dict(sampler.state_dict())
        rest = [batch.tolist() for batch in islice(resumed.forever(), min(3, steps - done))]
        assert rest == whole[done : done + 3]


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.integers(0, 10))
def test_resuming_with_another_batch_sees_the_rest_once(samples: int, before: int, after: int, steps: int) -> None:
    sampler = EpochSampler(samples, before, seed=1)
    seen = flat(list(islice(sampler, min(steps, sampler.batches_per_epoch))))
    resumed = EpochSampler(samples, after)
    resumed.load_state_dict(sampler.state_dict())
    if len(seen) < samples:
        seen += flat(list(resumed))
    assert seen == EpochSampler(samples, 1, seed=1).order(0).tolist()


def test_epochs_differ_and_the_seed_decides() -> None:
    sampler = EpochSampler(100, 10, seed=4)
    orders = [sampler.order(epoch).tolist() for epoch in range(3)]
    assert all(first != second for first, second in pairwise(orders))
    assert EpochSampler(100, 7, seed=4).order(1).tolist() == orders[1]
    assert EpochSampler(100, 10, seed=5).order(0).tolist() != orders[0]
    assert EpochSampler(4, 3, shuffle=False).order(9).tolist() == [0, 1, 2, 3]


def test_length_counts_what_is_left() -> None:
    sampler = EpochSampler(10, 4)
    running = iter(sampler)
    assert [len(sampler)] + [len(next(running)) for _ in range(3)] == [3, 4, 4, 2]
    assert (sampler.epoch, sampler.position, len(sampler)) == (0, 10, 3)


def test_wrong_sizes_and_states_name_both_numbers() -> None:
    with pytest.raises(ValueError, match="global_batch must be at least 1, got 0"):
        EpochSampler(5, 0)
    state = EpochSampler(5, 2).state_dict()
    with pytest.raises(ValueError, match="saved over 5 samples, the data now has 6"):
        EpochSampler(6, 2).load_state_dict(state)
    state["position"] = 7
    with pytest.raises(ValueError, match="stands at sample 7 of epoch 0, outside an epoch of 5 samples"):
        EpochSampler(5, 2).load_state_dict(state)


def test_replica_slices() -> None:
    assert [part.tolist() for part in replica_slices(torch.arange(5), [3, 0, 2])] == [[0, 1, 2], [], [3, 4]]
    with pytest.raises(ValueError, match=r"shares \[3, 3\] sum to 6, the batch has 5 samples"):
        replica_slices(torch.arange(5), [3, 3])
    with pytest.raises(ValueError, match="not negative"):
        replica_slices(torch.arange(5), [6, -1])


class Pairs:
    """A dataset without `__getitems__`: an input of two tensors, and a plain number as target."""

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], int]:
        return (torch.full((3,), float(index)), torch.tensor(index)), 10 * index


class Wrong:
    def __getitem__(self, index: int) -> Any:
        return index


def test_fetch_collates_trees_and_empty_batches() -> None:
    (vectors, numbers), targets = fetch(Pairs(), torch.tensor([4, 1]))
    assert vectors.tolist() == [[4.0] * 3, [1.0] * 3]
    assert (numbers.tolist(), targets.tolist()) == ([4, 1], [40, 10])
    (vectors, numbers), targets = fetch(Pairs(), torch.tensor([], dtype=torch.int64))
    assert (vectors.shape, numbers.shape, targets.shape) == ((0, 3), (0,), (0,))
    assert (vectors.dtype, targets.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (
            [(torch.ones(3), 0), (torch.ones(3), 1), (torch.ones(2), 0)],
            "the inputs of samples 0 and 2 of list differ: shape (3,) and shape (2,); a batch needs samples of one shape: pad",
        ),
        ([(torch.ones(3), [1, 2])] * 2 + [(torch.ones(3), [1])], "the targets of samples 0 and 2 of list differ: (int, int) and"),
        ([((torch.ones(3), 1), 0)] * 2 + [((torch.ones(3), None), 0)], "differ: (shape (3,), int) and (shape (3,), NoneType); "),
        ([(object(), 0)] * 3, "samples cannot be batched: default_collate: batch must contain tensors, "),
    ],
)
def test_samples_that_make_no_batch_are_named(samples: Any, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        fetch(samples, torch.arange(3))
    assert expected in str(caught.value)


class Ends:
    """Says that it has more samples than it has."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index == 70:
            raise FileNotFoundError(2, "No such file or directory", "70.png")
        return [(torch.ones(2), 0)][index // 60]


class EndsAtOnce(Ends):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def test_data_that_ends_before_its_length_is_told_with_the_sample() -> None:
    """It ended with a line of code, and so did a file that is not there."""
    for dataset, said in ((Ends(), "sample 61 of Ends"), (EndsAtOnce(), "sample 61, 62 of EndsAtOnce")):
        with pytest.raises(InputError) as caught:
            fetch(dataset, torch.tensor([3, 61, 62]))
        assert str(caught.value) == f"{said} cannot be read: IndexError: list index out of range; its length says 100"
    with pytest.raises(InputError, match="^sample 70 of Ends cannot be read: FileNotFoundError: .*'70.png'$"):
        fetch(Ends(), torch.tensor([70]))


def test_fetch_says_what_a_sample_is() -> None:
    with pytest.raises(ValueError, match=r"sample 2 of Wrong is not a pair \(inputs, target\) but of type int"):
        fetch(Wrong(), torch.tensor([2]))


GROUPS = torch.tensor([0, 2, 2, 0, 1, 2, 0, 2, 2, 1, 2])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("batch", "later"), [(3, 3), (3, 2), (2, 5), (1, 4), (20, 3)])
def test_batches_of_groups_hold_one_each_and_go_on_with_any_other_batch(batch: int, later: int, shuffle: bool) -> None:
    """Every sample once an epoch, wherever a run is cut; and a run that goes on with the same batch goes on as it would have."""
    sampler = EpochSampler(len(GROUPS), batch, seed=4, shuffle=shuffle, groups=GROUPS)
    whole = [each.tolist() for _ in range(2) for each in sampler]
    assert all(len(GROUPS[numbers].unique()) == 1 for numbers in whole)
    assert len(whole) == 2 * sampler.batches_per_epoch
    for cut in range(len(whole)):
        first = EpochSampler(len(GROUPS), batch, seed=4, shuffle=shuffle, groups=GROUPS)
        ahead = first.forever()
        seen = [next(ahead).tolist() for _ in range(cut)]
        second = EpochSampler(len(GROUPS), later, seed=9, groups=GROUPS)
        second.load_state_dict(EpochPosition.model_validate(first.state_dict()).model_dump())  # type: ignore[arg-type]
        left = [each.tolist() for each in islice(second.forever(), len(second))]
        assert all(len(GROUPS[numbers].unique()) == 1 for numbers in left)
        here = seen if cut < sampler.batches_per_epoch else seen[sampler.batches_per_epoch :]
        assert sorted(chain.from_iterable([*here, *left])) == list(range(len(GROUPS))) or not here
        if later == batch:
            assert seen + left == whole[: cut + len(left)]


def test_groups_are_mixed_in_an_epoch() -> None:
    groups = torch.arange(4).repeat(50)
    batches = [int(groups[batch[0]]) for batch in EpochSampler(200, 5, groups=groups)]
    assert sum(a != b for a, b in pairwise(batches)) > 20
