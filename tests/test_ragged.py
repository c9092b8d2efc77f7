"""Samples of different lengths: a batch is padded to a size that follows from the numbers of the whole global batch, whoever
reads which part of it; and what the tensors of a sample are is what the model takes them for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetpipe.building.build import build_data, build_model
from hetpipe.building.called import masked_first
from hetpipe.building.content import same_content
from hetpipe.building.data import EpochSampler, Ragged, fetch, size_for
from hetpipe.building.feed import Batch, Feed, Reading
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.language.conversations import chat
from hetpipe.language.samples import Padded, Sequences, default_sizes
from hetpipe.layers.numbers import as_type
from hetpipe.processes.world import alone
from tests.support.chats import chat_of, lines, tokenizer
from tests.support.commands import Command
from tests.support.user_parts import Steps

LENGTHS = (3, 9, 1, 12, 6, 2, 4, 5)
SIZES = (4, 6, 12)


def sequences() -> Sequences:
    """Sample i is the tokens 20 i, 20 i + 1, …; the target of every second is the one after it."""
    tokens = torch.cat([torch.arange(length) + 20 * i for i, length in enumerate(LENGTHS)]).int()
    return Sequences(tokens, torch.where(tokens % 2 == 1, tokens + 1, -100), torch.tensor(LENGTHS))


def padded(*, mask: bool = False) -> Padded:
    return Padded(sequences(), SIZES, pad=7, mask=mask)


def test_a_batch_is_padded_at_the_end_and_padding_is_no_target() -> None:
    data = padded()
    assert isinstance(data, Ragged)
    inputs, targets = fetch(data, torch.tensor([2, 0]), 0, size=4)
    assert inputs.tolist() == [[40, 7, 7, 7], [0, 1, 2, 7]]
    assert targets.tolist() == [[-100] * 4, [-100, 2, -100, -100]]
    assert fetch(data, torch.tensor([2, 0]))[0].shape == (2, 12), "the largest size"
    (inputs, mask), _ = fetch(padded(mask=True), torch.tensor([2, 0]), size=4)
    assert mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    inputs, targets = fetch(data, torch.tensor([], dtype=torch.int64), size=4)
    assert (inputs.shape, targets.shape) == ((0, 4), (0, 4)), "though sample 0 may be longer"
    with pytest.raises(InputError, match="samples of Padded cannot be padded to 4: "):
        fetch(data, torch.tensor([1]), size=4)


def test_the_size_is_that_of_the_longest_sample_of_the_global_batch() -> None:
    data = padded()
    found = [size_for(data, torch.tensor(numbers)) for numbers in ([2, 5], [0, 6], [7], [4, 7], [2, 1], [])]
    assert found == [4, 4, 6, 6, 12, 4]
    assert size_for([1, 2], torch.tensor([1])) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_every_rank_pads_its_part_to_the_size_of_the_whole_batch(workers: int) -> None:
    """And a rank that reads nothing knows it, too."""

    def given(share: Any) -> list[Batch]:
        sampler = EpochSampler(len(LENGTHS), 3, seed=1)
        feed = Feed(padded(mask=True), sampler, share, Reading(convert=lambda x: as_type(x, "float64"), workers=workers))
        with feed.open(6, lambda: "samples") as batches:
            return list(batches)

    whole, first, rest, none = (given(share) for share in (lambda b: b, lambda b: b[:1], lambda b: b[1:], lambda b: None))
    assert len({batch.size for batch in whole}) == 3
    for every, one, others, nothing in zip(whole, first, rest, none, strict=True):
        size = size_for(padded(), every.numbers)
        assert every.size == one.size == others.size == nothing.size == size
        assert every.inputs[0].shape == every.targets.shape == (len(every.numbers), size)
        for parts, together in zip(zip(one.inputs, others.inputs, strict=True), every.inputs, strict=True):
            assert torch.equal(torch.cat(parts), together)
        assert torch.equal(torch.cat([one.targets, others.targets]), every.targets)
        assert nothing.inputs is None


def test_default_sizes_lie_between_the_shortest_and_the_longest_sample() -> None:
    assert default_sizes(torch.tensor([1, 2048])) == [171, 256, 342, 512, 683, 1024, 1366, 2048]
    assert default_sizes(torch.tensor([600, 2048])) == [683, 1024, 1366, 2048]
    assert default_sizes(torch.tensor([5, 5])) == [5]
    assert default_sizes(torch.tensor([1, 3])) == [1, 2, 3]


def own_job(tmp_path: Path, function: str, **sections: Any) -> Job:
    return Job.parse(
        {
            "format": "hetpipe.job/1",
            "model": {"name": "causal_lm", "args": QWEN},
            "loss": {"weight": "tokens"},
            "data": {"target": f"tests.support.user_parts:{function}"},
            "train": {"global_batch": 4, "steps": 1},
            **sections,
        },
        "job",
    )


QWEN = {
    "type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 64,
}


def test_data_of_ones_own_of_different_lengths(tmp_path: Path) -> None:
    """The model's sample has the largest size."""
    job = own_job(tmp_path, "steps")
    data = build_data(job)
    model = build_model(job, data)
    assert model.inputs.shape == (4, 8)  # type: ignore[union-attr]
    sizes = [size_for(data.train, batch) for batch in EpochSampler(6, 4, seed=0)]
    assert [(batch.inputs.shape[1], batch.share) for batch in model.shorter] == (  # type: ignore[union-attr]
        [(4, sizes.count(4) / 2)] if 4 in sizes else []
    )
    single = own_job(tmp_path, "steps", train={"global_batch": 1, "steps": 1})
    (shorter,) = build_model(single, data).shorter
    assert shorter.inputs.tolist() == [[4] * 4, [3, 3, 3, 0], [2, 2, 0, 0], [1, 0, 0, 0]]  # type: ignore[union-attr]
    assert shorter.share == pytest.approx(4 / 6)
    same_content(data.train, {}, alone())
    assert fetch(data.train, torch.tensor([0, 1]), size=4)[0].tolist() == [[1, 0, 0, 0], [2, 2, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [1, 2]}, "training samples: its lengths must be int64 [6], one for each sample, found list"),
        ({"lengths": torch.ones(6)}, "its lengths must be int64 [6], one for each sample, found torch.float32 of shape (6,)"),
        ({"sizes": [8, 4]}, "its sizes must be whole numbers of at least 1, each larger than the one before, found [8, 4]"),
        ({"sizes": []}, "each larger than the one before, found []"),
        ({"sizes": 20}, "its sizes must be a list of whole numbers, found 20"),
        ({"sizes": [2, 4]}, "the largest of its sizes is 4, but sample 5 has length 6"),
    ],
)
def test_lengths_and_sizes_are_checked(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(Steps, name, value)
    with pytest.raises(InputError) as caught:
        build_data(own_job(tmp_path, "steps"))
    assert message in str(caught.value)


def test_test_samples_are_no_longer_than_memory_is_planned_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"samples that are evaluated is 24, more than 2 times 8, that of the training .*. Give"):
        build_data(own_job(tmp_path, "steps", data={"target": "tests.support.user_parts:steps", "args": {"largest": 24}}))


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("talk")
    file = lines(folder / "chats.jsonl", [chat_of("Hello " * (i % 4), "Yes. " * (1 + i % 3)) for i in range(20)])
    return {"file": file, "tokenizer": tokenizer(folder / "tokenizer")}


def build(talk: dict[str, Any], data: dict[str, Any] | None = None, **sections: Any) -> Any:
    chats = {"name": "chat", "args": {**talk, "length": 40, **(data or {})}}
    job = own_job(Path(), "steps", **{"data": chats, **sections})
    found = build_data(job)
    return build_model(job, found), found


def test_a_model_is_measured_by_rows_that_need_a_mask(talk: dict[str, Any]) -> None:
    """The longest sample, which fills the first row that is packed by itself, needs none."""
    longest = int(build(talk)[1].train.lengths.max())
    model, data = build(talk, {"pack": True, "length": longest})
    own, first = (((tokens, positions)[1].diff() != 1).any() for tokens, positions in (data.train[0][0], model.sample(1)[0]))
    assert (bool(own), bool(first)) == (False, True)
    model, data = build(talk, {"mask": True})
    assert not bool(model.sample(1)[0][1].all())
    positions, mask = torch.tensor([[0, 1, 2], [0, 1, 0], [0, 1, 2]]), torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    inputs = torch.zeros(3, 3), positions, mask
    assert masked_first(inputs, ("input_ids", "position_ids", "attention_mask")).tolist() == [1, 2, 0]
    assert masked_first(inputs, ("input_ids", "position_ids")).tolist() == [1, 0, 2]
    assert masked_first(inputs, None).tolist() == [0, 1, 2]


def test_the_model_is_told_what_comes_beside_tokens(talk: dict[str, Any]) -> None:
    for arguments, extras in (({}, ()), ({"pack": True}, ("position_ids",)), ({"mask": True}, ("attention_mask",))):
        model, data = build(talk, arguments)
        assert (model.layers[0].extras, data.names) == (extras, ("input_ids", *extras))
    both = {"name": "causal_lm", "args": {**QWEN, "extras": ["position_ids", "attention_mask"]}}
    assert build(talk, {"pack": True}, model=both)[0].layers[0].extras == ("position_ids", "attention_mask")


def test_a_mask_is_not_taken_for_positions(talk: dict[str, Any]) -> None:
    mask = {"name": "causal_lm", "args": {**QWEN, "extras": ["attention_mask"]}}
    with pytest.raises(InputError) as caught:
        build(talk, {"pack": True}, model=mask)
    assert str(caught.value) == (
        "data 'chat' gives position_ids beside tokens, but model 'causal_lm' takes attention_mask. To fix this, write extras: "
        "[position_ids] in its args, or leave extras out there"
    )
    sizes = {key: value for key, value in QWEN.items() if key not in ("type", "head_dim", "num_key_value_heads")}
    bert = {"name": "bert", "args": sizes}
    with pytest.raises(
        InputError, match="but model 'bert' takes attention_mask. To fix this, take model causal_lm, or data without them"
    ):
        build(talk, {"pack": True}, model=bert)
    llama = {"name": "llama", "args": sizes}
    for extra, name in (("pack", "position_ids"), ("mask", "attention_mask")):
        assert build(talk, {extra: True}, model=llama)[0].layers[0].extras == (name,)
    own = {"target": "tests.support.user_parts:tokens_and_places"}
    assert len(build(talk, {"pack": True}, model=own)[0].layers) == 2


def test_a_loss_over_samples_is_refused_before_anything_is_measured(talk: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        build(talk, loss={"weight": "samples"})
    assert str(caught.value).startswith(
        "data 'chat': targets hold -100, which is to be ignored, but the loss is weighed by samples: write 'weight: tokens' in"
    )


def test_sizes_are_those_of_training_and_test_samples(talk: dict[str, Any]) -> None:
    data = chat(**talk, test_fraction=0.3)
    train, test = data.train, data.test
    assert isinstance(train, Padded)
    assert isinstance(test, Padded)
    assert train.sizes == test.sizes
    lengths: Tensor = torch.cat([train.lengths, test.lengths])
    assert (train.sizes[0] >= int(lengths.min()), train.sizes[-1]) == (True, int(lengths.max()))
    assert (len(train), len(test)) == (14, 6)
    given = chat(**talk, sizes=[64, 16, 128]).train
    assert isinstance(given, Padded)
    assert given.sizes == (16, 64, 128)


def test_a_run_trains_packed_rows_and_ends_where_a_model_would_mix_their_samples(
    talk: dict[str, Any], tmp_path: Path, run: Command
) -> None:
    """Before anything is measured."""
    for arguments in (QWEN, {"type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 400}):
        document = {
            "format": "hetpipe.job/1",
            "model": {"name": "causal_lm", "args": arguments},
            "loss": {"weight": "tokens"},
            "data": {"name": "chat", "args": {**talk, "length": 40, "pack": True}},
            "train": {"global_batch": 2, "steps": 1},
            "profiler": {"microbatch_sizes": [1, 2], "repeats": 1},
        }
        (tmp_path / "job.json").write_text(json.dumps(document))
        ended = run("train", str(tmp_path / "job.json"))
        if arguments["type"] == "qwen3":
            assert ended.code == 0, ended.err
            continue
        assert ended.code == 2
        assert (
            "a model of type 'mamba' does not tell the samples of a row apart: with small layers, logits differ by " in ended.err
        )
        assert "Traceback" not in ended.err
        assert "measuring" not in ended.err


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "Steps.padded must give a pair (inputs, targets), found of type NoneType"),
        ((torch.ones(1, 4), torch.ones(2)), "Steps.padded gives inputs shape (1, 4) for 2 samples. Dimension 0 of each of their"),
        ((torch.ones(2, 4), [torch.ones(2), 3]), "Steps.padded gives targets (shape (2,), int) for 2 samples"),
    ],
)
def test_batches_that_are_none_are_told(found: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build_data(own_job(tmp_path, "steps")).train
    monkeypatch.setattr(Steps, "padded", lambda *_: found)
    with pytest.raises(InputError) as caught:
        fetch(data, torch.tensor([0, 1]), size=4)
    assert message in str(caught.value)


def test_what_a_data_set_raises_where_it_pads_is_told_with_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def padded(*_: Any) -> Any:
        raise KeyError("oops")

    data = build_data(own_job(tmp_path, "steps")).train
    monkeypatch.setattr(Steps, "padded", padded)
    with pytest.raises(InputError, match="samples of Steps cannot be padded to 4: KeyError: 'oops'"):
        fetch(data, torch.tensor([0, 1]), size=4)
