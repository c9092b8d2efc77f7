"""What is learned of a chat: samples whose texts are written by hand, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.language.writing.template import DATE
from tests.support.templates.conversations import ONE, SYSTEM, THREE, WITH_SYSTEM

Sample = list[tuple[str, bool]]  # texts in order, each with whether it is learned
TODAY = "<today>"  # stands for the date that some templates write: always the same one


@dataclass(frozen=True)
class Row:
    """A chat as one sample: texts that are given and learned in turn, the first and the last of them given (or empty)."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Apart:
    """A chat as a sample for each answer, since the template writes an answer differently when more follows."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Refusal:
    """An error whose message holds all of these."""

    words: tuple[str, ...]


Expected = Row | Apart | Refusal
NO_TOOLS = Refusal(("template", "tool"))
NO_THOUGHT = Refusal(("template", "thinking"))
NOT_IN_ONE_ROW = Refusal(("turns: auto", "last"))


def row(*texts: str) -> Row:
    assert len(texts) % 2, "the last text is a given one, or empty"
    return Row(texts)


def samples(expected: Expected, turns: str) -> list[Sample] | Refusal:
    """With turns: auto, all or last."""
    if isinstance(expected, Refusal):
        return expected
    if isinstance(expected, Row):
        return [_sample(expected, only_last=turns == "last")]
    if turns == "all":
        return NOT_IN_ONE_ROW
    return [_sample(each, only_last=False) for each in (expected.rows if turns == "auto" else expected.rows[-1:])]


def _sample(of: Row, only_last: bool) -> Sample:
    last = len(of.texts) - 2
    texts = [text.replace(TODAY, DATE.isoformat()) for text in of.texts]
    return [(text, i % 2 == 1 and (i == last or not only_last)) for i, text in enumerate(texts) if text]


def written_alike(
    *,
    ask: str,
    answer: str,
    system: str | Refusal,
    begin: str = "",
    after: str = "",
    last: str = "",
    end: str | None = None,
    trims: bool = False,
) -> dict[str, Expected]:
    """The chats one, three and system, of a template that writes each answer the same whatever follows.

    Args:
        ask: a question, up to where the model goes on; {} is its text.
        answer: what is learned; {} is its text.
        system: all before an answer, with {system} and {question}.
        begin: of a chat without a system message.
        after: behind an answer that another question follows.
        last: as `answer`, of the last of a chat, where that is another.
        end: as `after`, of the last, where that is another.
        trims: white space around an answer is taken away.
    """
    last, end = last or answer, after if end is None else end
    texts = [begin]
    for question, said in THREE:
        final = (question, said) == THREE[-1]
        texts[-1] += ask.format(question)
        said = said.strip() if trims else said
        texts += [last.format(said), end] if final else [answer.format(said), after]
    return {
        "one": row(begin + ask.format(ONE[0]), last.format(ONE[1]), end),
        "three": row(*texts),
        "system": _after_system(system, last, end),
    }


def written_apart(
    *, ask: str, answer: str, system: str, before: str, begin: str = "", after: str = "", trims: bool = False
) -> dict[str, Expected]:
    """As `written_alike`, of a template that writes an answer in another way when more follows: as `before` has it, with
    {question} and {answer}."""
    rows, said_before = [], begin
    for question, said in THREE:
        said = said.strip() if trims else said
        rows.append(row(said_before + ask.format(question), answer.format(said), after))
        said_before += before.format(question=question, answer=said)
    return {
        "one": row(begin + ask.format(ONE[0]), answer.format(ONE[1]), after),
        "three": Apart(tuple(rows)),
        "system": _after_system(system, answer, after),
    }


def _after_system(system: str | Refusal, answer: str, after: str) -> Expected:
    if isinstance(system, Refusal):
        return system
    return row(system.format(system=SYSTEM, question=WITH_SYSTEM[0]), answer.format(WITH_SYSTEM[1]), after)
