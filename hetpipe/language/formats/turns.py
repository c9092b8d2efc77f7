"""One turn of a chat: who says what, and whether it is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from hetpipe.files.messages import shown
from hetpipe.files.parsing import ParseError, parse_json
from hetpipe.language.formats.columns import MARKS, OF_TURNS, ROLES, Columns
from hetpipe.language.records.record import UnusableError

OTHER_NAMES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
CALLS = ("function_call", "tool_call")  # roles of turns whose text is a call of a tool, in JSON
OTHER_KEYS = {"role": "from", "content": "value"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
IN_COLUMNS = {"0": 0, "1": 1, "false": False, "true": True}  # marks in a file of columns, which are texts
REFUSED = {"train_detail": "it marks parts of a turn, which is learned as a whole or not at all: leave it out, or mark turns"}


class Turn(NamedTuple):
    """`thought`: what was thought before the content; `calls`: of tools, as {type, function: {name, arguments}}, arguments a
    mapping; `learned`: whether an answer is; `others`: further keys, which a template may read."""

    role: str
    content: str | None
    thought: str | None = None
    calls: tuple[Mapping[str, Any], ...] = ()
    learned: bool = True
    others: Mapping[str, Any] = {}

    @property
    def is_answer(self) -> bool:
        """Whether the assistant says it."""
        return self.role == "assistant"

    @property
    def says_nothing(self) -> bool:
        """Whether it has neither content nor calls."""
        return not (self.content or "").strip() and not self.calls


def read_turns(turns: object, columns: Columns, key: str) -> list[Turn]:
    """The turns that stand under this key of a record. UnusableError says what is wrong."""
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = from_json(turns, key)
    if not isinstance(turns, list) or not turns:
        raise UnusableError(f"{key} must be a list of turns, found {shown(turns)}")
    return [_turn(turn, number, columns) for number, turn in enumerate(turns, 1)]


def _turn(turn: object, number: int, columns: Columns) -> Turn:
    if not isinstance(turn, dict):
        raise UnusableError(f"turn {number} is no mapping with role and content, but {shown(turn)}")
    left = {key: value for key, value in columns.of(turn, (*OF_TURNS, *MARKS)).items() if value is not None}
    for own, other in OTHER_KEYS.items():
        if own not in left and other in left and own not in columns.given:
            left[own] = left.pop(other)
    if refused := next((key for key in REFUSED if left.get(key)), None):
        raise UnusableError(f"turn {number} has {refused}: {REFUSED[refused]}")
    role, said = _role(left, number, columns, turn)
    thought, calls = _thought(left, number), _calls(left, number)
    if said in CALLS:
        calls, left["content"] = _said_calls(left.get("content"), number), None
    if not calls and not {columns.given.get("content") or "content", OTHER_KEYS["content"]} & turn.keys():
        raise columns.missing(turn, f"turn {number} without a content")
    content = _content(left.pop("content", None), number, needed=not calls)
    learned = read_mark(left, f"turn {number}")
    if learned and role != "assistant":
        raise UnusableError(
            f"turn {number} is marked to be learned, but its role is {role}, and only answers of the assistant are learned"
        )
    return Turn(role, content, thought, calls, learned is not False, left)


def _thought(left: dict[str, Any], number: int) -> str | None:
    """What was thought before the content, which some data have under several keys."""
    found = {key: left.pop(key) for key in THOUGHTS if isinstance(left.get(key), str)}
    said = {key: text for key, text in found.items() if text}
    if len({text.strip() for text in said.values()}) > 1:
        raise UnusableError(f"turn {number} has several thoughts, {shown(said)}. Leave one of them")
    return next(iter(said.values()), None)


def _role(left: dict[str, Any], number: int, columns: Columns, turn: Mapping[str, Any]) -> tuple[str, str]:
    """Our name of its role, and the one that it has there."""
    if "role" not in left:
        raise columns.missing(turn, f"turn {number} without a role")
    named = left.pop("role")
    said = columns.role(named) if isinstance(named, str) else ""
    said = said if said in ROLES else said.strip().lower()
    role = OTHER_NAMES.get(said, said)
    if role not in ROLES:
        raise UnusableError(
            f"turn {number} has the unknown role {shown(named)}; known: {', '.join(ROLES)}, and human, gpt, "
            "observation, function_call; columns gives roles other names, as in {user: customer}"
        )
    return role, said


def _content(content: object, number: int, *, needed: bool) -> str | None:
    """A text, or the texts of its parts, since many templates would write a list as Python does."""
    if content is None and not needed:
        return None
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UnusableError(f"turn {number} has no content that is text: {shown(content)}")
    return content


def read_mark(left: dict[str, Any], what: str) -> bool | None:
    """Whether what has these keys is marked as learned, or as not; None without a mark. UnusableError where it is a part of it,
    or where two marks differ. (OpenAI's weight, axolotl's train and training, verl's trainable, ms-swift's loss.)"""
    marks = {key: left.pop(key) for key in MARKS if key in left}
    for key, given in marks.items():
        mark = marks[key] = IN_COLUMNS.get(given.strip().lower(), given) if isinstance(given, str) else given
        if mark not in (0, 1) or isinstance(mark, str):
            raise UnusableError(f"{what} has {key}: {shown(mark)}; a turn is learned (1, true) or not (0, false)")
    if len({bool(mark) for mark in marks.values()}) > 1:
        raise UnusableError(f"{what} has marks that contradict each other on whether it is learned: {shown(marks)}")
    return next((bool(mark) for mark in marks.values()), None)


def _calls(left: dict[str, Any], number: int) -> tuple[Mapping[str, Any], ...]:
    """The calls of tools, from `tool_calls`, or from the `function_call` of old."""
    own = left.pop("tool_calls", None)
    if isinstance(own, str):
        own = from_json(own, f"tool_calls of turn {number}")
    if own is None and (old := left.pop("function_call", None)):
        own = [from_json(old, f"function_call of turn {number}") if isinstance(old, str) else old]
    if own is not None and not isinstance(own, list):
        raise UnusableError(f"tool_calls of turn {number} must be a list of mappings, found {shown(own)}")
    return tuple(_call(call, number) for call in own or ())


def _said_calls(content: object, number: int) -> tuple[Mapping[str, Any], ...]:
    """Read the calls of a turn whose text is a call in JSON, or several."""
    found = from_json(content, f"the call of turn {number}") if isinstance(content, str) else content
    return tuple(_call(call, number) for call in (found if isinstance(found, list) else [found]))


def _call(call: object, number: int) -> Mapping[str, Any]:
    whole = {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else {}
    function = whole.get("function", {key: value for key, value in whole.items() if key in ("name", "arguments", "parameters")})
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableError(f"turn {number} has a call of a tool without a name: {shown(call)}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        what = f"the arguments of {shown(function['name'])} in turn {number}"
        arguments = from_json(arguments, what) if arguments.strip() else {}
    rest = {key: value for key, value in whole.items() if key not in ("function", "name", "arguments", "parameters")}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def read_tools(tools: object) -> list[dict[str, Any]]:
    """The tools of a record; none where there are none."""
    found = from_json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools or []
    if not (isinstance(found, list) and all(isinstance(tool, dict) for tool in found)):
        raise UnusableError(f"tools must be a list of mappings, found {shown(tools)}")
    return found


def function_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the functions of tools, or of calls."""
    functions = [tool.get("function", tool) for tool in tools]
    return [own["name"] for own in functions if isinstance(own, Mapping) and isinstance(own.get("name"), str)]


def from_json(text: object, what: str) -> Any:
    """The value of a text. UnusableError where it has none."""
    try:
        return parse_json(str(text), inf)
    except ParseError as error:
        raise UnusableError(f"{what} is a text that is {error}: {shown(text)}") from None
