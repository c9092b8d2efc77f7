"""A prompt and its completion, which is learned."""

from __future__ import annotations

from typing import Any

from hetpipe.building.language.records import UnusableError
from hetpipe.building.language.tokenizer import Marked
from hetpipe.files.messages import shown


def pair(record: Any) -> Marked:
    """The text of a record with prompt and completion, or with instruction, input (or none) and output, a blank line behind each
    of the first two. UnusableError says what is missing."""
    if not isinstance(record, dict):
        raise UnusableError(f"expected a mapping with the keys prompt and completion, found a {type(record).__name__}")
    if "prompt" in record or "completion" in record:
        prompt, completion = (_text(record, key) for key in ("prompt", "completion"))
    elif "instruction" in record or "output" in record:
        parts = [_text(record, "instruction"), _text(record, "input") if record.get("input") is not None else ""]
        prompt, completion = "".join(f"{part}\n\n" for part in parts if part), _text(record, "output")
    else:
        raise UnusableError(f"it has no prompt and completion (nor instruction and output); its keys: {shown(sorted(record))}")
    return Marked(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))


def _text(record: dict[str, Any], key: str) -> str:
    if key not in record:
        raise UnusableError(f"it has no key {key}; its keys: {shown(sorted(record))}")
    if not isinstance(record[key], str):
        raise UnusableError(f"{key} must be a text, found {shown(record[key])}")
    return str(record[key])
