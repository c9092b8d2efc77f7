"""The samples of a chat: its text by a template, of which the answers of the assistant are learned, each as a model writes it
behind the prompt that it is given at inference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from hetpipe.files.messages import shown
from hetpipe.language.formats.chats import Chat
from hetpipe.language.formats.turns import Turn
from hetpipe.language.marked import Marked, Span
from hetpipe.language.records.record import UnusableError
from hetpipe.language.writing.behind import begun_unasked, written_behind
from hetpipe.language.writing.bounds import Bounds, unwritten
from hetpipe.language.writing.forms import ADVICE, Fit, Forms
from hetpipe.language.writing.template import GENERATION, SWITCHES, Template, Thinking

Turns = Literal["auto", "all", "last"]
LED = re.compile(r"\s*(?:<(\|?)(think|thinking|thought|reasoning)\1>.*?<\1/\2\1>|\[THINK\].*?\[/THINK\])\s*", re.DOTALL | re.I)
NO_END = (
    "answers have no token that ends them, neither by the template nor by the tokenizer (eos_token), so that a model does "
    "not learn to stop there"
)
AS_TOKENS = (
    "chats hold special tokens of the tokenizer in what is said, which are read as these tokens, and not as text (an "
    "end of a turn, say)"
)
EMPTY = "answers that are learned are empty: a model learns to say nothing there (weight: 0 leaves an answer out)"
OTHERWISE = (
    "the template writes earlier answers otherwise when more follows (some leave out what was thought): turns: auto "
    "makes a sample of each answer, turns: last learns the last one only"
)


class Begun(NamedTuple):
    """An answer in the text of the chat up to it, which begins there, as written with these options of the template."""

    text: str
    prompt: str
    begin: int
    fit: Fit
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


class Answers:
    """`end`: what ends a text, as the tokenizer writes it; None where nothing does. `told`: what a user should know of the
    samples, and of how many answers it is so; `unused`: further keys of turns that the template did not read in the last chat."""

    def __init__(self, template: Template, turns: Turns, thinking: Thinking | None) -> None:
        self.template, self.turns, self.thinking = template, turns, thinking
        its = template.tokenizer
        ends = Bounds(its.special, its.added).tokens(written_behind(template))  # some are not called special
        self.bounds, self.end = Bounds((*its.special, *ends), its.added), its.end_text
        self.forms, self.told, self.unused = Forms(template), Counter[str](), set[str]()

    @cached_property
    def unasked(self) -> str:
        """What the template writes behind the end of the last answer, as the beginning of another that nobody asked for."""
        return begun_unasked(self.template, self.bounds)

    def samples(self, chat: Chat) -> list[Marked]:
        """Return the samples of a chat, none where no answer is learned. UnusableError says why a chat cannot be used, or
        what of it would be lost."""
        self.unused = set()
        self.told[AS_TOKENS] += any(self.bounds.holds_special(turn.content or "") for turn in chat.turns)
        turns = [self._without_thought(turn) if self.thinking == "off" and turn.is_answer else turn for turn in chat.turns]
        learned = [number for number, turn in enumerate(turns) if turn.is_answer]
        learned = [number for number in (learned[-1:] if self.turns == "last" else learned) if turns[number].learned]
        if not learned:
            return []
        self.told[EMPTY] += sum(turns[number].says_nothing for number in learned)
        turns = turns[: learned[-1] + 1]
        own = chat._replace(turns=tuple(turns))
        found = self._samples(own, learned)
        for sample in found:
            self.told[NO_END] += sum(not span.ended for span in sample.learned)
        return found

    def _samples(self, own: Chat, learned: Sequence[int]) -> list[Marked]:
        if GENERATION.search(self.template.text(own.tools)) is not None:
            return [self._as_it_says(own, learned)]
        begun = {number: self._begun(own, number) for number in learned}
        whole = self._in_one_row(own, begun)
        if whole is not None:
            return [whole]
        if self.turns == "all":
            raise UnusableError(OTHERWISE)
        return [self._alone(own, number, each, apart=len(begun) > 1) for number, each in begun.items()]

    def strange(self, chat: Chat) -> set[str]:
        """The options of a chat that the template does not ask for."""
        return set(chat.options) - self.template.names(chat.tools)

    def _without_thought(self, turn: Turn) -> Turn:
        content = LED.sub("", turn.content, count=1) if turn.content and LED.match(turn.content) else turn.content
        if turn.thought is None and content == turn.content:
            return turn
        self.told["thoughts are left out (thinking: off)"] += 1
        return turn._replace(thought=None, content=content)

    # ---- where answers begin ----

    def _begun(self, chat: Chat, number: int) -> Begun:
        """Find where an answer begins, by the first of the template's options under which the text of the answer begins
        with its prompt. Where one of the two begins a thought and the other does not, the options are tried that tell the
        template."""
        turns, first = chat.turns[: number + 1], None
        for tried, options in enumerate(self._options(chat)):
            try:
                fit = self.forms.fit(turns, chat.tools, options)
                found = self._with(turns, chat, fit, options, opened=False)
            except UnusableError as error:
                first = first or error
                continue
            if isinstance(found, Begun):
                if tried:
                    self._tell_switched(options)
                self.unused |= set(fit.unused)
                return found
            first = first or UnusableError(f"turn {number + 1}: {found}")
        return self._behind_opened(turns, chat, number, first)

    def _behind_opened(self, turns: Sequence[Turn], chat: Chat, number: int, first: UnusableError | None) -> Begun:
        """Find where an answer begins if the template begins each answer with a thought, and cannot be told that this one
        has none."""
        assert first is not None
        options = self._options(chat)[0]
        if self.thinking != "on" and not _thinks(turns[-1]):
            fit = self.forms.fit(turns, chat.tools, options)
            found = self._with(turns, chat, fit, options, opened=True)
            if isinstance(found, Begun):
                self.unused |= set(fit.unused)
                if self.thinking is None:
                    self.told[
                        "answers have no thought, with which the template begins each: they are written without it, as the "
                        "template writes answers that are given (hetpipe generate --thinking off)"
                    ] += 1
                return found
        raise first

    def _with(self, turns: Sequence[Turn], chat: Chat, fit: Fit, options: Mapping[str, Any], *, opened: bool) -> Begun | str:
        """Find where an answer begins under these options, or say what is wrong."""
        (text,) = self.template.render([fit.form.hand(turns)], chat.tools, options)
        text = text.removesuffix(self.unasked)
        try:
            (prompt,) = self.template.render([fit.form.hand(turns[:-1])], chat.tools, options, prompt=True)
        except UnusableError as error:
            raise UnusableError(
                f"turn {len(turns)} answers no prompt that a model could be given ({error}): weight: 0 in this "
                "turn leaves it out of what is learned"
            ) from error
        begin = self.bounds.begin(prompt, text, opened=opened)
        if begin is not None:
            return Begun(text, prompt, begin, fit, chat.tools, options)
        at = self.bounds.common(prompt, text)
        return (
            f"the template begins an answer with {shown(prompt[at:])}, and writes this one as {shown(text[at:])}: {ADVICE}, "
            "or say whether answers begin with a thought (thinking: on or off, --thinking)"
        )

    def _options(self, chat: Chat) -> list[Mapping[str, Any]]:
        """Return the template's options to try: those of the chat and, where nothing says whether answers begin with a
        thought, both."""
        switches = [name for name in SWITCHES if name in self.template.names(chat.tools)]
        if self.thinking is not None:
            return [{**dict.fromkeys(switches, self.thinking == "on"), **chat.options}]
        open_ = [name for name in switches if name not in chat.options]
        others = [{**chat.options, **dict.fromkeys(open_, value)} for value in (False, True)] if open_ else []
        return [chat.options, *others]

    def _tell_switched(self, options: Mapping[str, Any]) -> None:
        name, value = next((name, options[name]) for name in SWITCHES if name in options)
        word, state = ("a", "on") if value else ("no", "off")
        self.told[
            f"answers have {word} thought, other than the template begins them by itself: they are written with {name}: "
            f"{str(value).lower()} (thinking: {state}; hetpipe generate --thinking {state})"
        ] += 1

    # ---- rows ----

    def _in_one_row(self, chat: Chat, begun: Mapping[int, Begun]) -> Marked | None:
        """The whole chat with all answers that are learned; None where the template writes one of them, or what is before it,
        otherwise than it is alone."""
        last = begun[len(chat.turns) - 1]
        spans = list[Span]()
        for each in list(begun.values())[:-1]:
            as_prompted = last.text.startswith(each.prompt[: each.begin])
            found = self.bounds.end_within(last.text, each.begin, each.text) if as_prompted else None
            if found is None:
                return None
            spans.append(Span(each.begin, *found))
        text, span = self._ended(chat.turns, last)
        self._check_written(text, chat.turns, list(begun))
        return Marked(text, (*spans, span))

    def _alone(self, chat: Chat, number: int, begun: Begun, *, apart: bool) -> Marked:
        """The chat up to an answer, of which it alone is learned."""
        text, span = self._ended(chat.turns[: number + 1], begun)
        self._check_written(text, chat.turns[: number + 1], [number])
        return Marked(text, (span,), apart=apart)

    def _ended(self, turns: Sequence[Turn], begun: Begun) -> tuple[str, Span]:
        """The text of a chat, and its last answer in it, with the end of a text behind it where it has no end of its own."""
        try:
            (followed,) = self.template.render([begun.fit.form.hand(turns)], begun.tools, begun.options, prompt=True)
        except UnusableError:  # it takes no answer behind another
            followed = begun.text
        end, ended = self.bounds.end_of_all(begun.text, begun.begin, followed)
        if ended or self.end is None:
            return begun.text, Span(begun.begin, end, ended)
        text = begun.text[:end] + self.end
        return text, Span(begun.begin, len(text))

    def _check_written(self, text: str, turns: Sequence[Turn], learned: Sequence[int]) -> None:
        if lost := unwritten(text, turns, learned):
            raise UnusableError(f"{lost}; {ADVICE}")

    def _as_it_says(self, chat: Chat, learned: Sequence[int]) -> Marked:
        """What the template says is generated, of the answers that are learned; with the token that ends each."""
        options = self._options(chat)[0]
        fit = self.forms.fit(chat.turns, chat.tools, options)
        self.unused |= set(fit.unused)
        text, parts = self.template.parts(fit.form.hand(chat.turns), chat.tools, options)
        answers = [number for number, turn in enumerate(chat.turns) if turn.is_answer]
        if list(learned) != answers:
            parts = self._of_turns(chat, fit, options, parts, learned)
        self._check_written(text, chat.turns, learned)
        spans = [Span(begin, *(self.bounds.end_within(text, begin, text[:end]) or (end, False))) for begin, end in parts]
        if spans and not spans[-1].ended and self.end is not None and not text[spans[-1].end :].strip():
            text = text[: spans[-1].end] + self.end
            spans[-1] = Span(spans[-1].begin, len(text))
        return Marked(text, tuple(spans))

    def _of_turns(
        self, chat: Chat, fit: Fit, options: Mapping[str, Any], parts: Sequence[tuple[int, int]], learned: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return the parts of these turns. UnusableError where it cannot be told which they are."""
        until = (fit.form.hand(chat.turns[: number + 1]) for number in range(len(chat.turns)))
        counts = [0, *(len(self.template.parts(turns, chat.tools, options)[1]) for turns in until)]
        if counts[-1] != len(parts) or counts != sorted(counts):
            raise UnusableError(
                "the generation blocks of the template are others when more follows, so that it cannot be told "
                "which are of the turns to be learned: take turns: all and no marks, or another template"
            )
        return [part for number in learned for part in parts[counts[number] : counts[number + 1]]]


def _thinks(turn: Turn) -> bool:
    """Whether an answer has a thought."""
    return turn.thought is not None or bool(turn.content and LED.match(turn.content))
