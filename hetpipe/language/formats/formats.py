"""Any record, as a chat or as a pair of texts."""

from __future__ import annotations

from typing import Any, Literal

from hetpipe.language.formats.chats import MESSAGES, Chat, chat_of, pair_of_turns
from hetpipe.language.formats.columns import MARKS, OF_RECORDS, Columns
from hetpipe.language.formats.pairs import ANSWERS, QUESTIONS, Pair, is_pair, pair_of
from hetpipe.language.formats.preferences import refuse_preferences
from hetpipe.language.records.record import UnusableError

Kind = Literal["chat", "instructions", "text"]
ANSWERED = {"messages", "completion", "output", "answer", "response", "text"}  # columns that say which answers are meant
EXPECTED = "messages (or conversations), prompt and completion, instruction and output, question and answer"


def named(value: object, columns: Columns) -> dict[str, Any]:
    """A record under our names. UnusableError where it is no mapping, or holds preferences."""
    if not isinstance(value, dict):
        raise UnusableError(f"expected a mapping with the key messages, or prompt and completion, found a {type(value).__name__}")
    found = columns.of(value, (*OF_RECORDS, *MARKS, "label"))
    if not ANSWERED & {key for key, name in columns.given.items() if name}:
        refuse_preferences(found)
    return found


def kind_of_record(value: object, columns: Columns) -> Kind | None:
    """Tell which function of a job reads a record; None where its kind is not known."""
    left = named(value, columns)
    if _messages(left, columns) is not None or any(isinstance(left.get(key), list) for key in ("prompt", "completion")):
        return "chat"
    return "instructions" if is_pair(left) else "text" if isinstance(left.get("text"), str) else None


def _messages(left: dict[str, Any], columns: Columns) -> str | None:
    """Under which key its turns stand; None where a job says that they are not to be read, or names a question or an answer."""
    others = columns.asked(left, (*QUESTIONS, *ANSWERS)) and not columns.asked(left, MESSAGES)
    if others or columns.given.get("messages") == "":
        return None
    return next((key for key in MESSAGES if left.get(key) is not None), None)


def read_record(value: object, columns: Columns, *, templated: bool | None) -> Chat | Pair:
    """UnusableError says what is wrong with it. `templated`: see `pair_of`."""
    return read_named(named(value, columns), columns, templated=templated)


def read_named(left: dict[str, Any], columns: Columns, *, templated: bool | None) -> Chat | Pair:
    """A record under our names, likewise."""
    key = _messages(left, columns)
    if key is not None:
        return chat_of(left, key, columns)
    if any(isinstance(left.get(key), list) for key in ("prompt", "completion")):
        return pair_of_turns(left, columns)
    if is_pair(left):
        return pair_of(left, columns, templated=templated)
    if "text" in left:
        raise UnusableError("it has a text, and nothing says which part of it to learn. Take data: {name: text}")
    raise columns.missing(left, f"none of the keys {EXPECTED}")
