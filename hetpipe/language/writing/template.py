"""A template of chats, in Jinja, and what it is given beside their turns."""

from __future__ import annotations

import hashlib
import os
import re
import string
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hetpipe.files.messages import InputError, cut, nearest, one_line, reason, shown
from hetpipe.language.records.record import UnusableError
from hetpipe.language.tokenizer import Tokenizer

Thinking = Literal["on", "off"]
NONE, FILE = "none", "chat_template.jinja"
SWITCHES = ("enable_thinking", "thinking")  # by which templates are told whether an answer begins with a thought
GENERATION = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
DATE = date(2024, 7, 26)  # what Llama's templates write where they know none
NOW = "strftime_now"  # by which templates ask for the date of today, in a form such as "%d %b %Y"
_DATES = {f"{plain}{sign}": DATE.strftime(f"%{plain}{sign}") for plain in ("", "-") for sign in string.ascii_letters}
_FIXED = (
    "{%- macro strftime_now(format) -%}{{ format.split('%')[0] }}{%- for part in format.split('%')[1:] -%}"
    "{%- set end = 2 if part[:1] == '-' else 1 -%}{{ hetpipe_dates[part[:end]] }}{{ part[end:] }}"
    "{%- endfor -%}{%- endmacro %}\n"
)


class Template:
    """The template of a tokenizer, or of a file. Where it writes the date of today, it is given `DATE`, so that a run which is
    resumed on another day reads the same samples.

    Attributes:
        digest: of its text; where the tokenizer has several by name, of all.
    """

    def __init__(self, tokenizer: Tokenizer, own: str | None = None) -> None:
        self.tokenizer, self.own = tokenizer, own
        try:
            self.text(())
        except ValueError as error:
            raise InputError(
                f"the tokenizer {tokenizer.name} has no template of chats. Name a file with one (template: FILE, or "
                f"--template FILE). The tokenizer says: {cut(str(error), 150)}"
            ) from error
        every = own if own is not None else tokenizer.its.chat_template
        self.digest = self.digest_of(every if isinstance(every, str) else repr(every))

    @staticmethod
    def digest_of(text: str) -> str:
        """Return the digest of a template."""
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """For a chat with these tools: some tokenizers have one of its own for such."""
        if self.own is not None:
            return self.own
        found: str = self.tokenizer.its.get_chat_template(tools=list(tools) or None)
        return found

    def names(self, tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
        """What it asks to be given."""
        return _names(self.text(tools))

    def render(
        self,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        prompt: bool = False,
    ) -> list[str]:
        """What it writes of each chat; with `prompt` also the beginning of the next answer. UnusableError says what it does not
        take."""
        found: list[str] = self._rendered(chats, tools, options, add_generation_prompt=prompt)[0]
        return found

    def parts(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """What it writes of a chat, and the parts of that which it says are generated, as (begin, end) in characters."""
        (text,), (parts,) = self._rendered([chat], tools, options, return_assistant_tokens_mask=True)
        found = list[tuple[int, int]]()
        for begin, end in parts:
            if found and found[-1][1] == begin:
                found[-1] = found[-1][0], end  # which goes on
            elif begin < end:
                found.append((begin, end))
        return text, found

    def _rendered(self, chats: Sequence[Any], tools: Sequence[Any], options: Mapping[str, Any], **flags: bool) -> tuple[Any, Any]:
        from transformers.utils.chat_template_utils import render_jinja_template

        text, dates = _dated(self.text(tools))
        try:
            found: Any = render_jinja_template(
                conversations=[list(chat) for chat in chats],
                tools=list(tools) or None,
                chat_template=text,
                **{"add_generation_prompt": False, **flags, **self.tokenizer.its.special_tokens_map, **dates, **options},
            )
        except Exception as error:  # whatever a template says of a chat
            raise UnusableError(f"the template does not take it: {cut(one_line(error), 150)}") from error
        return found[0], found[1]

    @property
    def writes_a_date(self) -> bool:
        """Whether it asks for the date of today."""
        return NOW in self.text(())


@lru_cache(maxsize=16)
def _dated(text: str) -> tuple[str, dict[str, dict[str, str]]]:
    """A template that writes `DATE` in the place of the date of today, and what it is given for that."""
    return (f"{_FIXED}{text}", {"hetpipe_dates": _DATES}) if NOW in text else (text, {})


@lru_cache(maxsize=16)
def _names(text: str) -> frozenset[str]:
    from jinja2 import Environment, TemplateError, meta

    plain = re.sub(r"\{%-?\+?\s*(end)?generation\s*[-+]?%\}", "", text)
    try:
        return frozenset(meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)))
    except TemplateError:  # which is told when something is rendered
        return frozenset()


def read_template(name: object) -> str | None:
    """The text of a template in a file, or in a folder's chat_template.jinja; None for no name. InputError where it has none."""
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise InputError(f"template must be a file with a template of chats (Jinja), or none, found {shown(name)}")
    path = Path(os.path.expanduser(name))
    path = path / FILE if os.path.isdir(path) else path
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        hint = nearest(name, [NONE]) if len(name) < 8 and not path.suffix else ""
        raise InputError(f"cannot read the template {cut(str(path), 200)} (from {Path.cwd()}): {reason(error)}{hint}") from error
    if "messages" not in text:
        raise InputError(f"{path} is no template of chats, because it never reads 'messages'")
    return text
