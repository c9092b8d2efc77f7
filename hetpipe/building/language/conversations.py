"""Chats, of which the assistant's turns are learned, and pairs of a prompt and its completion, which is learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetpipe.building.datasets import DataSplits, require_count
from hetpipe.building.language.pairs import pair
from hetpipe.building.language.reading import Shape, splits
from hetpipe.building.language.records import Source
from hetpipe.building.language.tokenizer import Tokenizer
from hetpipe.building.language.turns import Chats
from hetpipe.files.messages import InputError, nearest

TURNS = ("all", "last")


def chat(
    file: str | Sequence[str],
    tokenizer: str,
    length: int = 2048,
    *,
    turns: str = "all",
    pack: bool = False,
    sizes: Sequence[int] | None = None,
    mask: bool = False,
    too_long: str = "truncate",
    test_fraction: float = 0.1,
    limit: int | None = None,
    split: str = "train",
    subset: str | None = None,
) -> DataSplits:
    """Chats by the tokenizer's template. A record has `messages`, each with role and content (or `conversations`, with from
    and value), and `tools`, if it has any. Targets are the tokens of the assistant's turns, with the token that ends each: as the
    template's own generation blocks say or, without these, what it writes behind the chat up to such a turn.

    Args:
        file: a .jsonl, .json or .parquet file, several, a folder of such, or the name of a data set of the hub.
        tokenizer: a folder of save_pretrained with a tokenizer, or its name on the hub.
        length: the most tokens that the model is given of a sample; of a row, where samples are packed.
        turns: all, or last: only the last of the assistant's turns of each chat is learned.
        pack: rows of `length` tokens, each of whole samples, with positions that begin anew at each of them: inputs are
            (tokens, positions), int64 [length] both. Else inputs are tokens, padded at the end.
        sizes: to which batches are padded, each to the least that holds the longest sample of the global batch; by default at
            most eight between the shortest and the longest sample.
        mask: give the mask of the padding, too, for models that are not causal: inputs are (tokens, mask).
        too_long: what becomes of samples of more tokens: truncate, drop or refuse.
        test_fraction: part of the samples, spread evenly, that is held out; 0 for none.
        limit: the first so many records; None for all.
        split: of a data set of the hub.
        subset: of a data set of the hub.
    """
    if turns not in TURNS:
        raise InputError(f"unknown turns {turns!r}{nearest(str(turns), TURNS)}")
    shape = Shape(
        what="chat", length=length, too_long=too_long, pack=pack, sizes=sizes, mask=mask, test_fraction=test_fraction
    )
    source = _source("chat", file, limit, split, subset)
    return splits(source, tokenizer, shape, lambda its: (Chats(its, turns).marked, its.chats))


def instructions(
    file: str | Sequence[str],
    tokenizer: str,
    length: int = 2048,
    *,
    pack: bool = False,
    sizes: Sequence[int] | None = None,
    mask: bool = False,
    too_long: str = "truncate",
    test_fraction: float = 0.1,
    limit: int | None = None,
    split: str = "train",
    subset: str | None = None,
) -> DataSplits:
    """Pairs of `prompt` and `completion`, or of `instruction`, `input` (or none) and `output`, a blank line behind each of the
    first two. Targets are the completion's tokens, and the one that ends a text. No template is used, but the tokenizer's own
    token that begins a text. Arguments are those of `chat`."""
    shape = Shape(
        what="instructions", length=length, too_long=too_long, pack=pack, sizes=sizes, mask=mask, test_fraction=test_fraction
    )
    return splits(_source("instructions", file, limit, split, subset), tokenizer, shape, _pairs)


def _pairs(tokenizer: Tokenizer) -> tuple[Any, Any]:
    tokenizer.required_end()  # before all is read
    return pair, tokenizer.pairs


def _source(what: str, file: str | Sequence[str], limit: int | None, split: str, subset: str | None) -> Source:
    if limit is not None:
        require_count("limit", limit, what)
    return Source.of(file, limit=limit, split=split, subset=subset)
