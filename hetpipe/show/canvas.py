"""A drawing of boxes, lines and words, in pixels from the top left; SVG by itself, PNG with matplotlib."""

from __future__ import annotations

import html
import io
import re
import unicodedata
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hetpipe.files.messages import InputError

INK, FAINT, PAPER = "#1a1a1a", "#6b6b6b", "#ffffff"
_FONTS = "DejaVu Sans, Verdana, Geneva, sans-serif"  # all of about the same width
_ANCHOR = {"start": "left", "middle": "center", "end": "right"}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # XML holds none of them
_MOST_PIXELS = 20_000  # a side of a PNG
_Pair = tuple[str, float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangle; `tip` is shown when the mouse rests on it (SVG)."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = "none"
    thickness: float = 1.0
    tip: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str = FAINT


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A line of text, its middle at height y; `upright` text reads from the bottom up, centred on (x, y)."""

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    colour: str = INK
    upright: bool = False


def printable(text: str) -> str:
    """The text on one line and without characters that an SVG cannot hold."""
    return _UNPRINTABLE.sub("\ufffd", " ".join(text.split()))


def _em(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF" or character in "mwMW@%…—":
        return 1.0
    if character in "iljIft.,:;'|!/()[] -r":
        return 0.41
    return 0.72 if character.isupper() else 0.63


def text_width(text: str, size: float = 11.0, *, bold: bool = False) -> float:
    """About how many pixels wide a text is, rather too many than too few."""
    return sum(map(_em, text)) * size * (1.1 if bold else 1.0)


def fitting(text: str, room: float, size: float = 11.0, *, least: int = 4) -> str:
    """The text, or as much of its end as `room` pixels hold behind an `…`; empty below `least` characters."""
    if text_width(text, size) <= room:
        return text
    for start in range(1, len(text) - least + 1):
        if text_width("…" + text[start:], size) <= room:
            return "…" + text[start:]
    return ""


@dataclass(kw_only=True)
class Canvas:
    """What is drawn: boxes first, then lines, then words."""

    width: float
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)

    def to_svg(self) -> str:
        """The drawing as an SVG element; texts stay texts."""
        w, h = round(self.width), round(self.height)
        items = [*map(_svg_box, self.boxes), *map(_svg_line, self.lines), *map(_svg_words, self.words)]
        body = "\n".join(items)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
            f'font-family="{_FONTS}">\n<rect width="{w}" height="{h}" fill="{PAPER}"/>\n{body}\n</svg>\n'
        )

    def to_png(self, *, dots_per_pixel: float = 2.0) -> bytes:
        """The drawing as PNG, a very large one with fewer dots. InputError if matplotlib is not installed."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise InputError(
                "a .png needs matplotlib: pip install 'hetpipe[viz]' (.svg and .html need nothing)"
            ) from None
        dots = min(dots_per_pixel, _MOST_PIXELS / max(self.width, self.height))
        figure = Figure(figsize=(self.width / 96, self.height / 96), dpi=96 * dots, facecolor=PAPER)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        axes.set_axis_off()
        self._paint(axes)
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # drawn as an empty box
            figure.savefig(buffer, format="png")
        return buffer.getvalue()

    def _paint(self, axes: Any) -> None:
        from matplotlib.collections import LineCollection, PolyCollection

        axes.add_collection(PolyCollection(
            [_corners(box) for box in self.boxes], facecolors=[box.fill for box in self.boxes],
            edgecolors=[box.edge for box in self.boxes],
            linewidths=[box.thickness * 0.75 for box in self.boxes],
        ), autolim=False)  # fmt: skip
        axes.add_collection(LineCollection(
            [[(line.x1, line.y1), (line.x2, line.y2)] for line in self.lines],
            colors=[line.colour for line in self.lines], linewidths=0.75,
        ), autolim=False)  # fmt: skip
        for w in self.words:
            axes.text(
                w.x, w.y if w.upright else w.y + 0.36 * w.size, printable(w.text), fontsize=w.size * 0.75,
                color=w.colour, fontweight="bold" if w.bold else "normal", family="DejaVu Sans",
                rotation=90 if w.upright else 0, ha="center" if w.upright else _ANCHOR[w.anchor],
                va="center" if w.upright else "baseline", parse_math=False, usetex=False,
            )  # fmt: skip


def _corners(box: Box) -> list[tuple[float, float]]:
    x, y, right, bottom = box.x, box.y, box.x + box.width, box.y + box.height
    return [(x, y), (right, y), (right, bottom), (x, bottom)]


def _number(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


def _attributes(pairs: Iterable[_Pair]) -> str:
    return " ".join(f'{key}="{_number(v) if isinstance(v, int | float) else v}"' for key, v in pairs)


def _svg_box(box: Box) -> str:
    place: list[_Pair] = [("x", box.x), ("y", box.y), ("width", box.width), ("height", box.height)]
    stroke: list[_Pair] = [("stroke", box.edge), ("stroke-width", box.thickness)]
    stroke = stroke if box.edge != "none" else []
    start = f"<rect {_attributes([*place, ('fill', box.fill), *stroke])}"
    return f"{start}><title>{html.escape(printable(box.tip))}</title></rect>" if box.tip else f"{start}/>"


def _svg_line(line: Line) -> str:
    ends: list[_Pair] = [("x1", line.x1), ("y1", line.y1), ("x2", line.x2), ("y2", line.y2)]
    return f"<line {_attributes([*ends, ('stroke', line.colour)])}/>"


def _svg_words(w: Words) -> str:
    anchor = "middle" if w.upright else w.anchor
    style: list[_Pair] = [("font-size", w.size), ("text-anchor", anchor), ("fill", w.colour)]
    if w.bold:
        style.append(("font-weight", "bold"))
    if w.upright:
        style.append(("transform", f"rotate(-90 {_number(w.x)} {_number(w.y)})"))
    place: list[_Pair] = [("x", w.x), ("y", w.y + 0.36 * w.size)]
    return f"<text {_attributes([*place, *style])}>{html.escape(printable(w.text))}</text>"
