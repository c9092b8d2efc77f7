"""Streams: the very samples that a list of them would give, whoever reads them, under any plan, and from any place on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from hetpipe import DataSplits, Made, Streamed
from hetpipe.building.build import build_data, build_layers, build_model, optimizer_factory
from hetpipe.building.content import look
from hetpipe.building.feed import Batch, Feed, Reading
from hetpipe.building.fused import with_labels
from hetpipe.building.streams.records import Bookmark
from hetpipe.building.streams.sampler import StreamSampler
from hetpipe.documents.job import Job
from hetpipe.documents.sections.loss import LossSection
from hetpipe.files.messages import InputError
from hetpipe.processes.ranks.report import RankFailure
from tests.support.jobs import Folder, train
from tests.support.runs import ONE, trained
from tests.support.streams import COUNT, KINDS, Inseparable, Mixed, Plain, WithState, load, number_of, pair
from tests.test_feed import converted

KIND = pytest.mark.parametrize("kind", list(KINDS))


def numbers_of(kind: str, block: int, batch: int, steps: int, seed: int = 3) -> list[list[int]]:
    """By definition: the records of one pass behind the other, mixed within blocks."""
    if kind.startswith("hugging"):
        pytest.importorskip("datasets")
    records = list[int]()
    while len(records) < steps * batch + block:
        made = KINDS[kind]()
        if hasattr(made, "set_epoch"):
            made.set_epoch(len(records) // COUNT)
        records += map(number_of, made)
    sampler = StreamSampler(batch, block=block, seed=seed)
    return [[records[i] for i in numbers.tolist()] for numbers in islice(sampler.forever(), steps)]


def flat(parts: list[list[int]]) -> list[int]:
    return [number for part in parts for number in part]


def fed(kind: str, block: int, batch: int, workers: int) -> Feed:
    stream: Any = load(kind, shuffle=block).train
    stream[0]  # as a session does, which looks at the data before anything trains
    return Feed(stream, StreamSampler(batch, block=block, seed=3), lambda part: part, Reading(convert=converted, workers=workers))


def taken(one: Feed, steps: int, *, all_of: int | None = None) -> list[int]:
    with one.open(all_of or steps, lambda: "samples") as batches:
        return [number for batch in islice(batches, steps) for number in found(batch)]


def found(batch: Batch) -> list[int]:
    known = {tuple(pair(i)[0].tolist()): i for i in range(COUNT)}
    return [known[tuple(row.tolist())] for row in batch.inputs]


@KIND
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 3])
def test_a_stream_stopped_and_resumed_gives_the_very_next_sample(kind: str, workers: int) -> None:
    """Over the end of a pass, too, with other workers, and with another global batch."""
    for block in (1, 16):
        whole = flat(numbers_of(kind, block, 9, 20))
        first = fed(kind, block, 9, workers)
        assert taken(first, 11, all_of=20) == whole[:99]
        state, mark = json.loads(json.dumps(first.state_dict())), first.bookmark
        assert mark is not None
        assert state["position"] == 99 >= mark.number > 99 - 9 * max(1, workers) - 2 * block
        rest = fed(kind, block, 3, 3 - workers)
        rest.load_state_dict(state, Bookmark.model_validate_json(mark.model_dump_json()))
        assert taken(rest, 27) == whole[99:]


def test_a_stream_that_gives_its_workers_parts_is_refused() -> None:
    stream: Any = Streamed(Inseparable(), pair)
    assert torch.equal(stream[1][0], pair(1)[0])
    one = Feed(stream, StreamSampler(40), lambda part: part, Reading(convert=converted, workers=2))
    with pytest.raises(InputError, match=r"Inseparable gives this process other records than .*, from record 1 on"):
        taken(one, 1)


@settings(max_examples=60)
@given(
    st.sampled_from(["plain", "with a state", "mixed"]), st.integers(1, 40), st.lists(st.integers(1, 23), min_size=2, max_size=6)
)
def test_every_sample_comes_once_a_pass_whatever_the_batches_and_stops(kind: str, block: int, batches: list[int]) -> None:
    state, mark, seen = None, None, list[int]()
    for batch in batches:
        one = fed(kind, block, batch, 0)
        if state is not None:
            one.load_state_dict(state, mark)
        seen += taken(one, 2)
        state, mark = one.state_dict(), one.bookmark
    assert seen == numbers_of(kind, block, len(seen), 1)[0]
    assert len(set(seen[: COUNT // block * block])) == min(len(seen), COUNT // block * block)


def test_a_state_leads_to_its_place_at_once_and_memory_does_not_grow() -> None:
    records = WithState(10**6)
    stream = Streamed(records, lambda number: (number, number), shuffle=50)
    sampler = StreamSampler(10, block=50)
    for numbers in islice(sampler.forever(), 2000):
        stream.__getitems__(numbers.tolist())
        assert len(stream._window) <= 60
        assert len(stream._marks) <= 7
    again = WithState(10**6)
    rest, mark = Streamed(again, lambda number: (number, number), shuffle=50), stream.bookmark
    assert mark is not None
    rest.rewind(Bookmark.model_validate_json(mark))
    assert sorted(n for n, _ in rest.__getitems__(list(range(20_000, 20_050)))) == list(range(20_000, 20_050))
    assert again.read < 300


def test_samples_of_other_ranks_are_passed_over_without_being_made() -> None:
    made = list[int]()

    def sample(number: int) -> tuple[Tensor, Tensor]:
        made.append(number)
        return pair(number)

    stream = Streamed(Plain(), sample)
    for first in range(0, 60, 12):
        stream.__getitems__([first + 3, first + 4])
    assert made == [n for first in range(0, 60, 12) for n in (first + 3, first + 4)]


class Broken(Plain):
    """Fails at a record; or its state does."""

    fails = False

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if self.fails and number == 50:
                raise ValueError("line 51 cannot be read")
            yield number


class Stateless(Plain):
    def state_dict(self) -> dict[str, int]:
        raise RuntimeError("no state before iter")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("never asked")


class Mistaken(WithState):
    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.count == 60:
            raise AttributeError("another version")
        super().load_state_dict(state)


def test_what_fails_in_a_stream_is_told_as_it_is() -> None:
    """A state that does not help is as none; a record that cannot be read is no other record."""
    whole = [number for number, _ in Streamed(Plain(), lambda n: (n, n)).__getitems__(list(range(40, 60)))]
    for kind in (Broken, Stateless, Mistaken):
        first = Streamed(kind(), lambda n: (n, n))
        first.__getitems__(list(range(40, 60)))
        assert first.bookmark is not None
        mark = Bookmark.model_validate_json(first.bookmark)
        again = Streamed(kind(), lambda n: (n, n))
        again.rewind(mark)
        assert [number for number, _ in again.__getitems__(list(range(40, 60)))] == whole
    broken = Broken()
    broken.fails = True
    rest = Streamed(broken, lambda n: (n, n))
    rest.rewind(mark)
    with pytest.raises(ValueError, match="line 51 cannot be read"):
        rest.__getitems__([60])


def test_records_may_hold_anything() -> None:
    records: list[Any] = [
        {"picture": Image.new("RGB", (2, 2), (i, 0, 0)), "own": Plain(i), "text": "a" * 2000 + str(i), "none": None}
        for i in range(40)
    ]
    stream = Streamed(records, lambda record: (record["text"][-1], record["picture"].getpixel((0, 0))[0]))
    assert stream[7] == ("7", 7)
    marks = [look(0, {"x": value}) for value in ("a" * 2000 + "b", "a" * 2000 + "c", torch.eye(2).to_sparse(), torch.eye(2))]
    assert len({mark.digest for mark in marks}) == 3
    texts = [look(0, f"a fault at 0x{place}").digest for place in ("7f", "80")]
    assert texts[0] != texts[1], "an address is no part of an object, and is of a text"
    assert look(0, {"x": Plain(1)}).digest == look(0, {"x": Plain(1)}).digest
    pictures = [look(0, Image.new("L", (2, 2), shade)).digest for shade in (1, 2, 1)]
    assert pictures[0] == pictures[2] != pictures[1]


def by_hand(job: Job, numbers: list[list[int]]) -> tuple[list[float], list[Tensor]]:
    layers = build_layers(job)
    optimizer = optimizer_factory(job.train.optimizer)(list(layers.parameters()))
    losses = []
    for part in numbers:
        inputs, targets = (torch.stack(list(side)) for side in zip(*map(pair, part), strict=True))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(layers(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in layers.parameters()]


PLANS: dict[str, Any] = {
    "one device": ((1,), ONE),
    "unequal replicas": ((2, 1), ({"cuts": [4, 2], "sizes": [3, 3, 2]}, {"cuts": [6], "sizes": [2, 2]})),
    "three in a row": ((3,), [{"cuts": [2, 2, 2], "sizes": [4, 4, 4]}]),
}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [*(("plain", plan) for plan in PLANS), pytest.param("hugging face", "unequal replicas", marks=pytest.mark.slow)],
)
def test_a_run_over_a_stream_is_that_of_one_device(kind: str, plan: str, tmp_path: Path) -> None:
    """It is stopped, and resumed under another plan with other workers."""
    numbers = numbers_of(kind, 5, 12, 8, seed=0)
    folder, (counts, rows) = Folder(tmp_path), PLANS[plan]
    file = folder.ready(
        counts,
        rows,
        data={"target": "tests.support.streams:load", "args": {"kind": kind, "shuffle": 5, "test": 6}},
        checkpoint={"folder": str(tmp_path / "saved"), "every_steps": 3},
        train=train(steps=8, clip_norm=None, scheduler=None),
    )
    truth, _ = by_hand(Job.read(file), numbers)
    first = trained(file, "train.steps=5")
    assert first.losses == pytest.approx(truth[:5], abs=1e-10)
    state = json.loads(next((tmp_path / "saved").glob("*5/trainer.json")).read_text())
    assert state["stream"]["number"] <= 60
    assert (state["stream"]["state"] is None) == (kind == "plain")
    folder.cluster(2)
    folder.plan([{"cuts": [3, 3], "sizes": [5, 5, 2]}])
    rest = trained(file, "data.workers=2" if plan == "one device" else "data.workers=0")
    assert rest.losses == pytest.approx(truth[5:], abs=1e-10)
    assert rest.evaluation is not None
    assert rest.evaluation.weight == 6


def test_rows_of_the_hub_are_made_samples(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    file = Folder(tmp_path).ready(data={"target": "tests.support.streams:rows_of_the_hub"})
    truth = DataSplits(train=[pair(i) for i in range(50)])  # type: ignore[arg-type]
    splits = build_data(Job.read(file))
    assert isinstance(splits.train, Made)
    many = splits.train.__getitems__([3, 4])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(many, [truth.train[3], truth.train[4]], strict=True))
    assert len(trained(file).losses) > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": (
        {"data": "load", "train": train(steps=None, epochs=2)},
        "is a stream, of which nobody knows how many steps an epoch has. Write train.steps",
    ),
    "once": ({"data": "bare", "args": {"kind": "generator"}}, "the stream generator can be read once only"),
    "drawn": ({"data": "bare", "args": {"kind": "drawn"}}, "Drawn gives other records each time it is read"),
    "empty": ({"data": "bare", "args": {"kind": "empty"}}, "the stream Repeated gives no records"),
    "no pairs": ({"data": "bare", "args": {"kind": "numbers"}}, "sample 0 of Streamed is not a pair"),
    "evaluated": ({"data": "two_streams"}, "the test samples are a stream, which has no end"),
    "rows": ({"data": "rows_as_they_are"}, r"is not a pair .* but a dict with number. hetpipe.Made\(data, sample\) makes pairs"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_is_no_stream_to_train_on_is_refused(what: str, tmp_path: Path) -> None:
    if what == "rows":
        pytest.importorskip("datasets")
    said, words = REFUSED[what]
    data = {"target": f"tests.support.streams:{said['data']}", "args": said.get("args", {})}
    file = Folder(tmp_path).job(data=data, train=said.get("train", train(steps=3)), profile=None, plan=None)
    job = Job.read(file)
    with pytest.raises(InputError, match=words):
        looked_at(job)


def looked_at(job: Job) -> None:
    splits = build_data(job)
    build_model(job, splits)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("data.args.first=1", "saved over other data: sample 0 is another"),
        ("data.args.shuffle=3", "mixed in blocks of 1 records, and now they have 3"),
        ("data.args.count=40", "records 36 to 47 of the stream are others than when the checkpoint was saved"),
    ],
)
def test_a_run_does_not_resume_over_another_stream(changed: str, words: str, tmp_path: Path) -> None:
    file = Folder(tmp_path).ready(
        (1,),
        ONE,
        data={"target": "tests.support.streams:load", "args": {"count": 1000}},
        checkpoint={"folder": str(tmp_path / "saved"), "every_steps": 3},
        train=train(steps=4),
    )
    trained(file)
    with pytest.raises((InputError, RankFailure), match=words):
        trained(file, "train.steps=6", changed)


def test_labels_come_with_the_samples_of_a_stream() -> None:
    stream = Streamed([(torch.tensor([i]), torch.tensor([i, -100])) for i in range(5)] * 10)
    changed = with_labels(DataSplits(train=stream), LossSection(name="cross_entropy", ignore_index=-100))
    (tokens, labels), target = changed.train[2]
    assert (tokens.tolist(), labels.tolist(), target.tolist()) == ([2], [2, -100], [2, -100])


def test_passes_are_told_to_what_wants_to_know_them() -> None:
    stream = Streamed(Mixed(), lambda number: (number, number))
    seen = [number for number, _ in stream.__getitems__(list(range(2 * COUNT)))]
    first, second = seen[:COUNT], seen[COUNT:]
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
