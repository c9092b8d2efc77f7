"""What tables and texts are printed on: a terminal that obeys nothing that stands in a file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from hetpipe.files.messages import visible


class Screen(Console):
    """A console on which texts are what they are: brackets are no markup, colons no emoji, and characters that a terminal
    would obey are seen (see `visible`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def on_broken_pipe(self) -> NoReturn:
        """Nobody reads any more what is printed: end as other programs do."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does, but for those characters; what rich itself tells the terminal is in segments of their own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
