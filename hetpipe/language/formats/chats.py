"""Records of turns: OpenAI's `messages`, ShareGPT's `conversations`, and a prompt and its completion that are lists of turns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from hetpipe.files.messages import shown
from hetpipe.language.formats.columns import Columns
from hetpipe.language.formats.turns import Turn, from_json, read_mark, read_tools, read_turns
from hetpipe.language.records.record import UnusableError

MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog")
SYSTEM = ("system", "system_prompt")
OF_ALL = ("loss_mask", "weight", "loss_weight")  # marks of a record
OPTIONS = "chat_template_kwargs"
OURS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "messages",
    "return_assistant_tokens_mask",
    "tokenize",
    "tools",
)


class Chat(NamedTuple):
    """Turns, the tools that there are, and options of the template; `unused`: keys of the record that nothing reads."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = {}
    unused: tuple[str, ...] = ()


def chat_of(left: dict[str, Any], key: str, columns: Columns) -> Chat:
    """Read a record whose turns stand under this key. UnusableError says what is wrong."""
    return with_rest(read_turns(left.pop(key), columns, key), left)


def pair_of_turns(left: dict[str, Any], columns: Columns) -> Chat:
    """Read a record whose prompt, or completion, is a list of turns; the answers of the completion are learned."""
    parts, every = list[list[Turn]](), dict(left)
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = left.pop(key, None)
        if isinstance(value, str) and not value.lstrip().startswith("[{"):
            value = [{"role": role, "content": value}]
        if value is None:
            raise columns.missing(every, f"no key {key}, beside turns")
        parts.append(read_turns(value, columns, key))
    prompt, completion = parts
    before = list(takewhile(lambda turn: not turn.is_answer, completion))
    if any((turn.role, turn.content) == (prompt[-1].role, prompt[-1].content) for turn in before):
        name = columns.given.get("completion", "completion")
        raise UnusableError(
            f"the turns of {name} hold the prompt again, {shown(prompt[-1].content)}, which would stand there "
            f"twice: take them as a whole chat, columns: {{messages: {name}}}"
        )
    return with_rest([_only_if(turn, learned=False) for turn in prompt] + completion, left)


def _only_if(turn: Turn, *, learned: bool) -> Turn:
    """Return the same turn, whose answer is learned only if it was before and `learned` is true."""
    return turn._replace(learned=turn.learned and learned) if turn.is_answer else turn


def with_rest(turns: list[Turn], left: dict[str, Any]) -> Chat:
    """These turns with what else a record says of them: `system`, `tools`, `chat_template_kwargs`, and marks of the whole."""
    system = next((left.pop(key) for key in SYSTEM if left.get(key) not in (None, "")), None)
    if system is not None:
        turns = _with_system(turns, system)
    tools, options = read_tools(left.pop("tools", None)), _options(left.pop(OPTIONS, None))
    turns = _marked(turns, left)
    unused = tuple(sorted(key.strip() for key, value in left.items() if value not in (None, "", [], {})))
    return Chat(tuple(turns), tuple(tools), options, unused)


def _with_system(turns: list[Turn], system: object) -> list[Turn]:
    if not isinstance(system, str):
        raise UnusableError(f"system must be a text, found {shown(system)}")
    own = turns[0].content if turns[0].role == "system" else None
    if own is not None and own.strip() != system.strip():
        raise UnusableError(
            f"it has system: {shown(system)}, and its first turn is of the system, too: {shown(own)}. Leave one of the two out"
        )
    return turns if own is not None else [Turn("system", system), *turns]


def _options(given: object) -> Mapping[str, Any]:
    found = from_json(given, OPTIONS) if isinstance(given, str) else given or {}
    if not isinstance(found, dict):
        raise UnusableError(f"{OPTIONS} must be a mapping, found {shown(given)}")
    if own := next((key for key in OURS if key in found), None):
        raise UnusableError(f"{OPTIONS} has {own!r}, which a record cannot set. Leave it out")
    return found


def _marked(turns: list[Turn], left: dict[str, Any]) -> list[Turn]:
    """Apply the marks of a record to its turns: one mark to all answers, a list of marks to each turn."""
    key = next((key for key in OF_ALL if left.get(key) is not None), None)
    if key is None:
        return turns
    marks = left.pop(key)
    if isinstance(marks, str) and marks.lstrip().startswith("["):
        marks = from_json(marks, key)
    if not isinstance(marks, list):
        learned = read_mark({key: marks}, "the record")
        return [_only_if(turn, learned=learned is not False) for turn in turns]
    if len(marks) != len(turns):
        raise UnusableError(
            f"{key} has {len(marks)} marks, but there are {len(turns)} turns. Give one mark for each turn, or one for all"
        )
    found = []
    for number, (turn, mark) in enumerate(zip(turns, marks, strict=True), 1):
        learned = read_mark({key: mark}, f"turn {number}")
        if learned and not turn.is_answer:
            raise UnusableError(
                f"{key} marks turn {number} as learned, but its role is {turn.role}, and only answers are learned"
            )
        found.append(_only_if(turn, learned=bool(learned)))
    return found
