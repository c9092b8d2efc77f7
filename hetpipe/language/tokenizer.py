"""A tokenizer of transformers, and the tokens of texts of which a part is learned."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hetpipe.files.messages import InputError, cut, shown
from hetpipe.language.marked import Marked
from hetpipe.language.records.record import TEXT_EXTRA
from hetpipe.language.records.source import HUB

PARALLEL = "TOKENIZERS_PARALLELISM"


class Tokens(NamedTuple):
    """The tokens of a text, from which to which they are learned, and those that end what is learned."""

    numbers: list[int]
    learned: list[tuple[int, int]]
    ends: frozenset[int] = frozenset()


class Tokenizer:
    """A tokenizer by its folder, or its name on the hub.

    Attributes:
        pad: a token for places that no other sees.
        end: the token that ends a text; None where there is none.
        special: texts of the tokens that no text has; `added`: with those of other tokens that are never cut; `special_numbers`:
            the numbers of the former.
        digest: of its words, and of how it cuts and joins them; `exact`: of all of it, by which tokens are kept.
    """

    def __init__(self, name: str) -> None:
        self.name, self.its = name, _load(name)
        self.end: int | None = self.its.eos_token_id
        self.pad = int(next((n for n in (self.its.pad_token_id, self.end) if n is not None), 0))
        by_number = self.its.added_tokens_decoder
        self.special_numbers = frozenset(number for number, token in by_number.items() if token.special and token.content)
        every = [token for token in by_number.values() if token.content]
        self.special, self.added = (
            tuple(sorted({token.content for token in of})) for of in ([token for token in every if token.special], every)
        )
        self.digest, self.exact = _digest(self.its), _exact(self.its)
        _with_spaces(self.its.backend_tokenizer)

    def required_end(self) -> int:
        """The token that ends a text. InputError where there is none."""
        if self.end is None:
            raise InputError(
                f"the tokenizer {self.name} names no token that ends a text (eos_token), so the end of an answer cannot be "
                "learned"
            )
        return self.end

    @property
    def has_template(self) -> bool:
        """Whether it has a template of chats."""
        return bool(self.its.chat_template)

    @property
    def end_text(self) -> str | None:
        """The text of the token that ends a text; None where there is none."""
        return str(self.its.eos_token) if self.end is not None else None

    def tokens(self, texts: Sequence[Marked]) -> list[Tokens]:
        """Return the tokens of each text."""
        found = list[Tokens | None]([None] * len(texts))
        for whole, of in ((True, self._whole), (False, self._literal)):
            numbers = [i for i, marked in enumerate(texts) if marked.whole is whole]
            for i, tokens in zip(numbers, of([texts[i] for i in numbers]) if numbers else (), strict=True):
                found[i] = tokens
        return [tokens for tokens in found if tokens is not None]

    def _whole(self, texts: Sequence[Marked]) -> list[Tokens]:
        """Tokenize texts that hold all their special tokens, as templates write them."""
        with _threads():
            found = self.its([marked.text for marked in texts], add_special_tokens=False, verbose=False)
        every = []
        for i, marked in enumerate(texts):
            text = marked.text
            numbers = found["input_ids"][i]
            places = [(self._begin(found, i, begin, text), _behind(found, i, end, text)) for begin, end, _ in marked.learned]
            if any(_straddles(found, i, begin) for begin, _, _ in marked.learned):
                numbers, places = self._cut(marked) or (numbers, places)
            ends = {numbers[end - 1] for (_, end), span in zip(places, marked.learned, strict=True) if span.ended and end}
            every.append(Tokens(numbers, places, frozenset(ends)))
        return every

    def _begin(self, found: Any, row: int, character: int, text: str) -> int:
        """The first token of a part that begins here; not one that only takes the white space in which the part begins."""
        token = _at(found, row, character, text)
        if not _straddles(found, row, character):
            return token
        start, own = found.token_to_chars(row, token).start, self.its.convert_ids_to_tokens(found["input_ids"][row][token])
        return token + (text.startswith(own, start) and start + len(own) <= character)

    def _cut(self, marked: Marked) -> tuple[list[int], list[tuple[int, int]]] | None:
        """The tokens of a text in which each part that is learned begins with a token, as behind a prompt at inference. None
        where the tokenizer writes such parts otherwise."""
        cuts = [0, *(begin for begin, _, _ in marked.learned), len(marked.text)]
        parts = [marked.text[begin:end] for begin, end in pairwise(cuts)]
        with _threads():
            found = self.its(parts, add_special_tokens=False, verbose=False)
        numbers, places = list[int](found["input_ids"][0]), list[tuple[int, int]]()
        for i, (begin, end, _) in enumerate(marked.learned, 1):
            at = len(numbers)
            places.append((at, at + _behind(found, i, end - begin, parts[i])))
            numbers += found["input_ids"][i]
        whole, *apart = (self.its.decode(own, clean_up_tokenization_spaces=False) for own in (numbers, *found["input_ids"]))
        return (numbers, places) if whole == "".join(apart) else None  # none with a space put before it

    def _literal(self, texts: Sequence[Marked]) -> list[Tokens]:
        """Tokenize texts whose last part is learned, with the end behind it and the tokenizer's own special tokens before
        them."""
        end = self.required_end()
        with _threads():
            found = self.its([marked.text for marked in texts], verbose=False)
        every = []
        for i, marked in enumerate(texts):
            numbers, begin = found["input_ids"][i], _at(found, i, marked.learned[0].begin, marked.text)
            if _straddles(found, i, marked.learned[0].begin) and (cut := self._cut(marked)) is not None:
                first = _at(found, i, 0, marked.text)  # behind the tokenizer's own
                numbers, begin = numbers[:first] + cut[0], first + cut[1][0][0]
            numbers = numbers if numbers[-1:] == [end] else [*numbers, end]
            begin = min(begin, len(numbers) - 1)
            every.append(Tokens(numbers, [(begin, len(numbers))], frozenset({end})))
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


def _behind(found: Any, row: int, character: int, text: str) -> int:
    """The first token behind all that hold a character before this one. (Some tokens take the white space behind them, too.)"""
    token = _at(found, row, character, text)
    return token + (token < len(found["input_ids"][row]) and found.token_to_chars(row, token).start < character)


def _straddles(found: Any, row: int, character: int) -> bool:
    """Whether a token holds this character and the one before it."""
    token = found.char_to_token(row, character)
    return token is not None and found.token_to_chars(row, token).start < character


def _with_spaces(backend: Any) -> None:
    """Its tokens are said to be of the white space in them, too, which some tokenizers leave out of what they say."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    state = json.loads(Backend(models.BPE()).to_str())
    state["post_processor"] = json.loads(backend.to_str())["post_processor"]
    parts = [state["post_processor"] or {}]
    for part in parts:  # one may hold others
        parts += part.get("processors", ())
        if "trim_offsets" in part:
            part["trim_offsets"] = False
    if any("trim_offsets" in part for part in parts):
        backend.post_processor = Backend.from_str(json.dumps(state)).post_processor


def _digest(its: Any) -> str:
    """Return a digest of what makes tokens of texts: words, rules, special tokens."""
    backend = json.loads(its.backend_tokenizer.to_str())
    model = backend.pop("model")
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model.pop("merges", None) or ()]
    kept = {key: backend.get(key) for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
    said = [model, merges, sorted(its.get_vocab().items()), kept, sorted(its.special_tokens_map.items())]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _exact(its: Any) -> str:
    """Return a digest of all that the tokens of a text, and what a template is given, depend on."""
    said = [
        type(its).__name__,
        its.backend_tokenizer.to_str(),
        its.special_tokens_map,
        its.eos_token_id,
        its.pad_token_id,
        getattr(its, "split_special_tokens", None),
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


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
        raise InputError(
            f"the tokenizer {name!r} ({type(found).__name__}) is none of the library tokenizers. Only those say "
            "which characters belong to a token. Save it as one, with tokenizer.json"
        )
    return found
