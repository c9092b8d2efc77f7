"""Records that say which of two answers is the better one, or that one is bad: they are no examples to learn as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hetpipe.files.messages import shown
from hetpipe.language.records.record import UnusableError

PAIRED = re.compile(r"(.*_)?(chosen|rejected)(_(response|messages?|answer|completion|output))?")
QUESTIONS = ("prompt", "question", "instruction", "query")
JUDGED = ("label", "kto_tag")


def refuse_preferences(record: Mapping[str, Any]) -> None:
    """UnusableError by the name of what they are."""
    paired = sorted(key for key in record if PAIRED.fullmatch(key))
    if paired:
        better = next((key for key in paired if "chosen" in key), None)
        own = _meant(record, record[better]) if better else ""
        advice = f"; to learn the better answers as examples: columns: {{{own}: {better}}}"
        raise UnusableError(
            f"it has {shown(paired)}: these are preference data (as for DPO), which cannot be trained on yet"
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
            "it has completions and labels. These are data for a reward model, and training on them is not possible yet"
        )


def _meant(record: Mapping[str, Any], better: Any) -> str:
    """What the better answer is by our names: a whole chat, a text that holds its question, or an answer."""
    if isinstance(better, list) and len(better) > 1:
        return "messages"
    asked = any(key in record for key in QUESTIONS)
    return "completion" if asked or not isinstance(better, str) else "text"
