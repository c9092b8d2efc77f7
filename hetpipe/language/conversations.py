"""Chats, of which the assistant's answers are learned, and questions with their answers, which are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from hetpipe.building.datasets import DataSplits, require_count
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.language.formats.columns import Columns
from hetpipe.language.reading.read import read
from hetpipe.language.reading.shape import Shape
from hetpipe.language.reading.texts import Texts
from hetpipe.language.records.source import Source
from hetpipe.language.tokenizer import Tokenizer
from hetpipe.language.writing.answers import Answers, Turns
from hetpipe.language.writing.template import NONE, Template, Thinking, read_template


def chat(
    file: str | Sequence[str],
    tokenizer: str,
    length: int = 2048,
    *,
    turns: Turns = "auto",
    template: str | None = None,
    thinking: Thinking | None = None,
    columns: Mapping[str, str | None] | None = None,
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
    and value), and `tools`, `system` and `chat_template_kwargs`, if it has any; or it is one of `instructions`. Targets are the
    tokens of the assistant's answers, with the token that ends each: as the template's own generation blocks say or, without
    these, what it writes behind the prompt that a model is given at inference. A turn with weight: 0 (train, training, trainable,
    loss: false) is not learned.

    Args:
        file: a .jsonl, .json, .csv, .tsv or .parquet file, a pattern such as data/*.jsonl, several of these, a folder of such, or
            the name of a data set of the hub.
        tokenizer: a folder of save_pretrained with a tokenizer, or its name on the hub.
        length: the most tokens that the model is given of a sample; of a row, where samples are packed.
        turns: which answers of a chat are learned. auto: all, in one row where the template writes each the same whatever
            follows, else each in a sample of its own, as it is written at inference. all: all in one row; a chat of which the
            template writes earlier answers otherwise is refused. last: the last one only.
        template: a file with another template of chats (Jinja); none: no template, so that records with an instruction, or a
            question, are plain texts.
        thinking: whether answers begin with a thought: on or off, for templates that are told so (enable_thinking); off also
            leaves thoughts out of answers that have some. By default what each answer has.
        columns: what the data set calls its keys and roles, as in {prompt: question, completion: answer, assistant: bot}; nothing
            behind a name: the column is not read.
        pack: rows of `length` tokens, each of whole samples, with positions that begin anew at each of them: inputs are
            (tokens, positions), int64 [length] both. Else inputs are tokens, padded at the end.
        sizes: to which batches are padded, each to the least that holds the longest sample of the global batch; by default at
            most eight between the shortest and the longest sample.
        mask: give the mask of the padding, too, for models that are not causal: inputs are (tokens, mask).
        too_long: what becomes of samples of more tokens: truncate, drop or refuse.
        test_fraction: part of the records, spread evenly, that is held out; 0 for none.
        limit: the first so many records; None for all.
        split: of a data set of the hub.
        subset: of a data set of the hub.
    """
    shape = Shape(what="chat", length=length, too_long=too_long, pack=pack, sizes=sizes, mask=mask, test_fraction=test_fraction)
    source = _source("chat", file, limit, split, subset)
    return _splits(source, tokenizer, shape, Columns(columns), _one_of("turns", turns, Turns), template, thinking)


def instructions(
    file: str | Sequence[str],
    tokenizer: str,
    length: int = 2048,
    *,
    turns: Turns = "auto",
    template: str | None = None,
    thinking: Thinking | None = None,
    columns: Mapping[str, str | None] | None = None,
    pack: bool = False,
    sizes: Sequence[int] | None = None,
    mask: bool = False,
    too_long: str = "truncate",
    test_fraction: float = 0.1,
    limit: int | None = None,
    split: str = "train",
    subset: str | None = None,
) -> DataSplits:
    """Questions and their answers. `prompt` and `completion` are a text as it is, of which the completion and the token that
    ends a text are learned. `instruction`, `input` (or none) and `output`, or a `question` and its `answer` (`response`), with
    `system` and `history`, if there are any, are a chat by the tokenizer's template, of which answers are learned; without a
    template, texts with a blank line between two. Arguments are those of `chat`; a `template` that is named is used for all
    records."""
    shape = Shape(
        what="instructions", length=length, too_long=too_long, pack=pack, sizes=sizes, mask=mask, test_fraction=test_fraction
    )
    source = _source("instructions", file, limit, split, subset)
    return _splits(source, tokenizer, shape, Columns(columns), _one_of("turns", turns, Turns), template, thinking)


def preferences(
    file: str | Sequence[str],
    tokenizer: str,
    length: int = 2048,
    *,
    template: str | None = None,
    thinking: Thinking | None = None,
    columns: Mapping[str, str | None] | None = None,
    sizes: Sequence[int] | None = None,
    too_long: str = "truncate",
    test_fraction: float = 0.1,
    limit: int | None = None,
    split: str = "train",
    subset: str | None = None,
) -> DataSplits:
    """Questions with a better and a worse answer, for the losses dpo, simpo, orpo and reward. A record has `chosen` and
    `rejected`: each a whole chat, or an answer to the `prompt` (or `messages`, `question`, `instruction`) beside it. Both are
    written by the tokenizer's template, if there is one; what is compared is the last answer of each. Other arguments are those
    of `chat`."""
    shape = Shape(
        what="preferences", length=length, too_long=too_long, pack=False, sizes=sizes, mask=False, test_fraction=test_fraction
    )
    source = _source("preferences", file, limit, split, subset)
    texts = _texts(tokenizer, shape.what, Columns(columns), "last", template, thinking)
    texts = replace(texts, templated=True, preferences=True)
    found = read(source, texts, shape)
    return shape.pairs(found.sequences, found.groups, texts.tokenizer.pad, texts.made_of(found.ends))


def _splits(
    source: Source, name: str, shape: Shape, columns: Columns, turns: Turns, template: str | None, thinking: Thinking | None
) -> DataSplits:
    texts = _texts(name, shape.what, columns, turns, template, thinking)
    found = read(source, texts, shape)
    return shape.splits(found.sequences, found.groups, texts.tokenizer.pad, texts.made_of(found.ends))


def _texts(name: str, what: str, columns: Columns, turns: Turns, template: str | None, thinking: Thinking | None) -> Texts:
    """How the records of such data are written. InputError if they have no template that they need, or no end."""
    own = None if template == NONE else read_template(template)
    tokenizer = Tokenizer(name)
    answers, thinking = None, _one_of("thinking", thinking, Thinking) if thinking is not None else None
    if template != NONE and (what == "chat" or own is not None or tokenizer.has_template):
        answers = Answers(Template(tokenizer, own), turns, thinking)
    elif thinking is not None:
        raise InputError(
            f"thinking is {thinking}, but only a template of chats uses it, and there is no template. Leave thinking out"
        )
    else:
        tokenizer.required_end()  # before all is read
    templated = True if what == "chat" or own is not None else None
    return Texts(tokenizer=tokenizer, answers=answers, columns=columns, templated=templated)


def _one_of(name: str, value: object, known: Any) -> Any:
    names = get_args(known)
    if value not in names:
        raise InputError(f"unknown {name} {shown(value)}{nearest(str(value), names)}")
    return value


def _source(what: str, file: str | Sequence[str], limit: int | None, split: str, subset: str | None) -> Source:
    if limit is not None:
        require_count("limit", limit, what)
    return Source.of(file, limit=limit, split=split, subset=subset)
