"""Chats: a text by the tokenizer's own template, of which the turns of the assistant are learned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hetpipe.building.language.records import UnusableError
from hetpipe.building.language.tokenizer import Marked, Tokenizer
from hetpipe.files.messages import InputError, cut, shown

GENERATION = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OTHER_NAMES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool"}
Turn = dict[str, Any]


class Chats:
    """Chats as texts. `turns`: all of the assistant's are learned, or the last of each chat."""

    def __init__(self, tokenizer: Tokenizer, turns: str) -> None:
        self.tokenizer, self.turns = tokenizer, turns
        try:
            self.template: str = tokenizer.its.get_chat_template()
        except ValueError as error:
            raise InputError(f"the tokenizer {tokenizer.name} has no template of chats: {cut(str(error), 150)}") from error
        self.says_itself = GENERATION.search(self.template) is not None

    def marked(self, record: Any) -> Marked:
        """UnusableError says why a record is no chat, or where the template's text of it cannot be told apart."""
        text, learned = self._learned(*turns_of(record))
        return Marked(text, tuple(learned[-1:] if self.turns == "last" else learned))

    def _learned(self, turns: Sequence[Turn], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        its = self.tokenizer.its
        template = its.get_chat_template(tools=tools)
        if self.says_itself and GENERATION.search(template) is not None:
            (text,), (parts,) = self._render([turns], tools, template, return_assistant_tokens_mask=True)
            learned = [(begin, end) for begin, end in parts if begin < end]
        else:
            text, learned = self._by_prefixes(turns, tools, template)
        for name in _tool_names(turns, tools):
            if name not in text:
                raise UnusableError(f"the template writes nothing of the tool {shown(name)}, which would not be learned; take a "
                                    "tokenizer whose template has tools, or leave them out")  # fmt: skip
        return text, learned

    def _by_prefixes(self, turns: Sequence[Turn], tools: Any, template: str) -> tuple[str, list[tuple[int, int]]]:
        """What the template writes behind the chat up to a turn of the assistant is that turn, if it goes on from there."""
        own = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        own = own[-1:] if self.turns == "last" else own
        (text, *until), _ = self._render([turns, *(turns[: i + 1] for i in own if i + 1 < len(turns))], tools, template)
        if len(until) < len(own):
            until.append(self._without_end_of_text(text, turns, tools, template))
        before, _ = self._render([turns[:i] for i in own], tools, template, add_generation_prompt=True)
        learned = []
        for i, start, end in zip(own, before, until, strict=True):
            if not text.startswith(start):
                raise UnusableError(
                    f"turn {i + 1}: the template writes the chat before it otherwise when more follows, so that what the "
                    "assistant says cannot be told from the rest; give a template with {% generation %}"
                )
            learned.append((len(start), self._end(text, len(start), end, i)))
        return text, learned

    def _without_end_of_text(self, text: str, turns: Sequence[Turn], tools: Any, template: str) -> str:
        """The text of a chat without the end of a text that some templates put behind the end of the last turn: what is not there
        where another turn may follow."""
        shorter, special = text.rstrip(), self.tokenizer.special
        last = max((token for token in special if shorter.endswith(token)), key=len, default="")
        shorter = shorter.removesuffix(last)
        if not last or not shorter.rstrip().endswith(special):
            return text
        try:
            (followed,), _ = self._render([turns], tools, template, add_generation_prompt=True)
        except UnusableError:
            return text
        return shorter if followed.startswith(shorter) and not followed.startswith(text) else text

    def _end(self, text: str, begin: int, until: str, number: int) -> int:
        """Where a turn ends: behind the token that says so, if there is one, and before the white space that follows it. Some
        templates put the end of a text behind the last turn, which is none of the turn's."""
        special, cut_off = self.tokenizer.special, False
        while not text.startswith(until):
            last = max((token for token in special if until.endswith(token)), key=len, default="")
            if not last:
                raise UnusableError(
                    f"turn {number + 1}: the template writes it otherwise when more follows (some leave out earlier thinking), "
                    "so that its end cannot be told; give turns: last, or a template with {% generation %}"
                )
            until, cut_off = until.removesuffix(last), True
        bare = until.rstrip()
        if len(bare) >= begin and bare.endswith(special):
            return len(bare)
        following = max((token for token in special if text.startswith(token, len(until))), key=len, default="")
        return len(until) + (len(following) if cut_off else 0)

    def _render(self, chats: Sequence[Sequence[Turn]], tools: Any, template: str, **options: Any) -> tuple[list[str], list[Any]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        if not chats:
            return [], []
        try:
            found: Any = render_jinja_template(
                conversations=[list(chat) for chat in chats], tools=tools, chat_template=template,
                **{"add_generation_prompt": False, **options, **self.tokenizer.its.special_tokens_map},
            )  # fmt: skip
        except Exception as error:  # whatever a template says of a chat
            raise UnusableError(f"the template does not take it: {cut(' '.join(str(error).split()), 150)}") from error
        return found[0], found[1]


def turns_of(record: Any) -> tuple[list[Turn], list[Any] | None]:
    """The turns of a chat, each with role and content, and its tools. UnusableError says what is missing."""
    if not isinstance(record, dict):
        raise UnusableError(f"expected a mapping with the key messages, found a {type(record).__name__}")
    key = next((key for key in ("messages", "conversations") if key in record), None)
    if key is None:
        raise UnusableError(f"it has no key messages (nor conversations); its keys: {shown(sorted(record))}")
    turns = record[key]
    if not isinstance(turns, list) or not turns:
        raise UnusableError(f"{key} must be a list of turns, found {shown(turns)}")
    tools = record.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise UnusableError("tools is a text that is not JSON") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UnusableError(f"tools must be a list of mappings, found {shown(tools)}")
    return [_turn(turn, number) for number, turn in enumerate(turns, 1)], tools


def _turn(turn: Any, number: int) -> Turn:
    if not isinstance(turn, dict):
        raise UnusableError(f"turn {number} is no mapping with role and content, but {shown(turn)}")
    turn = {key: value for key, value in turn.items() if value is not None}
    for own, other in (("role", "from"), ("content", "value")):
        if own not in turn and other in turn:
            turn[own] = turn.pop(other)
    if "role" not in turn:
        raise UnusableError(f"turn {number} has no role; its keys: {shown(sorted(turn))}")
    role = turn["role"] if isinstance(turn["role"], str) else ""
    role = OTHER_NAMES.get(role, role)
    if role not in ROLES:
        raise UnusableError(f"turn {number} has the unknown role {shown(turn['role'])}; known: {', '.join(ROLES)}")
    content = turn.get("content", "" if turn.get("tool_calls") else None)
    plain = isinstance(content, str) or (
        isinstance(content, list)
        and all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content)
    )
    if not plain:
        raise UnusableError(f"turn {number} has no content that is text: {shown(content)}")
    if isinstance(content, list):  # many templates would write the list as Python does
        content = "".join(part["text"] for part in content)
    return {**turn, "role": role, "content": content}


def _tool_names(turns: Sequence[Turn], tools: Any) -> list[str]:
    """Of the functions that a chat has, or calls."""
    calls = [call for turn in turns for call in (turn.get("tool_calls") or ()) if isinstance(call, dict)]
    functions = [each.get("function", each) for each in [*(tools or ()), *calls]]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]
