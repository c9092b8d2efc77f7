"""Records that say which of two answers is the better one, or that one is bad: preferences, no examples to learn as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hetpipe.files.messages import shown
from hetpipe.language.formats.chats import MESSAGES
from hetpipe.language.formats.columns import MARKS, OF_PREFERENCES, OF_RECORDS, Columns
from hetpipe.language.records.record import UnusableError

PAIRED = re.compile(r"(.*_)?(chosen|rejected)(_(response|messages?|answer|completion|output))?")
QUESTIONS = ("prompt", "question", "instruction", "query")
JUDGED = ("label", "kto_tag")
ASKED = ("prompt", *MESSAGES, "question", "instruction")  # what a question stands under, or the turns before the answer


def refuse_preferences(record: Mapping[str, Any]) -> None:
    """UnusableError by the name of what they are."""
    paired = sorted(key for key in record if PAIRED.fullmatch(key))
    if paired:
        better = next((key for key in paired if "chosen" in key), None)
        own = _meant(record, record[better]) if better else ""
        advice = f". To learn only the better answers, as examples: columns: {{{own}: {better}}}"
        raise UnusableError(
            f"it has {shown(paired)}: these are preference data, from which data: {{name: preferences}} and loss: {{name: dpo}} "
            "(--method dpo) learn"
            f"{advice if better else ''}"
        )
    judged = next((key for key in JUDGED if str(record.get(key)).strip().lower() in ("true", "false")), None)
    if judged is not None:
        raise UnusableError(
            f"it has {judged}: {str(record[judged]).strip().lower()}: these are preference data (as for KTO), "
            "which cannot be trained on yet; to learn the good answers as examples, leave the bad ones and this "
            "key out"
        )
    if isinstance(record.get("completions"), list) and "labels" in record:
        raise UnusableError(
            "it has completions and labels. These are data for a reward model of single steps, and training on them is not "
            "possible yet; whole answers are scored by a reward model that learns from chosen and rejected (--method reward)"
        )


def sides_of(record: Mapping[str, Any], columns: Columns) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record with its better answer, and with its worse one, under our names: a chat, or a question with an answer.
    UnusableError if one is missing."""
    left = columns.of(record, (*OF_RECORDS, *MARKS, *OF_PREFERENCES))
    if empty := [key for key in OF_PREFERENCES if key in left and left[key] in (None, "", [])]:
        raise UnusableError(f"its {empty[0]} is empty ({shown(left[empty[0]])}), beside which there is nothing to compare")
    if missing := [key for key in OF_PREFERENCES if left.get(key) is None]:
        raise columns.missing(left, f"no key {missing[0]}, beside which the data has a better and a worse answer")
    better, worse = (left.pop(key) for key in OF_PREFERENCES)
    return _with(left, better), _with(left, worse)


def _with(left: Mapping[str, Any], answer: object) -> dict[str, Any]:
    """A record whose answer is this: an answer, or a whole chat that ends with it, which has its question in it."""
    if isinstance(answer, dict):
        answer = [answer]
    own = dict(left)
    asked = next((key for key in ASKED if own.get(key)), None)
    if isinstance(answer, list) and (asked is None or _holds(answer, own[asked])):
        for key in ASKED:
            own.pop(key, None)
        return {**own, "messages": answer}
    if asked in MESSAGES:
        own["prompt"] = own.pop(asked)
    return {**own, "completion": answer}


def _holds(answer: list[Any], asked: object) -> bool:
    """Whether turns begin with what was asked."""
    first, question = (turns[0] if turns else None for turns in (answer, asked if isinstance(asked, list) else [asked]))
    if not isinstance(first, dict):
        return False
    said = question.get("content", question.get("value")) if isinstance(question, dict) else question
    return isinstance(said, str) and str(first.get("content", first.get("value"))).strip() == said.strip()


def _meant(record: Mapping[str, Any], better: Any) -> str:
    """What the better answer is by our names: a whole chat, a text that holds its question, or an answer."""
    if isinstance(better, list) and len(better) > 1:
        return "messages"
    asked = any(key in record for key in QUESTIONS)
    return "completion" if asked or not isinstance(better, str) else "text"
