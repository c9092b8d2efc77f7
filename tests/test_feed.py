"""What a run's steps are given: the same samples whoever reads them, from where the run stands, and faults told."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetpipe.building.data import EpochSampler, SamplerState
from hetpipe.building.feed import Ask, Batch, Feed, LostWorkerError, Reading, WorkerError
from hetpipe.files.messages import InputError
from hetpipe.layers.untouched.randomness import Generators
from hetpipe.processes.ranks.report import report_of
from tests.support.user_parts import drawn

SAMPLES, BATCH = 10, 4
BOTH = pytest.mark.parametrize("workers", [0, 2])


class Numbers:
    """Sample i is (i, i); `fault` does something before the one of that number is given."""

    def __init__(self, fault: dict[int, Any] | None = None) -> None:
        self.fault = fault or {}
        self.lock = threading.Lock()  # it cannot be pickled

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        if index in self.fault:
            self.fault[index]()
        return (torch.tensor([float(index)]), torch.tensor([0.5])), torch.tensor(index)


def converted(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def feed(dataset: Any, workers: int, share: Any = converted, shuffle: bool = True) -> Feed:
    sampler = EpochSampler(SAMPLES, BATCH, seed=3, shuffle=shuffle)
    return Feed(dataset, sampler, share, Reading(convert=converted, workers=workers))


def given(one: Feed, steps: int, *, all_of: int | None = None) -> tuple[list[Batch], list[SamplerState]]:
    found, states = [], []
    with one.open(all_of or steps, lambda: "samples") as batches:
        for _ in range(steps):
            found.append(next(batches))
            states.append(one.state_dict())
    return found, states


def plain(batches: list[Batch]) -> list[Any]:
    return [(b.numbers.tolist(), b.epoch, b.inputs[0].flatten().tolist(), b.targets.tolist()) for b in batches]


@BOTH
def test_the_place_in_the_data_is_that_of_what_was_given_and_not_of_what_was_read_ahead(workers: int) -> None:
    """10 samples in batches of 4: 4, 4, 2, and then the next epoch."""
    before = Generators.now()
    whole, states = given(feed(Numbers(), workers), 7)
    assert not before.moved
    assert [(s["epoch"], s["position"]) for s in states] == [(0, 4), (0, 8), (0, 10), (1, 4), (1, 8), (1, 10), (2, 4)]
    assert [len(batch.numbers) for batch in whole] == [4, 4, 2, 4, 4, 2, 4]
    assert all(type(batch.inputs) is tuple and batch.numbers.tolist() == batch.targets.tolist() for batch in whole)
    assert plain(whole) == plain(given(feed(Numbers(), 0), 7)[0])
    stopped = feed(Numbers(), workers)
    first, _ = given(stopped, 2, all_of=7)
    assert stopped.sampler.state_dict() == stopped.state_dict() == states[1]
    other = feed(Numbers(), workers)
    other.load_state_dict(states[1])
    assert plain(first + given(stopped, 5)[0]) == plain(first + given(other, 5)[0]) == plain(whole)


def test_what_is_drawn_for_a_sample_is_the_same_in_a_worker() -> None:
    data = drawn(how="each", together=False).train
    asked = [Ask([7, 3, 30], (0, epoch)) for epoch in (0, 0, 1)]
    found = []
    for workers in (0, 2):
        with Reading(convert=converted, workers=workers).open(data, asked, lambda: "samples") as reader:
            found.append([[t.tolist() for t in rows if t is not None] for rows in reader])
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] != found[0][2]


@BOTH
def test_a_rank_reads_its_part_or_nothing(workers: int) -> None:
    halves, _ = given(feed(Numbers(), workers, share=lambda batch: batch[:0] if len(batch) < 4 else batch[2:]), 3)
    targets = [None if batch.targets is None else batch.targets.tolist() for batch in halves]
    assert targets == [*(batch.numbers[2:].tolist() for batch in halves[:2]), None]
    nothing, _ = given(feed(Numbers(), workers, share=lambda _: None), 2)
    assert [(b.inputs, b.targets, len(b.numbers)) for b in nothing] == [(None, None, 4)] * 2


def not_there() -> None:
    raise OSError("no such file")


def at_its_end() -> None:
    next(iter(()))


@BOTH
def test_a_sample_that_cannot_be_read_is_told_by_its_number_in_the_step_that_wants_it(workers: int) -> None:
    one = feed(Numbers({6: not_there}), workers, shuffle=False)
    with one.open(3, lambda: "samples") as batches:
        assert next(batches).targets.tolist() == [0, 1, 2, 3]
        with pytest.raises(InputError) as caught:
            next(batches)
    assert str(caught.value) == "sample 6 of Numbers cannot be read: OSError: no such file"
    assert one.state_dict()["position"] == 4


@BOTH
def test_a_data_set_whose_file_is_at_its_end_does_not_end_the_reading(workers: int) -> None:
    """StopIteration ended the evaluation of one rank, for which the others waited."""
    asked = [Ask([number], (0, "test")) for number in (0, 1)]
    data, reading = Numbers({1: at_its_end}), Reading(convert=converted, workers=workers)
    words = "sample 1 of Numbers cannot be read: StopIteration"
    with reading.open(data, asked, lambda: "samples") as reader, pytest.raises(InputError, match=words):
        list(reader)


@pytest.mark.parametrize(
    "error", [AttributeError("it has no such column"), RuntimeError("Connection reset by peer"), SystemExit(3)]
)
def test_a_fault_in_a_data_sets_own_code_is_told_with_its_line_and_traceback(error: BaseException) -> None:
    """In a few words, which no traceback comes before; and not as the loss of another rank, whatever the words are."""

    def fault() -> None:
        raise error

    with pytest.raises(WorkerError) as caught:
        given(feed(Numbers({0: fault}), 1, shuffle=False), 1)
    told = report_of(caught.value, 0)
    words = rf"WorkerError: {type(error).__name__}: {error} \({re.escape(__file__)}:\d+, in fault: raise error\)"
    assert re.fullmatch(words, str(told.error))
    assert told.cause is None
    assert "in __getitem__\n" in told.trace
    assert until(lambda: not multiprocessing.active_children())  # though the error holds what would end them


def test_a_worker_that_is_killed_is_told() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    words = r"one of the 1 processes that read samples has ended: DataLoader worker \(pid"
    with pytest.raises(LostWorkerError, match=words) as caught:
        given(feed(Numbers({6: die}), 1, shuffle=False), 3)
    assert str(caught.value).endswith("data.workers=0 lets the rank read them itself")


def test_a_worker_that_ends_between_reading_a_batch_and_handing_it_over_is_told() -> None:
    class Unreachable:
        def __iter__(self) -> Unreachable:
            return self

        def __next__(self) -> Any:
            raise ConnectionResetError(104, "Connection reset by peer")

    words = r"one of the 1 processes that read samples has ended: \[Errno 104\] Connection reset by peer. Where"
    with Reading(convert=converted, workers=1).open(Numbers(), [Ask([0], (0,))], lambda: "samples") as reader:
        assert next(reader)[1] is not None
        reader._found = Unreachable()
        with pytest.raises(LostWorkerError, match=words):
            next(reader)


def test_signals_are_left_to_the_rank() -> None:
    """A scheduler sends SIGTERM to all processes of a job; the rank saves first, and reads no more after it."""

    def asked_to_stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    found, _ = given(feed(Numbers({2: asked_to_stop}), 1, shuffle=False), 2)
    assert [batch.targets.tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def _is_killed(told: Any) -> None:
    def tell() -> None:
        told.send(os.getpid())
        time.sleep(600)

    with Reading(convert=converted, workers=1).open(Numbers({0: tell}), [Ask([0], (0,))], lambda: "samples"):
        time.sleep(600)


def test_workers_end_with_their_rank_however_it_ends() -> None:
    """They have its sockets: as long as one lives, the other ranks do not see that it is gone. In the midst of a sample, too."""
    context = multiprocessing.get_context("fork")
    told, tells = context.Pipe(duplex=False)
    rank = context.Process(target=_is_killed, args=(tells,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        rank.start()
    assert told.poll(60)
    worker = told.recv()
    rank.kill()
    rank.join()
    assert until(lambda: not _lives(worker))


def until(what: Any, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(done)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
