"""What tables and texts are printed on: a terminal that obeys nothing that stands in a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from hetpipe.files.messages import visible


class Screen(Console):
    """A console on which texts are what they are: brackets are no markup, colons no emoji, and characters that a terminal
    would obey are seen (see `visible`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does, but for those characters; what rich itself tells the terminal is in segments of their own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
