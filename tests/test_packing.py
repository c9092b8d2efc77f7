"""Samples in rows, padded or packed (hetpipe/language/samples, packing): rows train what single samples do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hetpipe.building.data import fetch
from hetpipe.language.conversations import chat
from hetpipe.language.packing import pack
from hetpipe.language.samples import IGNORED, Packed, Padded, Sequences
from hetpipe.layers.model import Loss, cross_entropy
from hetpipe.layers.weights import materialise
from hetpipe.planning import registry
from tests.support import chats
from tests.support.chats import chat_of, lines, tokenizer


def plain(pair: Any) -> tuple[list[int], list[int]]:
    return pair[0].tolist(), pair[1].tolist()


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer(tmp_path_factory.mktemp("chatml"))


def test_padding_is_among_the_words_that_a_model_must_know() -> None:
    """Whichever is the greatest, of one sample of three tokens: one of its tokens, what comes after the last, or padding. Of
    positions it must know those of what it is padded to, or of the longest sample in a row."""
    cases = [  # tokens, targets, padding; how many words
        ([3, 9, 4], [9, 4, 5], 2, 10),
        ([3, 4, 5], [4, 5, 9], 2, 10),
        ([3, 4, 5], [4, 5, 6], 9, 10),  # its own token, as of a tokenizer that had none
        ([3, 4, 5], [IGNORED] * 3, 9, 10),
        ([3, 9, 5], [IGNORED] * 3, 0, 10),
        ([0, 0, 0], [0, 0, 0], 0, 1),
    ]
    for tokens, targets, pad, words in cases:
        own = Sequences(torch.tensor(tokens).int(), torch.tensor(targets).int(), torch.tensor([3]))
        found = [own.words(pad), Padded(own, [4], pad).words, Packed(own, 4, pad).words]
        assert found == [words] * 3, (tokens, targets, pad)
        assert (Padded(own, [3, 4], pad).positions, Packed(own, 4, pad).positions) == (4, 3)
        table = torch.nn.Embedding(words, 2)
        for inputs in (Packed(own, 4, pad)[0][0][0], fetch(Padded(own, [4], pad), torch.tensor([0]))[0]):
            assert table(inputs).shape[-1] == 2  # it has a row for each of them


def test_best_fit_decreasing() -> None:
    """Lengths 5, 3, 4, 2, 6 in rows of 8: 6 and 2 fill one, 5 and 3 another."""
    assert pack([5, 3, 4, 2, 6], 8) == [[4, 3], [0, 1], [2]]
    lengths = torch.randint(1, 300, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pack(lengths, 512)
    assert sorted(number for row in rows for number in row) == list(range(2000))
    assert max(sum(lengths[number] for number in row) for row in rows) <= 512
    assert len(rows) <= 1.01 * sum(lengths) / 512 + 1


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> str:
    said = chats.WORDS.split()
    talks = [chat_of("Hello " * (i % 5), *(" ".join(said[i : i + 3 + j]) for j in range(1 + 2 * (i % 3)))) for i in range(14)]
    return lines(tmp_path_factory.mktemp("talks") / "chats.jsonl", talks)


def test_a_row_is_made_of_whole_samples_and_padding(chatml: str, talks: str) -> None:
    single = chat(talks, chatml, test_fraction=0).train
    rows = chat(talks, chatml, length=100, pack=True, test_fraction=0)
    assert rows.names == ("input_ids", "position_ids")
    wanted = sorted(plain(single[i]) for i in range(len(single)))  # type: ignore[arg-type]
    found, padded = list[Any](), 0
    for (tokens, positions), targets in (rows.train[i] for i in range(len(rows.train))):  # type: ignore[arg-type]
        assert tokens.shape == positions.shape == targets.shape == (100,)
        starts = [*(positions == 0).nonzero().flatten().tolist(), 100]
        for begin, end in pairwise(starts):
            assert positions[begin:end].tolist() == list(range(end - begin))
            if bool((targets[begin:end] == -100).all()):
                assert end == 100
                padded += 1
            else:
                found.append((tokens[begin:end].tolist(), targets[begin:end].tolist()))
    assert sorted(found) == wanted
    assert padded > 0
    with pytest.raises(IndexError, match=f"row {len(rows.train)} of {len(rows.train)}"):  # type: ignore[arg-type]
        rows.train[len(rows.train)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_packed_rows_have_the_loss_and_gradients_of_single_samples(kind: str, chatml: str, talks: str) -> None:
    """In float64. One after the other, padded to one length, and packed: no token sees another sample. (transformers' own eager
    attention has its softmax in float32.)"""
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "vocab_size": 400,
        "max_position_embeddings": 256,
        "use_cache": False,
    }
    layers = registry.model("causal_lm")(type=kind, attention="sdpa", extras=["position_ids"], **config)
    layers.to(torch.float64)
    torch.manual_seed(0)
    materialise(layers)
    loss = Loss(function=cross_entropy, weight="tokens")

    def whole(*batches: Any) -> tuple[Tensor, list[Tensor]]:
        layers.zero_grad()
        total = sum((loss.share(layers(inputs), targets, 1.0) for inputs, targets in batches), torch.zeros(()))
        total.backward()
        return total.detach(), [p.grad.clone() for p in layers.parameters() if p.grad is not None]

    single = chat(talks, chatml, test_fraction=0).train
    rows = chat(talks, chatml, length=100, pack=True, test_fraction=0).train
    every = torch.arange(len(single))  # type: ignore[arg-type]
    truth, gradients = whole(*((tokens[None], targets[None]) for tokens, targets in (single[i] for i in every.tolist())))
    assert len(rows) < len(single)  # type: ignore[arg-type]
    padded = fetch(single, every)
    packed = fetch(rows, torch.arange(len(rows)))  # type: ignore[arg-type]
    for found, own in (whole(padded), whole((tuple(packed[0]), packed[1]))):
        assert abs(float(found - truth)) < 1e-12 * float(truth)
        largest = max(float(g.abs().max()) for g in gradients)
        assert max(float((a - b).abs().max()) for a, b in zip(own, gradients, strict=True)) < 1e-12 * largest
    others = (packed[0][0], torch.arange(100).expand_as(packed[0][1]))
    assert abs(float(whole((others, packed[1]))[0] - truth)) > 1e-6 * float(truth), "positions tell samples apart"
