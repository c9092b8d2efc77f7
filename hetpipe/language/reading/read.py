"""All records of a source, read once on a host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from hetpipe.files.messages import InputError, counted
from hetpipe.language.kept.key import key_of
from hetpipe.language.kept.once import once
from hetpipe.language.kept.token_file import Kept
from hetpipe.language.reading.gathered import Gathered, gather
from hetpipe.language.reading.shape import Shape
from hetpipe.language.reading.texts import Texts
from hetpipe.language.reading.workers import LostError, how_many, read_in
from hetpipe.language.records.record import Record, Unused
from hetpipe.language.records.source import Found, Source
from hetpipe.language.samples import Looks, Sequences
from hetpipe.processes.environment import own_rank
from hetpipe.processes.progress import Activity, warn

TOGETHER = 1_000  # records that are read, and tokenized, at once


class Samples(NamedTuple):
    """Samples; the number of each one's record among those that have a sample, int64 [samples]; and the tokens that end what is
    learned."""

    sequences: Sequences
    groups: Tensor
    ends: list[int]


def read(source: Source, texts: Texts, shape: Shape) -> Samples:
    """The samples of all records, read by one process of this host, now or at an earlier start; what a user should know of them
    is said each time. InputError tells the records that cannot be used."""
    found = source.found()
    key = key_of(_said(source, found, texts, shape)) if found is not None else None
    size = found.size if found is not None else 0

    def make() -> Kept:
        gathered = _read(source, texts, shape, found)
        notes = _notes(source, texts, shape, gathered)
        if not gathered.arrays["lengths"]:
            _tell(notes)
            raise InputError(f"{source}: none of {gathered.count} records has a token to learn within the first {shape.length}")
        return Kept(gathered.tensors(), {"notes": notes, "ends": sorted(gathered.ends)})

    kept = once(key, size, make, lambda: source.found() == found)
    _tell(kept.facts["notes"])
    tokens, targets, lengths = (kept.arrays[name] for name in ("tokens", "targets", "lengths"))
    looks = Looks(*(kept.arrays[name] for name in Looks._fields))
    return Samples(Sequences(tokens, targets, lengths, looks), kept.arrays["groups"], kept.facts["ends"])


def _tell(notes: Sequence[str]) -> None:
    for note in notes if own_rank() == 0 else ():
        warn(note)


def _said(source: Source, found: Found, texts: Texts, shape: Shape) -> dict[str, Any]:
    """All that decides the samples, and what is said of them, in plain values."""
    answers = texts.answers
    return {
        "source": source,
        "files": found,
        "tokenizer": texts.tokenizer.exact,
        "columns": texts.columns.given,
        "template": None if answers is None else answers.template.digest,
        "answers": None if answers is None else (answers.turns, answers.thinking),
        "templated": texts.templated,
        "shape": (shape.what, shape.length, shape.too_long),
    }


def _read(source: Source, texts: Texts, shape: Shape, found: Found | None) -> Gathered:
    """Read all records, in several processes where that pays."""
    if found is not None and (count := how_many(found.size)):
        try:
            return _gathered(source, texts, shape, found, lambda groups: read_in(count, texts, shape, groups))
        except LostError as error:
            warn(f"note: {source} is read again in one process, because {error}")
    return _gathered(source, texts, shape, found, None)


Groups = Iterator[tuple[int, Sequence[Record]]]


def _gathered(
    source: Source, texts: Texts, shape: Shape, found: Found | None, elsewhere: Callable[[Groups], Iterator[Gathered]] | None
) -> Gathered:
    whole, total = Gathered(shape.length), found.records(source.limit) if found is not None else None

    def here(groups: Groups) -> Iterator[Gathered]:
        for first, records in groups:
            yield gather(texts, shape, first, records, tokenize=not whole.faults.count)

    with Activity(f"reading {source}", total, shown=own_rank() == 0, inner=True) as activity:
        for group in (elsewhere or here)(_groups(source)):
            if not whole.join(group):
                raise LostError("the template takes chats of one form otherwise, by what is in them")
            activity.done = whole.count
            activity.say("" if total is not None else counted(whole.count, "record"))
    _check(source, texts, shape, whole)
    return whole


def _groups(source: Source) -> Groups:
    records, first = source.records(), 0
    while group := list(islice(records, TOGETHER)):
        yield first, group
        first += len(group)


def _check(source: Source, texts: Texts, shape: Shape, whole: Gathered) -> None:
    whole.faults.raise_any("cannot be used", whole.count)
    texts.columns.unseen &= whole.unseen
    texts.columns.check_seen()
    if whole.count == 0:
        raise InputError(f"{source} holds no records")
    if shape.too_long == "refuse":
        whole.long.raise_any(
            f"are longer than length: {shape.length}", whole.count, "; too_long: truncate cuts such, drop leaves them out"
        )


def _unread(unused: Unused) -> list[str]:
    return [f"nothing reads the keys (each in so many records) {unused}"] if unused.counts else []


def _notes(source: Source, texts: Texts, shape: Shape, whole: Gathered) -> list[str]:
    """What a user should know of the samples."""
    parts, notes, long, of = list[str](), list[str](), whole.long, counted(whole.count, "record")
    if long.count:
        done = "were cut" if shape.too_long == "truncate" else "were left out"
        parts.append(f"{long.count} are longer than {shape.length} tokens and {done} (the first: {long.first[0]})")
    if whole.left_out:
        parts.append(f"{whole.left_out} have no token to learn{' within these' if long.count else ''} and were left out")
    if parts:
        notes.append(f"note: of {of} of {source}, {'; '.join(parts)}")
    if whole.apart:
        notes.append(
            f"note: {len(set(whole.apart))} of {of} of {source} are {len(whole.apart)} samples, one for each answer, since the "
            "template writes earlier answers, or what is before them, otherwise when more follows: "
            f"{whole.apart_tokens:,} tokens more than one sample each; turns: last (--turns last) learns the last ones only"
        )
    return notes + [f"note: of {source}, {line}" for line in (*texts.told(whole.told), *_unread(whole.unused))]
