"""What messages are made of: InputError, values and lists of faults in a line each, the nearest known name."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hetpipe.files.limits import MOST_FAULT_CHARACTERS, MOST_LINES

T = TypeVar("T")


class InputError(ValueError):
    """What the user gave (a file, a key, a number) is wrong. Commands print it and exit with 2."""

    exit_code = 2


def exit_code(error: BaseException) -> int:
    """The code with which a command ends after this error: the error's own, or 1."""
    code = getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


class Faults(ValueError):
    """Several faults that a validator found; each is told on a line of its own."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


# What a terminal obeys (but for line feed and tab), XML does not hold, or turns the direction of writing around
_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)


def visible(text: str) -> str:
    r"""The text of a file as people can be shown it: characters that a terminal would obey, or that nobody sees, are written as
    Python writes them, such as \x1b for escape."""
    return text if text.isprintable() else _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def cut(text: str, most: int = MOST_FAULT_CHARACTERS) -> str:
    """The text, or its beginning and an ellipsis; without what no terminal shows."""
    text = visible(text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}…"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 3, 8, 8, 8


def shown(value: Any) -> str:
    """A value as Python writes it, in a hundred characters or so."""
    try:
        return cut(_SHORT.repr(value))
    except ValueError:  # a whole number that Python does not write
        return "a number of thousands of digits"


def one_line(error: BaseException) -> str:
    """What another library's exception says, without line breaks; or of what type it is, where it says nothing."""
    return cut(" ".join(str(error).split()) or type(error).__name__, 600)


def told(wrong: Sequence[T], tell: Callable[[T], str]) -> list[str]:
    """A fault for each of them, worded only as far as a message shows it."""
    return [tell(item) for item in wrong[:MOST_LINES]] + [""] * (len(wrong) - MOST_LINES)


def clipped(message: str) -> str:
    """A message, whoever wrote it, in at most ten lines of a thousand characters."""
    lines = message.splitlines()
    kept = lines if len(lines) <= MOST_LINES else lines[: MOST_LINES - 1]
    return "\n".join([cut(line, 1_000) for line in kept] + [f"… and {len(lines) - len(kept)} more lines"] * (kept != lines))


def listed(faults: Sequence[str]) -> str:
    """The faults as lines of a message that has one before them, each cut, and how many more there are."""
    shown_faults = faults if len(faults) < MOST_LINES else faults[: MOST_LINES - 2]
    left = len(faults) - len(shown_faults)
    return "\n".join([f"  {cut(fault)}" for fault in shown_faults] + ([f"  … and {left} more"] if left else []))


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "sample"), counted(2, "sample")
    ('1 sample', '2 samples')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")


def nearest(name: str, known: Sequence[str]) -> str:
    """`"; did you mean 'x'? known: …"`: the end of every message about a name that is not known."""
    lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(cut(name).lower(), list(lower), n=1, cutoff=0.5)
    hint = f"; did you mean {shown(lower[close[0]])}?" if close else ";"
    more = f", … ({len(known)} in all)" if len(known) > _MOST_KNOWN else ""
    return f"{hint} known: {', '.join(cut(other, 80) for other in known[:_MOST_KNOWN])}{more}"


_MOST_KNOWN = 20


def natural_key(name: str) -> list[int | str]:
    """A key to sort names by in which n2 comes before n10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def reason(error: OSError | ValueError) -> str:
    """Why the system refuses a path."""
    return str(error.strerror) if isinstance(error, OSError) else "no file can have this name"
