"""Records of a question and its answer: a prompt and its completion, which are a text as they are, and all others (Alpaca's
instruction, input and output, a question and its answer), which are an exchange of two, where there is a template of chats."""

from __future__ import annotations

from typing import Any, NamedTuple

from hetpipe.files.messages import shown
from hetpipe.language.formats.chats import SYSTEM, Chat, with_rest
from hetpipe.language.formats.columns import Columns
from hetpipe.language.formats.turns import Turn, from_json
from hetpipe.language.records.record import UnusableError

QUESTIONS = ("instruction", "prompt", "question", "query", "input")
INPUTS = ("input", "context", "query")
ANSWERS = ("output", "completion", "response", "answer")


class Pair(NamedTuple):
    """A text as it is, of which the completion is learned, if it is `learned`. `unused`: keys that nothing reads."""

    prompt: str
    completion: str
    learned: bool = True
    unused: tuple[str, ...] = ()


def is_pair(record: dict[str, Any]) -> bool:
    """Whether it has a question, or an answer."""
    return any(key in record for key in (*QUESTIONS, *ANSWERS))


def pair_of(left: dict[str, Any], columns: Columns, *, templated: bool | None) -> Chat | Pair:
    """An exchange of two, or a text as it is. `templated`: whether it becomes the former; None: unless the record is a prompt
    with its completion. UnusableError says what is missing."""
    question, answer = _first(left, QUESTIONS, columns, further=INPUTS), _first(left, ANSWERS, columns)
    literal = (question, answer) == ("prompt", "completion")
    said, wanted = _text(left, question), _text(left, answer)
    key = next((key for key in INPUTS if key in left), None)
    more = _text(left, key) if key is not None and not literal else ""
    earlier = _history(left.pop("history", None))
    if templated if templated is not None else not literal:
        asked = f"{said}\n\n{more}" if more and said else said or more
        told = [Turn(role, text) for both in earlier for role, text in zip(("user", "assistant"), both, strict=True)]
        return with_rest([*told, Turn("user", asked), Turn("assistant", wanted)], left)
    system = [] if literal else [str(left.pop(key)) for key in SYSTEM if left.get(key)]
    kept = {key: left.pop(key) for key in SYSTEM if key in left}  # of a text as it is: nothing reads it
    rest = with_rest([Turn("user", said), Turn("assistant", wanted)], left)
    if rest.tools:
        raise UnusableError(
            "it has tools, which only a template of chats can write. Take a tokenizer with a template, or template: FILE"
        )
    parts = [*system, *(text for both in earlier for text in both), said, more]
    prompt = said if literal and not earlier else "".join(f"{part}\n\n" for part in parts if part)
    return Pair(prompt, wanted, rest.turns[-1].learned, tuple(sorted((*rest.unused, *kept))))


def _first(left: dict[str, Any], keys: tuple[str, ...], columns: Columns, further: tuple[str, ...] = ()) -> str:
    """The key of a record's question, or answer: one that a job names (`further` ones only add to a question), one that has a
    value, or any."""
    asked = columns.asked(left, (key for key in keys if key not in further))
    every = *asked, *(key for key in keys if left.get(key) is not None), *(key for key in keys if key in left)
    found = next(iter(every), None)
    if found is None:
        what = "prompt (nor instruction, nor question)" if keys is QUESTIONS else "completion (nor output, nor answer)"
        raise columns.missing(left, f"no key {what}")
    return found


def _text(left: dict[str, Any], key: str) -> str:
    value = left.pop(key)
    if value is None and key in INPUTS:
        return ""
    if not isinstance(value, str):
        raise UnusableError(f"{key} must be a text, found {shown(value)}")
    return value


def _history(given: object) -> list[tuple[str, str]]:
    """Earlier questions with their answers, as Alpaca's `history` has them."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        given = from_json(given, "history")
    if given in (None, "", []):
        return []
    if not isinstance(given, list) or not all(
        isinstance(both, list) and len(both) == 2 and all(isinstance(text, str) for text in both) for both in given
    ):
        raise UnusableError(f"history must be a list of pairs of a question and its answer, found {shown(given)}")
    return [(both[0], both[1]) for both in given]
