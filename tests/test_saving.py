"""Saving beside the steps: what is saved is what was there when it began, whatever the steps do meanwhile; it is complete as soon
as all is written; and nothing is left of what is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.beside import copies, writing
from hetpipe.checkpoints.beside.copies import HostCopies
from hetpipe.checkpoints.beside.writing import Writing
from hetpipe.checkpoints.checkpoint import PART, CheckpointError, begin, complete
from hetpipe.checkpoints.stores.folder import FolderStore
from hetpipe.checkpoints.stores.layout import Described
from hetpipe.checkpoints.stores.store import Store
from hetpipe.processes.world import World
from tests.support.memory_store import STATE, Held, MemoryStore, on_threads
from tests.support.writes import until
from tests.test_checkpoint import ALONE, steps
from tests.test_stores import PARTS, SECOND, stage_of
from tests.test_stores import trained as trained_net


def by_three(store: Store, step: int, program: Callable[[World, Writing], Any], done: list[tuple[int, str]] | None = None) -> Any:
    """Each rank has a stage of one model, trained for so many steps, and its writing; what the program gives on each, or the
    CheckpointError."""
    whole, optimizer = trained_net(step)
    told = done if done is not None else list[tuple[int, str]]()

    def save(world: World) -> Any:
        stage = stage_of(whole, *PARTS[world.rank])
        begun = begin(store, step, stage, optimizer, {}, world, HostCopies())
        try:
            found = Writing(begun, 2, None, lambda saved: told.append((world.rank, saved.name)))
            return program(world, found)
        except CheckpointError as error:
            return str(error)

    return on_threads(3, save)


def completed(_: World, found: Writing) -> str:
    return str(found.complete())


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_beside_the_steps_is_what_is_written_while_they_wait(tmp_path: Path) -> None:
    whole, optimizer = trained_net(2)

    def both(beside: Store, waiting: Store) -> None:
        assert by_three(beside, 2, completed) == [f"{beside.stored('step-00000002')}"] * 3
        on_threads(3, lambda world: begin(waiting, 2, stage_of(whole, *PARTS[world.rank]), optimizer, {}, world).finish(2))

    memory = MemoryStore(), MemoryStore()
    both(*memory)
    assert memory[0].held == memory[1].held
    both(FolderStore(tmp_path / "beside"), FolderStore(tmp_path / "waiting"))
    assert files(tmp_path / "beside") == files(tmp_path / "waiting")
    assert sorted(files(tmp_path / "beside")) == [
        f"step-00000002/{name}" for name in (*map(PART.format, (1, 2, 3)), "trainer.json")
    ]


def test_steps_change_nothing_of_what_is_under_way() -> None:
    store, opened = MemoryStore(), threading.Event()
    store.gates[PART.format(1)] = opened
    stage, optimizer = trained_net(3)
    truth = {name: value.clone() for name, value in stage.state_dict().items()}
    begun = begin(store, 3, stage, optimizer, {"loop": (seen := {"a": 1})}, ALONE, HostCopies())
    found = Writing(begun, 1, None, lambda _: None)
    steps(stage, optimizer, 2)
    seen["a"] = 2
    busy = [found.is_busy]
    opened.set()
    (again, other), saved = trained_net(1), found.complete()
    assert [*busy, found.is_busy] == [True, False]
    checkpoint.load(saved, again, other, ALONE)
    assert all(torch.equal(value, truth[name]) for name, value in again.state_dict().items())
    assert not all(torch.equal(value, truth[name]) for name, value in stage.state_dict().items())
    assert saved.describe()["loop"] == {"a": 1}


def test_it_is_complete_as_soon_as_all_is_written_wherever_the_ranks_are() -> None:
    """No rank waits for it, or sends a message; each hears of it when it asks."""
    store, done = MemoryStore(), list[tuple[int, str]]()

    def program(world: World, found: Writing) -> str:
        until(lambda: complete(store) and not found.is_busy)
        if world.is_main:
            until(lambda: done)
            assert done == [(0, "step-00000002")]
        world.barrier()
        return str(found.complete())

    assert by_three(store, 2, program, done) == ["memory:step-00000002"] * 3
    assert {rank for rank, _ in done} == {0, 1, 2}


def test_notes_that_the_main_rank_does_not_see_are_told_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "noted", lambda *_: None)
    assert by_three(MemoryStore(), 2, completed) == ["memory:step-00000002"] * 3
    monkeypatch.setattr(Held, "noted", lambda *_: '{"size_bytes": 3}')
    assert by_three(MemoryStore(), 2, completed) == ["memory:step-00000002"] * 3


def test_what_one_rank_cannot_write_all_are_told_and_nothing_of_it_is_left() -> None:
    store = MemoryStore()
    by_three(store, 2, completed)
    before = dict(store.held)
    store.full = {SECOND}

    def program(world: World, found: Writing) -> str:
        until(lambda: not found.is_busy)  # so that the next step tells
        world.barrier()
        return str(found.complete())

    (said,) = set(by_three(store, 4, program))
    assert said.startswith("cannot write the checkpoint memory:step-00000004: it needs ")
    assert said.endswith(", and 0 B are free there; rank 1: OSError: [Errno 28] No space left in memory")
    assert store.held == before
    store.full = set()
    assert by_three(store, 4, completed) == ["memory:step-00000004"] * 3


def test_the_main_rank_leaves_nothing_of_what_others_have_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "STOP_SECONDS", 0.05)
    store, opened = MemoryStore(), threading.Event()
    store.gates[SECOND] = opened

    def program(world: World, found: Writing) -> bool:
        if world.rank != 1:
            until(lambda: not found.is_busy)
        world.barrier()
        if world.is_main:
            found.abandon()
            assert store.held == {}
        world.barrier()
        opened.set()
        until(lambda: not found.is_busy)
        return found.is_busy

    assert by_three(store, 2, program) == [False] * 3
    until(lambda: not any("saving step" in thread.name for thread in threading.enumerate()))
    assert complete(store) == []


def test_what_the_main_rank_concludes_it_concludes() -> None:
    """The run has failed meanwhile: the checkpoint is complete, and each rank that looks says so."""
    store, opened, done = MemoryStore(), threading.Event(), list[tuple[int, str]]()
    store.gates[STATE] = opened

    def program(world: World, found: Writing) -> None:
        if world.is_main:
            until(lambda: STATE in store.reached)
            with ThreadPoolExecutor(1) as pool:
                ended = pool.submit(found.abandon)
                opened.set()
                ended.result()
        world.barrier()
        if not world.is_main:
            found.abandon()

    by_three(store, 2, program, done)
    assert [found.name for found in complete(store)] == ["step-00000002"]
    assert {rank for rank, _ in done} == {0, 1, 2}


def test_copies_keep_their_memory_where_shapes_stay() -> None:
    kept = HostCopies()

    def taken(**tensors: torch.Tensor) -> dict[str, int]:
        wanted = {key: Described(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        assert kept.make_room(wanted, ALONE, pinned=False) is None
        found = {key: kept.take(key, tensor) for key, tensor in tensors.items()}
        kept.settle()
        assert all(torch.equal(found[key], tensor) and found[key].is_contiguous() for key, tensor in tensors.items())
        return {key: found[key].data_ptr() for key in found}

    first = taken(a=torch.ones(2, 3), b=torch.arange(6.0).view(3, 2).t(), c=torch.tensor(4.0))
    again = taken(a=torch.zeros(2, 3), b=torch.ones(2, 3, dtype=torch.float64), d=torch.ones(1))
    assert again["a"] == first["a"]


def test_where_a_host_lacks_memory_for_copies_all_save_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What copies of ranks of one host need is added up; what they have already needs nothing."""
    monkeypatch.setattr(copies, "MEMORY", tmp_path / "meminfo")
    like = Described((256,), torch.float32)  # 1 KiB

    def room(free: int | None, sizes: Sequence[int], hosts: Sequence[str], found: HostCopies | None = None) -> str | None:
        (tmp_path / "meminfo").write_text(f"MemTotal: 9999 kB\nMemAvailable: {free} kB\n" if free is not None else "")

        def wanted(world: World) -> str | None:
            own = {str(number): like for number in range(sizes[world.rank])}
            kept = found if found is not None and world.rank == 0 else HostCopies()
            return kept.make_room(own, replace(world, hosts=tuple(hosts)), pinned=False)

        (told,) = set(on_threads(3, wanted))
        return told

    assert room(6, (3, 3, 0), "aab") is None
    assert room(5, (3, 3, 0), "aab") == "of rank 0 on host a: copies need 6.00 KiB, and 5.00 KiB are free"
    assert room(5, (3, 3, 0), "abb") is None
    assert room(0, (3, 0, 0), "abb", kept := HostCopies()) is not None
    assert room(3, (3, 0, 0), "abb", kept) is None
    assert room(0, (3, 0, 0), "abb", kept) is None
    assert room(None, (3, 3, 3), "aaa") is None
    (tmp_path / "meminfo").unlink()
    told = HostCopies().make_room({"a": Described((1 << 45,), torch.float32)}, ALONE, pinned=False)
    assert told is not None
    assert told.startswith("of rank 0: copies need 128 TiB, which the system does not give: ")


def test_what_a_killed_run_has_left_is_forgotten_whichever_step_it_was(tmp_path: Path) -> None:
    left = tmp_path / "step-00000003.partial"
    left.mkdir()
    (left / "part").touch()
    stage, optimizer = trained_net(1)
    begin(FolderStore(tmp_path), 5, stage, optimizer, {}, ALONE).finish(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
