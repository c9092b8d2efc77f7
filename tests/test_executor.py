"""hetpipe/runtime/stages/: stages as threads over a network that helps as little as gloo: a message moves when both ends have
asked for it and all before it in its lane have moved; or as little as NCCL where CUDA runs one kernel after the other: when all
that either end has asked for before, in any lane, has moved. Whatever the schedule, nobody waits for ever, gradients are those of
one device, and there are no more receive buffers than the memory model counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hetpipe.documents.schedule import FORWARD_ONLY, default_depths
from hetpipe.files.messages import InputError
from hetpipe.layers.device import MemoryMeter
from hetpipe.layers.model import Loss, Tensors, Wanted, as_tuple, split_rows
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.split import TensorSpec, joint_gradients
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.runtime.recorder import Recorder
from hetpipe.runtime.replicas import Lanes
from hetpipe.runtime.stages import transfers
from hetpipe.runtime.stages.executor import StageRun, forward_stages

CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds that only a deadlock takes
WIDTH = 3


class Network:
    """isend and irecv between threads, whose ranks are their names. `one_by_one`: an end takes part in one message at a time, in
    the order in which it asked."""

    def __init__(self, *, one_by_one: bool) -> None:
        self.one_by_one = one_by_one
        self.changed = threading.Condition()
        self.asked: dict[int, list[Work]] = {}  # by each rank, and not yet moved
        self.sent: dict[tuple[str, int, int], int] = {}  # bytes, in each lane

    def isend(self, tensor: Tensor, other: int, *, group: str) -> Work:
        me = int(threading.current_thread().name)
        self.sent[group, me, other] = self.sent.get((group, me, other), 0) + tensor.nbytes
        return self._ask(me, Work(self, 0, (group, me, other), tensor))

    def irecv(self, tensor: Tensor, other: int, *, group: str) -> Work:
        me = int(threading.current_thread().name)
        return self._ask(me, Work(self, 1, (group, other, me), tensor))

    def _ask(self, rank: int, work: Work) -> Work:
        with self.changed:
            self.asked.setdefault(rank, []).append(work)
            while self._move():
                pass
            self.changed.notify_all()
        return work

    def _move(self) -> bool:
        """Whether a message moved."""
        for sends in self.asked.values():
            for send in sends[:1] if self.one_by_one else self._firsts(sends):
                if send.end:
                    continue
                others = self.asked.get(send.lane[2], [])
                for take in others[:1] if self.one_by_one else self._firsts(others):
                    if take.end and take.lane == send.lane:
                        assert (send.tensor.shape, send.tensor.dtype) == (take.tensor.shape, take.tensor.dtype)
                        with torch.no_grad():
                            take.tensor.copy_(send.tensor)
                        send.moved = take.moved = True
                        sends.remove(send)
                        others.remove(take)
                        return True
        return False

    def _firsts(self, works: Sequence[Work]) -> list[Work]:
        """The first of each end of each lane."""
        return list({(work.lane, work.end): work for work in reversed(works)}.values())


class Work:
    """`end`: 0 sends, 1 receives; `lane`: (group, sender, receiver)."""

    def __init__(self, network: Network, end: int, lane: tuple[str, int, int], tensor: Tensor) -> None:
        self.network, self.end, self.lane, self.tensor = network, end, lane, tensor
        self.moved = False

    def wait(self) -> None:
        with self.network.changed:
            if not self.network.changed.wait_for(lambda: self.moved, PATIENCE):
                raise TimeoutError(f"a message of {self.lane} never moved")


class Carrying(nn.Module):
    """(x, labels[, y]) → the same with x changed: a tuple, one of which has no gradient."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(not frozen)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, labels = given
        return torch.tanh(self.linear(x)), labels + 1


class Plain(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def last_of(output: Tensors, targets: Tensors) -> Tensor:
    return nn.functional.mse_loss(as_tuple(output)[0], as_tuple(targets)[0])


LOSS = Loss(function=last_of)


class Pipeline:
    """Runs all stages, each in a thread; `runs` are those of the stages."""

    def __init__(
        self,
        layers: nn.Sequential,
        inputs: Tensors,
        cuts: Sequence[int],
        sizes: Sequence[int],
        depths: Sequence[int] | None,
        monkeypatch: pytest.MonkeyPatch,
        *,
        one_by_one: bool = False,
    ) -> None:
        self.network, self.sizes, self.inputs = Network(one_by_one=one_by_one), sizes, inputs
        monkeypatch.setattr(transfers, "dist", self.network)
        parts = split_rows(inputs, sizes)
        boundaries = [trace_boundaries(layers, part) for part in parts]
        self.ends = [
            list(zip(*(joint_gradients([b[at] for b in boundaries]) for at in pair), strict=True)) for pair in pairwise(cuts)
        ]
        self.meters = [MemoryMeter() for _ in cuts[1:]]
        self.rooms = [(transfers.Room(CPU, meter), transfers.Room(CPU, meter)) for meter in self.meters]
        self.frozen = forward_stages([own[0][1] for own in self.ends[:-1]]) if depths is not None else 0
        names: Any = ("down", "up", "hosts" if one_by_one else None)  # of the groups in `Network`
        self.runs = [
            StageRun(
                make_stage(layers, lo, hi),
                index=s,
                stages=len(cuts) - 1,
                sides=(transfers.Side((s - 1,)), transfers.Side((s + 1,))),
                lanes=Lanes(*names),
                rooms=self.rooms[s],
                sizes=sizes,
                depths=depths,
                recorder=Recorder(CPU, meter=self.meters[s]),
                loss=(lambda output, wanted: LOSS.share(output, wanted.targets, sum(sizes), wanted.weight)),
                last_backward=lambda: None,
                frozen=self.frozen,
            )
            for s, (lo, hi) in enumerate(pairwise(cuts))
        ]

    def run(self, targets: Tensor | None, on_output: Callable[[Tensors, int], None] | None = None) -> list[Tensor]:
        found: dict[int, Any] = {}

        def stage(s: int) -> None:
            try:
                inputs = split_rows(self.inputs, self.sizes) if s == 0 else None
                last = s == len(self.runs) - 1
                wanted = None
                if last and targets is not None:
                    wanted = [Wanted(t, n) for t, n in zip(split_rows(targets, self.sizes), self.sizes, strict=True)]
                with torch.set_grad_enabled(targets is not None):
                    found[s] = self.runs[s].run(self.ends[s], inputs, wanted, on_output if last else None)
            except BaseException as error:
                found[s] = error

        threads = [threading.Thread(target=stage, args=(s,), name=str(s), daemon=True) for s in range(len(self.runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        for error in found.values():
            if isinstance(error, BaseException):
                raise error
        return found[len(self.runs) - 1]  # type: ignore[no-any-return]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[bool], bool]:
    """(layers, cuts, sizes, which layers are frozen, whether tuples cross the boundaries)"""
    count = draw(st.integers(1, 8))
    stages = draw(st.integers(1, count))
    cuts = [0, *sorted(draw(st.permutations(range(1, count)))[: stages - 1]), count]
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    frozen = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return count, cuts, sizes, frozen, draw(st.booleans())


def models(count: int, frozen: Sequence[bool], tuples: bool, samples: int) -> tuple[nn.Sequential, Tensors, Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(*((Carrying if tuples else Plain)(frozen=f) for f in frozen[:count]))
    x, y = torch.randn(2, samples, WIDTH, dtype=torch.float64)
    return layers, (x, torch.arange(samples)) if tuples else x, y


def depths_of(draw: Callable[[st.SearchStrategy[Any]], Any], stages: int, m: int) -> list[int]:
    """Never rising; beyond m now and then."""
    drawn = draw(st.lists(st.integers(1, m + 2), min_size=stages, max_size=stages))
    return sorted(drawn, reverse=True)


@given(pipelines(), st.booleans(), st.data())
def test_every_schedule_ends_with_the_gradients_of_one_device(
    case: tuple[int, list[int], list[int], list[bool], bool], one_by_one: bool, data: st.DataObject
) -> None:
    count, cuts, sizes, frozen, tuples = case
    layers, inputs, targets = models(count, frozen, tuples, sum(sizes))
    depths = depths_of(data.draw, len(cuts) - 1, len(sizes))
    with pytest.MonkeyPatch.context() as patch:
        pipeline = Pipeline(layers, inputs, cuts, sizes, depths, patch, one_by_one=one_by_one)
        for _ in range(2):  # the second step uses the buffers of the first
            layers.zero_grad()
            losses = pipeline.run(targets)
            found = [p.grad for p in layers.parameters()]
            layers.zero_grad()
            whole = last_of(layers(inputs), targets)
            if whole.requires_grad:
                whole.backward()
            assert float(sum(losses)) == pytest.approx(whole.item(), abs=1e-12)
            for mine, parameter in zip(found, layers.parameters(), strict=True):
                assert (mine is None) == (parameter.grad is None)
                if mine is not None and parameter.grad is not None:
                    torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=1e-12)
    m, trained = len(sizes), [*frozen, False].index(False)
    assert pipeline.frozen == sum(hi <= trained for hi in cuts[1:-1])
    assert all(receiver >= pipeline.frozen for lane, _, receiver in pipeline.network.sent if lane == "up")
    for s, run in enumerate(pipeline.runs):
        depth = FORWARD_ONLY if s < pipeline.frozen else min(depths[s], m)
        inward, gradients = pipeline.rooms[s]
        tensors = 2 if tuples else 1
        assert len(inward._all) <= tensors * min(m, depth + 1)
        assert len(gradients._all) <= min(m, max(2, depth + 1))
        assert (run._gradients is None) == (s < pipeline.frozen or s == len(pipeline.runs) - 1)
        assert s >= pipeline.frozen or not run._flying


@given(pipelines(), st.booleans())
def test_forward_only_gives_every_output_in_order(
    case: tuple[int, list[int], list[int], list[bool], bool], one_by_one: bool
) -> None:
    count, cuts, sizes, frozen, tuples = case
    layers, inputs, _ = models(count, frozen, tuples, sum(sizes))
    seen: list[tuple[int, Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        pipeline = Pipeline(layers, inputs, cuts, sizes, None, patch, one_by_one=one_by_one)
        pipeline.run(None, lambda output, i: seen.append((i, as_tuple(output)[0])))
    assert [i for i, _ in seen] == list(range(len(sizes)))
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([t for _, t in seen]), as_tuple(layers(inputs))[0])
    assert all(len(inward._all) <= 3 * (1 + tuples) for inward, _ in pipeline.rooms)


def test_runs_of_a_stage_use_the_same_buffers() -> None:
    """A message takes what is free, or, where that is too small, new buffers in its place, as large as any of its step needs."""
    meter, small, large = MemoryMeter(), *([TensorSpec((n,), torch.float32, False)] for n in (2, 8))
    room = transfers.Room(CPU, meter)
    first, second = room.take(small, [small]), room.take(small, [small])
    room.give(first)
    assert room.take(small, [small]) is first
    room.give(first)
    room.give(second)
    assert [t.numel() for t in room.take(small, [small, large])] == [2]
    assert [t.numel() for t in room.take(large, [small, large])] == [8]
    assert meter.used == (2 + 8) * 4
    room.empty()
    assert meter.used == 0


def test_as_many_receive_buffers_as_are_in_flight_however_many_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B over three stages, 64 micro-batches: stage 1 has two in flight, so three inputs and two gradients."""
    layers, inputs, targets = models(3, [False] * 3, False, 64)
    pipeline = Pipeline(layers, inputs, [0, 1, 2, 3], [1] * 64, default_depths("1f1b", 3, 64), monkeypatch)
    pipeline.run(targets)
    inward, gradients = pipeline.rooms[1]
    assert (len(inward._all), len(gradients._all)) == (3, 2)
    assert pipeline.meters[1].used == 5 * WIDTH * 8
    inward.empty()
    gradients.empty()
    assert pipeline.meters[1].used == 0


@pytest.mark.parametrize("one_by_one", [False, True])
def test_nothing_comes_back_to_a_stage_below_all_that_trains(monkeypatch: pytest.MonkeyPatch, one_by_one: bool) -> None:
    """Of three stages the first two hold nothing that trains, and the third begins with a layer that does not: 64 micro-batches
    go one way, and the first two stages hold two outputs each, and three inputs, however deep their warm-up."""
    layers, inputs, targets = models(4, [True, True, True, False], False, 64)
    pipeline = Pipeline(layers, inputs, [0, 1, 2, 4], [1] * 64, [9, 9, 9], monkeypatch, one_by_one=one_by_one)
    pipeline.run(targets)
    row = WIDTH * 8
    assert pipeline.network.sent == {("down", 0, 1): 64 * row, ("down", 1, 2): 64 * row}
    assert [step.kind for step in pipeline.runs[0].order if "B" in step.kind] == []
    assert pipeline.meters[0].peak == 2 * row
    assert pipeline.meters[1].peak <= 5 * row
    assert pipeline.runs[2]._returned is None


def test_depths_that_rise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, inputs, _ = models(2, [False] * 2, False, 4)
    with pytest.raises(ValueError, match="warm-up depth 2 of stage 1 is above depth 1 of stage 0"):
        Pipeline(layers, inputs, [0, 1, 2], [1] * 4, [1, 2], monkeypatch)


class Halves:
    """Stands for the group of two devices that share a stage: what each gives, both get."""

    def __init__(self) -> None:
        self.meet, self.given = threading.Barrier(2, timeout=PATIENCE), dict[str, Tensor]()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.given[threading.current_thread().name] = tensor.clone()
        self.meet.wait()
        both = [self.given["1"], self.given["2"]]
        self.meet.wait()
        return both


def test_devices_that_share_a_stage_exchange_a_part_each_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has a stage of its own, ranks 1 and 2 share one, and have all of each message. Of one element, one sends none."""
    monkeypatch.setattr(transfers, "dist", Network(one_by_one=True))
    x, y, found, group = torch.arange(7.0).view(1, 7), torch.ones(1), dict[int, list[Tensor]](), Halves()
    message = [TensorSpec(tuple(t.shape), torch.float32, False) for t in (x, y)]

    def one() -> None:
        side = transfers.Side((1, 2), 0, 2)
        out = transfers.Outgoing(side, "down")  # type: ignore[arg-type]
        back = transfers.Incoming(side, "up", transfers.Room(CPU, None, 2))  # type: ignore[arg-type]
        back.begin([message])
        out.send([x, y])
        back.post()
        found[0] = list(back.take())
        out.settle(1)

    def of_two(rank: int) -> None:
        side = transfers.Side((0,), rank - 1, 2, group)  # type: ignore[arg-type]
        comes = transfers.Incoming(side, "down", transfers.Room(CPU, None, 2))  # type: ignore[arg-type]
        comes.begin([message])
        back = transfers.Outgoing(side, "up")  # type: ignore[arg-type]
        comes.post()
        found[rank] = [t.clone() for t in comes.take()]
        back.send([(rank * 10 + t) for t in found[rank]])
        back.settle(1)

    threads = [
        threading.Thread(target=one, name="0"),
        threading.Thread(target=of_two, args=(1,), name="1"),
        threading.Thread(target=of_two, args=(2,), name="2"),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for rank in (1, 2):
        assert [t.tolist() for t in found[rank]] == [x.tolist(), y.tolist()]
    assert [t.tolist() for t in found[0]] == [[[10.0, 11.0, 12.0, 13.0, 24.0, 25.0, 26.0]], [11.0]]


class Growing(nn.Module):
    """Its output has as many rows as its input's numbers say, which no trace sees."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 1

    def forward(self, x: Tensor) -> Tensor:
        return x[: self.rows]


def test_an_output_of_another_shape_than_traced_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, inputs, targets = models(2, [False] * 2, False, 4)
    layers[0] = nn.Sequential(layers[0], growing := Growing())
    pipeline = Pipeline(layers, inputs, [0, 1, 2], [2, 2], [1, 1], monkeypatch)
    growing.rows = 2
    monkeypatch.setattr("tests.test_executor.PATIENCE", 0.2)
    message = r"0F0: the stage's output is \(2, 3\) of float64, and \(1, 3\) of float64 when it was traced"
    with pytest.raises(InputError, match=message):
        pipeline.run(targets)
