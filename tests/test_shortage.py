"""A device that has no memory in the midst of a step: all ranks know at its end, and the step can be repeated."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from hetpipe.layers.device import is_out_of_memory
from hetpipe.processes.pulse import is_of_another
from hetpipe.runtime.checks.shortage import Shortage, ShortMemoryError, words_of
from tests.support.ranks import cluster_of, run_ranks
from tests.support.shortages import Short, evaluated, noted, one_process, repeated
from tests.support.transparency import Case, largest_difference, train_on_one_device

THREE: dict[str, Any] = {"cuts": [4, 3, 3], "sizes": [2, 2, 2]}
ONE: dict[str, Any] = {"cuts": [10], "sizes": [2]}
LEFT: dict[str, Any] = {"cuts": [5, 5], "sizes": [2, 2], "widths": [2, 1]}
RIGHT: dict[str, Any] = {"cuts": [5, 5], "sizes": [2, 2], "widths": [1, 2]}
WIDE: dict[str, Any] = {"cuts": [10], "sizes": [2, 1], "widths": [3], "recompute": True}


def case(net: str = "blocks", plan: dict[str, Any] = THREE, **options: Any) -> Case:
    """A pipeline beside a replica of one device."""
    return Case(name=net, net=net, plan=(plan, ONE), optimizer="AdamW", clip=0.05, steps=4, **options)


FEW = {
    "the first stage, forward": (case(), Short(rank=0, what="F1")),
    "the second stage, backward": (case(), Short(rank=1, what="B0")),
    "the last stage, backward": (case(), Short(rank=2, what="B1")),
    "the other replica": (case(), Short(rank=3, what="F0")),
    "sums": (case(), Short(rank=0, what="sums")),
    "what is received": (case(), Short(rank=1, what="receives")),
    "the meter's": (case(emulated=True), Short(rank=1, what="meter")),
    "recomputed, backward": (case(plan={**THREE, "recompute": True}), Short(rank=1, what="B1")),
    "split, forward": (case("splittable", LEFT), Short(rank=1, what="F1")),
    "split last, backward": (case("splittable", RIGHT), Short(rank=1, what="B1")),
}
MORE = {
    "the last stage, forward": (case(), Short(rank=2, what="F2")),
    "the first stage, backward": (case(), Short(rank=0, what="B2")),
    "the first step": (case(), Short(rank=1, what="F0", step=0)),
    "inputs": (case(), Short(rank=0, what="inputs")),
    "recomputed, forward": (case(plan={**THREE, "recompute": True}), Short(rank=0, what="F1")),
    "offloaded, forward": (case(plan={**THREE, "offload": True}), Short(rank=1, what="F1")),
    "offloaded, backward": (case(plan={**THREE, "offload": True}), Short(rank=1, what="B1")),
    "a frozen stage": (case("first stage frozen"), Short(rank=0, what="F1")),
    "behind a frozen stage": (case("first stage frozen"), Short(rank=1, what="F1")),
    "the meter's, of inputs": (case(emulated=True), Short(rank=0, what="meter")),
    "gpipe": (case(schedule="gpipe"), Short(rank=1, what="F2")),
    "tied": (case("tied"), Short(rank=0, what="F1")),
    "tuples": (case("tuples"), Short(rank=1, what="F0")),
    "split, backward": (case("splittable", LEFT), Short(rank=0, what="B0")),
    "behind a split stage": (case("splittable", LEFT), Short(rank=2, what="F0")),
    "split last, forward": (case("splittable", RIGHT), Short(rank=2, what="F0")),
    "split over three, recomputed": (case("splittable", WIDE), Short(rank=1, what="B0")),
    "split, received": (case("splittable", RIGHT), Short(rank=1, what="receives")),
    "split, DoRA": (case("splittable, DoRA", LEFT), Short(rank=1, what="F0")),
    "split, sums": (case("splittable", LEFT), Short(rank=0, what="sums")),
    "split, offloaded": (case("splittable", {**LEFT, "offload": True}), Short(rank=0, what="F1")),
    "split, tied": (case("tied, splittable", RIGHT), Short(rank=1, what="F1")),
}


@pytest.fixture(scope="module")
def few() -> list[list[Any]]:
    """Of each rank, what it has of each case."""
    return run_ranks(repeated, cluster_of(3, 1), [*FEW.values()])


@pytest.fixture(scope="module")
def more() -> list[list[Any]]:
    return run_ranks(repeated, cluster_of(3, 1), [*MORE.values()])


def check(found: list[Any], how: Case, lack: Short) -> None:
    """Parameters are afterwards those of one device; and all ranks were told the same."""
    told = {words for _, words in found}
    assert len(told) == 1
    assert next(iter(told)).startswith(f"out of memory on rank {lack.rank}, replica "), told
    assert largest_difference([trained for trained, _ in found], train_on_one_device(how)) < 1e-10


@pytest.mark.parametrize("name", FEW)
def test_a_step_that_a_device_had_no_memory_for_is_repeated(few: list[list[Any]], name: str) -> None:
    check([own for rank in few if (own := rank[[*FEW].index(name)]) is not None], *FEW[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE)
def test_any_stage_may_have_no_memory_for_any_action(more: list[list[Any]], name: str) -> None:
    check([own for rank in more if (own := rank[[*MORE].index(name)]) is not None], *MORE[name])


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["fairscale", "torchgpipe"])
def test_a_process_that_drives_a_replica_has_no_memory(backend: str) -> None:
    rows = ({"cuts": [4, 6], "sizes": [3, 3], "devices": ["n0/0", "n0/1"]}, {"cuts": [10], "sizes": [2], "devices": ["n0/2"]})
    how, lack = Case(name="pipes", plan=rows, optimizer="AdamW", steps=4, schedule="gpipe"), Short(rank=0, what="step")
    found = run_ranks(one_process, cluster_of(3), how, lack, backend)
    check([own for own in found if own is not None], how, lack)


def test_all_ranks_know_that_one_had_no_memory_for_an_evaluation() -> None:
    told = run_ranks(evaluated, cluster_of(3, 1), case(), Short(rank=1, what="F1"))
    assert len({*told}) == 1
    assert told[0].startswith("out of memory on rank 1, replica 0 stage 1, device n0/1, in 1F1")


@pytest.mark.thorough
def test_messages_of_a_split_stage_are_known_without_arithmetic() -> None:
    """Of layers of each style, whole and recomputed: forward, and backward."""
    for rank in run_ranks(noted, cluster_of(2)):
        for real, found in rank:
            assert real == found
            assert len(real) == 2
            assert min(len(messages) for messages in real) > 4


def test_what_says_that_there_is_no_memory() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(CPU), RuntimeError(CUBLAS)):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


def test_a_shortage_is_told_once_and_goes_from_rank_to_rank() -> None:
    where = "rank 0, replica 0 stage 0, device n0/0"
    error = torch.OutOfMemoryError(f"out of memory on {where}: gradients needs 2 bytes more, which makes 3 of 2; do something")
    own = Shortage(device="n0/0", where=where, doing="0F1 of step 2", words=words_of(error, where), bytes_there=2)
    both = ShortMemoryError([own, Shortage(device="n0/1", where="another", doing="0F1", words="MemoryError")])
    told = f"out of memory on {where}, in 0F1 of step 2: gradients needs 2 bytes more, which makes 3 of 2"
    assert str(ShortMemoryError([own])) == told
    assert str(both) == f"{told} (and on 1 more device)"
    again = pickle.loads(pickle.dumps(both))
    assert (str(again), again.shortages) == (str(both), both.shortages)
    assert not is_of_another(both)
