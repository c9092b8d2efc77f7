"""How a template is handed the turns of a chat, so that it writes all of them: some take arguments of tools as a text, some
contents as lists of parts, and what does not suit them they leave out without a word. Which way does is found on a chat of the
same build whose texts are words that stand nowhere else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from hetpipe.files.messages import shown
from hetpipe.language.formats.turns import Turn, function_names
from hetpipe.language.records.record import UnusableError
from hetpipe.language.writing.template import Template

Tools = Sequence[Mapping[str, Any]]
ADVICE = "take a template that does (template: FILE, or --template FILE)"
ID_LENGTH = 9  # of a call, for templates that want it short


class Form(NamedTuple):
    """`parts`: contents are lists of parts; `text`: arguments of calls are JSON; `none`: a turn that only calls has no content,
    and not an empty one; `system`: a developer's turn is the system's; `ids`: of calls are short."""

    parts: bool = False
    text: bool = False
    none: bool = False
    system: bool = False
    ids: bool = False

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> list[Form]:
        """Return the forms that may make a difference, the plain one first."""
        calls, developer = any(turn.calls for turn in turns), any(turn.role == "developer" for turn in turns)
        open_ = (True, calls, calls, developer, calls)
        found = product(*((False, True) if each else (False,) for each in open_))
        return [cls(*each) for each in sorted(found, key=lambda each: (sum(each), each[::-1]))]

    def hand(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """The turns, for a template."""
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: Turn) -> dict[str, Any]:
        found = dict(turn.others)
        if self.ids and isinstance(found.get("tool_call_id"), str):
            found["tool_call_id"] = _short(found["tool_call_id"])
        found["role"] = "system" if self.system and turn.role == "developer" else turn.role
        content: Any = "" if turn.content is None and not self.none else turn.content
        if self.parts:
            content = [{"type": "text", "text": content}] if content else []
        found["content"] = content
        if turn.thought is not None:
            found["reasoning_content"] = turn.thought
        if turn.calls:
            found["tool_calls"] = [self._call(call) for call in turn.calls]
        return found

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        found, function = dict(call), dict(call["function"])
        if self.text:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if self.ids:
            found["id"] = _short(str(found.get("id", "")))
        return {**found, "function": function}


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:ID_LENGTH]


class Fit(NamedTuple):
    """How turns are handed, and which of their further keys the template does not read."""

    form: Form
    unused: tuple[str, ...]


class Forms:
    """What suits a template. `known`: what was found for the first chat of each build, or why none suits."""

    def __init__(self, template: Template) -> None:
        self.template, self.known = template, dict[Any, Fit | str]()

    def fit(self, turns: Sequence[Turn], tools: Tools, options: Mapping[str, Any]) -> Fit:
        """UnusableError says what the template does not write of a chat up to an answer: a content, a call, a tool, or what was
        thought before this answer. (What was thought before earlier ones it may leave out.)"""
        build = _build(turns, tools, options)
        if build not in self.known:
            try:
                self.known[build] = self._found(turns, tools, options)
            except UnusableError as error:
                self.known[build] = str(error)
        found = self.known[build]
        if isinstance(found, str):
            raise UnusableError(found)
        return found

    def _found(self, turns: Sequence[Turn], tools: Tools, options: Mapping[str, Any]) -> Fit:
        words = _Words()
        own, their = words.turns(turns), words.tools(tools)
        missing, refused = list[list[str]](), list[UnusableError]()
        for form in Form.of(turns):
            try:
                (text,) = self.template.render([form.hand(own)], their, options)
            except UnusableError as error:
                refused.append(error)
                continue
            lacks = words.missing(text)
            if not lacks:
                return Fit(form, self._unused(form, own, their, options, text))
            missing.append(lacks)
        if not missing:
            raise refused[0]
        least = min(missing, key=len)[0]
        raise UnusableError(f"{least}; {_advice(least)}")

    def _unused(self, form: Form, turns: Sequence[Turn], tools: Tools, options: Mapping[str, Any], text: str) -> tuple[str, ...]:
        """Further keys without which the template writes the same."""
        found = list[str]()
        for key in sorted({key for turn in turns for key in turn.others}):
            without = [turn._replace(others={k: v for k, v in turn.others.items() if k != key}) for turn in turns]
            try:
                same = self.template.render([form.hand(without)], tools, options) == [text]
            except UnusableError:
                same = False
            if same:
                found.append(key.strip())
        return tuple(found)


def _advice(missing: str) -> str:
    if "thought" in missing:
        return f"leave thoughts out (thinking: off, or --thinking off), or {ADVICE}"
    return f"{ADVICE}, or leave it out"


def _build(turns: Sequence[Turn], tools: Tools, options: Mapping[str, Any]) -> Any:
    """Describe all of a chat but its texts."""
    shapes = tuple(_shape(turn, last=turn is turns[-1]) for turn in turns)
    return shapes, tuple(function_names(tools)), repr(sorted(options.items()))


def _shape(turn: Turn, *, last: bool) -> Any:
    said = turn.content if turn.content is None else bool(turn.content.strip())
    return turn.role, said, last and turn.thought is not None, tuple(map(_kinds, turn.calls)), tuple(sorted(turn.others))


def _kinds(value: Any) -> Any:
    """Describe the kinds of values that a value is made of."""
    if isinstance(value, Mapping):
        return "mapping", frozenset(map(_kinds, value.values()))
    if isinstance(value, list | tuple):
        return "list", frozenset(map(_kinds, value))
    return type(value).__name__


class _Words:
    """A word in the place of each text, which stands nowhere else."""

    def __init__(self) -> None:
        self.told = list[tuple[str, str]]()  # a word, and what it stands for
        self.python = list[str]()  # what Python would write of arguments
        self.count = 0

    def next(self, what: str) -> str:
        """Another one."""
        self.count += 1
        word = f"zq{self.count:04d}qz"
        self.told.append((word, what))
        return word

    def turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns of words; of their thoughts, the last one's counts."""
        return [self._turn(turn, number, last=number == len(turns)) for number, turn in enumerate(turns, 1)]

    def _turn(self, turn: Turn, number: int, *, last: bool) -> Turn:
        what = f"turn {number} ({turn.role})"
        content = self.next(f"the content of {what}") if turn.content and turn.content.strip() else turn.content
        thought = turn.thought
        if thought is not None and last:
            thought = self.next(f"the thought (reasoning_content) of {what}")
        return turn._replace(content=content, thought=thought, calls=tuple(self._call(call, what) for call in turn.calls))

    def _call(self, call: Mapping[str, Any], what: str) -> dict[str, Any]:
        function = call["function"]
        what = f"the call of the tool {shown(function['name'])} in {what}"
        name = self.next(what)
        arguments = self._replaced(function["arguments"], what)
        if isinstance(arguments, dict) and arguments:
            self.python.append(str(arguments)[:12])
        return {**call, "function": {"name": name, "arguments": arguments}}

    def _replaced(self, value: Any, what: str) -> Any:
        if isinstance(value, Mapping):
            return {self.next(what): self._replaced(inner, what) for inner in value.values()}
        if isinstance(value, list):
            return [self._replaced(inner, what) for inner in value]
        return self.next(what) if isinstance(value, str) and value else value

    def tools(self, tools: Tools) -> list[Mapping[str, Any]]:
        """The tools, under words as names."""
        found = list[Mapping[str, Any]]()
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                renamed = {**function, "name": self.next(f"the tool {shown(function['name'])}")}
                found.append({**tool, "function": renamed} if "function" in tool else renamed)
            else:
                found.append(tool)
        return found

    def missing(self, text: str) -> list[str]:
        """What the template does not write, or not as it is."""
        lost = [f"the template does not write {what}" for word, what in self.told if word not in text]
        if any(python in text for python in self.python):
            lost.append("the template writes the arguments of calls as Python does, and not as JSON")
        return list(dict.fromkeys(lost))
