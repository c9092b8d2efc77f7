"""Where in the text of a chat an answer begins and ends: what a model itself writes of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetpipe.language.formats.turns import Turn

OPENED = re.compile(r"\S*(think|thought|reason)\S*", re.IGNORECASE)  # what opens a thought, and no more
LONGEST_TAG = 64
TAG, OPEN_TAG = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]"), re.compile(r"[<\[][^\s<>\[\]]*$")
TAGS = re.compile(r"<\|?/?(?:think|thinking|thought|reasoning)\|?>|\[/?THINK\]", re.IGNORECASE)
CLOSING = re.compile(r"</(?:think|thinking|thought|reasoning)>|\[/THINK\]", re.IGNORECASE)


class Bounds:
    """`special`: the tokenizer's special tokens, and others that end turns; `added`: all that are never cut."""

    def __init__(self, special: Sequence[str], added: Sequence[str] = ()) -> None:
        self.special = tuple(special)
        self._longest = max(map(len, (*special, *added)), default=0)
        self._special, self._whole = (
            re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
            for tokens in (special, (*special, *added))
        )

    def tokens(self, text: str) -> list[str]:
        """The tokens of a text that are never cut, but for white space."""
        return [token for token in self._whole.findall(text) if token.strip()]

    def common(self, one: str, other: str) -> int:
        """How many characters both begin with; no token of either is cut that is none of a text's, and no tag (`<think>`)."""
        low, high = 0, min(len(one), len(other))
        while low < high:  # so many are alike, and no more
            middle = (low + high + 1) // 2
            low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
        return min(self._whole_until(text, low) for text in (one, other))

    def _whole_until(self, text: str, at: int) -> int:
        """This place, or the beginning of the token or tag that it lies in."""
        begin = max(0, at - max(self._longest, LONGEST_TAG))
        part, inside = text[begin : at + self._longest], at - begin
        cuts = [found.start() for found in self._whole.finditer(part) if found.start() < inside < found.end()]
        tag = OPEN_TAG.search(text[begin:at])
        if tag is not None and TAG.match(text, begin + tag.start()):
            cuts.append(tag.start())
        return begin + min(cuts, default=inside)

    def begin(self, prompt: str, text: str, *, opened: bool) -> int | None:
        """Find where an answer begins in a text that ends with it, behind the prompt of its generation; None where the
        text does not begin with that prompt. `opened`: ignore a thought that the prompt opens and the text does not have."""
        if text.startswith(prompt):
            return len(prompt)
        at = self.common(prompt, text)
        return at if opened and OPENED.fullmatch(prompt[at:].strip()) else None

    def end_of_all(self, text: str, begin: int, followed: str) -> tuple[int, bool]:
        """Find where the last answer of a text ends, and whether a token ends it. `followed` is the same chat with the
        beginning of another answer: what stands only in `text` ends the text, and not the turn, if the turn has an end of
        its own."""
        at = self.common(text, followed)
        if at < begin or not self.only_special(text[at:]):
            at = len(text)
        return self._end(text, begin, at) or self._token_behind(text, at) or (at, False)

    def end_within(self, text: str, begin: int, until: str) -> tuple[int, bool] | None:
        """Find the same where more follows; `until` is the text of the chat up to this answer. None where the answer, or
        its end, is written otherwise there."""
        at = self.common(text, until)
        rest = until[at:]
        if at < begin or not self.only_special(rest):
            return None
        own = self._end(text, begin, at)
        if own is not None:
            return own
        if rest.strip():  # the token that ends it is another there
            return None
        return self._token_behind(text, at) or (at, False)

    def _end(self, text: str, begin: int, at: int) -> tuple[int, bool] | None:
        bare = text[begin:at].rstrip()
        return (begin + len(bare), True) if bare.endswith(self.special) else None

    def _token_behind(self, text: str, at: int) -> tuple[int, bool] | None:
        """The special token that follows: in its place a model must stop."""
        while at < len(text) and text[at].isspace():
            at += 1
        following = max((token for token in self.special if text.startswith(token, at)), key=len, default="")
        return (at + len(following), True) if following else None

    def first_end(self, text: str) -> int | None:
        """Find where the first special token of a text ends; None where it has none."""
        found = self._special.search(text)
        return found.end() if found is not None else None

    def holds_special(self, text: str) -> bool:
        """Whether a text holds a special token, other than a tag of a thought."""
        return any(TAGS.fullmatch(token) is None for token in self._special.findall(text))

    def only_special(self, text: str) -> bool:
        """Whether a text holds special tokens and white space only."""
        return not self._special.sub("", text).strip()


def unwritten(text: str, turns: Sequence[Turn], learned: Sequence[int]) -> str:
    """Which content of a chat does not stand in its text, in its turn's place; nothing where all do. Of what was thought before
    an answer that is not learned templates may write nothing."""
    at = 0
    for number, turn in enumerate(turns):
        behind = at
        for piece in _pieces(turn, whole=number in learned):
            found = _find(text, piece, 0 if turn.role in ("system", "developer") else at)
            if found is None:
                what = "a part of the content" if piece.strip() != (turn.content or "").strip() else "the content"
                return f"the template does not write {what} of turn {number + 1} ({turn.role}) as it is"
            if turn.role not in ("system", "developer"):
                behind = max(behind, found)
        at = behind
    return ""


def _pieces(turn: Turn, *, whole: bool) -> list[str]:
    """What of a turn must stand in its text: what was thought, and what was said."""
    content = turn.content or ""
    if turn.is_answer and not whole:
        content = CLOSING.split(content)[-1]
    parts = TAGS.split(content) if turn.is_answer else [content]
    thought = [turn.thought] if whole and turn.thought else []
    return [part for part in (*thought, *parts) if part.strip()]


def _find(text: str, piece: str, begin: int) -> int | None:
    """Find where a piece ends in the text. The text may lack the white space around it, or hold it as JSON writes a text."""
    bare = piece.strip()
    for own in (bare, *_as_json(bare)):
        at = text.find(own, begin)
        if at >= 0:
            return at + len(own)
    return None


def _as_json(text: str) -> list[str]:
    import json

    return [json.dumps(text, ensure_ascii=plain)[1:-1] for plain in (False, True)]
