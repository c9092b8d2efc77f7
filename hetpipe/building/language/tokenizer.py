"""A tokenizer of transformers, and texts of which a part is learned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hetpipe.building.language.records import HUB, TEXT_EXTRA
from hetpipe.files.messages import InputError, cut, shown

PARALLEL = "TOKENIZERS_PARALLELISM"


class Marked(NamedTuple):
    """A text, and the parts of it that are learned, as (begin, end) in characters, in order."""

    text: str
    learned: tuple[tuple[int, int], ...]


class Tokens(NamedTuple):
    """The tokens of a text, and from which to which they are learned."""

    numbers: list[int]
    learned: list[tuple[int, int]]


class Tokenizer:
    """A tokenizer by its folder, or its name on the hub.

    Attributes:
        pad: a token for places that no other sees.
        end: the token that ends a text; None where there is none.
    """

    def __init__(self, name: str) -> None:
        self.name, self.its = name, _load(name)
        self.end: int | None = self.its.eos_token_id
        self.pad = int(next((n for n in (self.its.pad_token_id, self.end) if n is not None), 0))
        added = self.its.added_tokens_decoder.values()
        self.special = tuple(sorted({token.content for token in added if token.special and token.content}))

    def required_end(self) -> int:
        """The token that ends a text. InputError where there is none."""
        if self.end is None:
            raise InputError(f"the tokenizer {self.name} names no token that ends a text (eos_token), which is to be learned")
        return self.end

    def chats(self, texts: Sequence[Marked]) -> list[Tokens]:
        """Of texts that hold all their special tokens, as templates write them."""
        with _threads():
            found = self.its([marked.text for marked in texts], add_special_tokens=False, verbose=False)
        return [Tokens(found["input_ids"][i], [(_at(found, i, begin, marked.text), _at(found, i, end, marked.text))
                                               for begin, end in marked.learned])
                for i, marked in enumerate(texts)]  # fmt: skip

    def pairs(self, texts: Sequence[Marked]) -> list[Tokens]:
        """Of texts whose last part is learned, and the end behind it; the tokenizer's own special tokens before them."""
        end = self.required_end()
        with _threads():
            found = self.its([marked.text for marked in texts], verbose=False)
        every = []
        for i, marked in enumerate(texts):
            numbers = found["input_ids"][i]
            numbers = numbers if numbers[-1:] == [end] else [*numbers, end]
            begin = min(_at(found, i, marked.learned[0][0], marked.text), len(numbers) - 1)
            every.append(Tokens(numbers, [(begin, len(numbers))]))
        return every

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Without any special token."""
        with _threads():
            found: list[list[int]] = self.its(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found


def _at(found: Any, row: int, character: int, text: str) -> int:
    """The first token that holds this character, or one behind it: of letters that are several tokens, too. (White space may be
    in none.)"""
    for place in range(character, len(text)):
        token = found.char_to_token(row, place)
        if token is not None:
            return int(token)
    return len(found["input_ids"][row])


@contextmanager
def _threads() -> Iterator[None]:
    """Tokenizers use all processors in here, unless their own variable says otherwise; and none in processes that are forked
    later, for which the library warns otherwise."""
    if _CHOSEN:
        yield
        return
    os.environ[PARALLEL] = "true"
    try:
        yield
    finally:
        os.environ[PARALLEL] = "false"


_CHOSEN = PARALLEL in os.environ


def _load(name: str) -> Any:
    if not isinstance(name, str) or not name:
        raise InputError(f"tokenizer must be a folder of save_pretrained, or a name on the hub, found {shown(name)}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError(f"a tokenizer needs transformers: {TEXT_EXTRA}") from None
    path = Path(os.path.expanduser(name))
    if not os.path.isdir(path) and (os.path.exists(path) or not HUB.fullmatch(name)):
        raise InputError(f"there is no folder {cut(name, 200)!r} with a tokenizer (from {Path.cwd()})")
    try:
        found = AutoTokenizer.from_pretrained(str(path) if os.path.isdir(path) else name, trust_remote_code=False)
    except Exception as error:  # whatever transformers and the hub say
        text = cut(" ".join(str(error).split()))
        raise InputError(f"cannot load the tokenizer {cut(name, 200)!r}: {type(error).__name__}: {text}") from error
    if not getattr(found, "is_fast", False):
        raise InputError(f"the tokenizer {name!r} ({type(found).__name__}) is not one of the library tokenizers, which alone say "
                         "which characters a token is of: save it as one, with tokenizer.json")  # fmt: skip
    return found
