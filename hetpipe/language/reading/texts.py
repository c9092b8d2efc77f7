"""How a record becomes texts of which a part is learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hetpipe.language.formats.chats import OPTIONS, Chat
from hetpipe.language.formats.columns import Columns
from hetpipe.language.formats.formats import read_named, read_record
from hetpipe.language.formats.pairs import Pair
from hetpipe.language.formats.preferences import sides_of
from hetpipe.language.marked import Marked, Span
from hetpipe.language.records.record import UnusableError
from hetpipe.language.tokenizer import Tokenizer
from hetpipe.language.writing.answers import Answers
from hetpipe.language.writing.forms import Fit
from hetpipe.language.writing.template import DATE


@dataclass(frozen=True, kw_only=True)
class Texts:
    """How records become samples: by a template (None: without) and the columns that a job names; `templated`: see `pair_of`.
    `preferences`: each record is two samples, with its better answer and with its worse one."""

    tokenizer: Tokenizer
    answers: Answers | None
    columns: Columns
    templated: bool | None
    preferences: bool = False

    def samples(self, value: Any) -> tuple[list[Marked], set[str]]:
        """Return the samples of a record, and the keys that nothing reads. UnusableError says why it cannot be used."""
        if isinstance(value, UnusableError):
            raise value
        templated = self.templated if self.answers is not None else False
        if not self.preferences:
            return self._of(read_record(value, self.columns, templated=templated))
        if not isinstance(value, dict):
            raise UnusableError(f"expected a mapping with the keys chosen and rejected, found a {type(value).__name__}")
        both = [self._of(read_named(side, self.columns, templated=templated)) for side in sides_of(value, self.columns)]
        keys = {key for _, unused in both for key in unused}
        return ([samples[0] for samples, _ in both], keys) if all(samples for samples, _ in both) else ([], keys)

    def _of(self, found: Chat | Pair) -> tuple[list[Marked], set[str]]:
        if isinstance(found, Chat):
            if self.answers is None:
                raise UnusableError(
                    "it is a chat, which only a template can write. Take a tokenizer with a template, or template: FILE"
                )
            samples = self.answers.samples(found)
            options = (f"{OPTIONS}.{key}" for key in self.answers.strange(found))
            return samples, {*found.unused, *options, *(f"{key} of a turn" for key in self.answers.unused)}
        text = found.prompt + found.completion
        learned = [Marked(text, (Span(len(found.prompt), len(text)),), whole=False)] if found.learned else []
        return learned, set(found.unused)

    def begin(self) -> int:
        """Count anew what is to be told. Returns how many builds of chats have come so far."""
        if self.answers is None:
            return 0
        self.answers.told.clear()
        return len(self.answers.forms.known)

    def counts(self) -> Counter[str]:
        """What a user should know of the answers since, and of how many it is so, what came first first."""
        return Counter(self.answers.told) if self.answers is not None else Counter()

    def fits(self, behind: int) -> dict[Any, Fit | str]:
        """How the template is given each build of chats that came behind so many others."""
        return dict(islice(self.answers.forms.known.items(), behind, None)) if self.answers is not None else {}

    def made_of(self, ends: Iterable[int]) -> dict[str, Any]:
        """What the samples hang on beside the files; `ends`: the tokens that end what is learned."""
        template = self.answers.template.digest if self.answers is not None else None
        return {"tokenizer": self.tokenizer.digest, "template": template, "ends": sorted(ends)}

    def told(self, counts: Mapping[str, int]) -> list[str]:
        """What a user should know of what became of the records: of how many answers it is so, in this order."""
        if self.answers is None:
            return []
        lines = [f"{count} {what}" for what, count in counts.items() if count]
        if self.answers.template.writes_a_date:
            lines.append(
                f"the template writes the date of the day: here always {DATE.isoformat()}, so that a run which is "
                "resumed on another day reads the same samples"
            )
        return lines
