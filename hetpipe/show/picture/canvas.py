"""A drawing of boxes, lines and words, in pixels from the top left, as SVG."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from hetpipe.files.messages import visible
from hetpipe.show.picture.theme import definitions, style

FONTS = "DejaVu Sans, Verdana, Geneva, sans-serif"  # all of about the same width
WIDE, NARROW = 960.0, 380.0  # of a picture: on a screen, on a phone
_Pair = tuple[str, float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangle, in the colours and with the pattern of these names; `tip` is its title (SVG)."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    opacity: float = 1.0
    pattern: str = ""
    edge: str = "none"
    thickness: float = 1.0
    round: float = 0.0
    tip: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stroke:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str = "faint"
    thickness: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """Many boxes in a row, alike but for (from, to)."""

    y: float
    height: float
    spans: tuple[tuple[float, float], ...]
    fill: str
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A line of text, its middle at height y; `upright` text reads from the bottom up, centred on (x, y). `clear`: lines do not
    cross it."""

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    colour: str = "ink"
    upright: bool = False
    clear: bool = False


@dataclass(kw_only=True)
class Group:
    """What is drawn together: strips first, then boxes, lines and words. With a `label` it has a name for screen readers and
    takes the keyboard's focus; `key` says to a script what it is."""

    label: str = ""
    key: str = ""
    strips: list[Strip] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    lines: list[Stroke] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)


def printable(text: str) -> str:
    """The text on one line and without characters that an SVG cannot hold."""
    return visible(" ".join(text.split()))


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


def wrapped(text: str, room: float, size: float = 11.0) -> list[str]:
    """The text in lines of at most `room` pixels, broken at spaces."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


@dataclass(kw_only=True)
class Canvas:
    """What is drawn, group after group. `title` and `description` say it in words: names for screen readers, and texts in the
    metadata of a PNG."""

    width: float
    height: float = 0.0
    title: str = ""
    description: str = ""
    groups: list[Group] = field(default_factory=lambda: [Group()])

    def group(self, label: str = "", key: str = "") -> Group:
        """A new group, drawn over those before."""
        self.groups.append(Group(label=printable(label), key=key))
        return self.groups[-1]

    @property
    def words(self) -> list[Words]:
        """All words."""
        return [words for group in self.groups for words in group.words]

    @property
    def boxes(self) -> list[Box]:
        """All boxes."""
        return [box for group in self.groups for box in group.boxes]

    def to_svg(self, *, alone: bool = True) -> str:
        """The drawing as an SVG element, as wide as its place allows; texts stay texts. `alone`: with its colours and
        patterns, which a page has only once."""
        w, h = round(self.width), round(self.height)
        head = f"<style>{style()}</style>{definitions()}" if alone else ""
        named = f"<title>{html.escape(printable(self.title))}</title>" if self.title else ""
        if self.description and alone:
            named += f"<desc>{html.escape(visible(self.description))}</desc>"
        body = "\n".join(_svg_group(group) for group in self.groups)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" role="group" '
            f'aria-label="{html.escape(printable(self.title))}" style="width:100%;max-width:{w}px;height:auto" '
            f'font-family="{FONTS}">\n{named}{head}<rect width="{w}" height="{h}" class="f-paper"/>\n{body}\n</svg>\n'
        )


def _number(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


def _attributes(pairs: Iterable[_Pair]) -> str:
    return " ".join(f'{key}="{_number(v) if isinstance(v, int | float) else v}"' for key, v in pairs)


def _svg_group(group: Group) -> str:
    shapes = [*map(_svg_strip, group.strips), *map(_svg_box, group.boxes)]
    body = "\n".join([*shapes, *map(_svg_line, group.lines), *map(_svg_words, group.words)])
    if not group.label:
        return body
    named = f'role="img" tabindex="0" aria-label="{html.escape(group.label)}"'
    key = f' data-stage="{html.escape(group.key)}"' if group.key else ""
    return f'<g class="stage" {named}{key}>\n{body}\n</g>'


def _svg_box(box: Box) -> str:
    place: list[_Pair] = [("x", box.x), ("y", box.y), ("width", box.width), ("height", box.height)]
    if box.round:
        place.append(("rx", box.round))
    look: list[_Pair] = [("fill", "none"), ("pointer-events", "none")] if box.fill == "none" else []
    classes = [f"f-{box.fill}"] if box.fill != "none" else []
    if box.opacity != 1:
        look.append(("fill-opacity", box.opacity))
    if box.edge != "none":
        classes.append(f"s-{box.edge}")
        look.append(("stroke-width", box.thickness))
    if classes:
        look.append(("class", " ".join(classes)))
    hatched = f'<rect {_attributes(place)} fill="url(#p-{box.pattern})" pointer-events="none"/>' if box.pattern else ""
    start = f"<rect {_attributes([*place, *look])}"
    plain = f"{start}><title>{html.escape(printable(box.tip))}</title></rect>" if box.tip else f"{start}/>"
    return plain + hatched


def _svg_strip(strip: Strip) -> str:
    path, at = f"M0 {_short(strip.y + strip.height / 2)}", 0  # in tenths of a pixel, each from where the last ended: short
    for a, b in strip.spans:
        start, end = round(10 * a), max(round(10 * b), round(10 * a) + 1)
        path += (f"m{_short((start - at) / 10)} 0" if start != at else "") + f"h{_short((end - start) / 10)}"
        at = end
    look: list[_Pair] = [("class", f"s-{strip.fill}"), ("stroke-width", strip.height)]
    if strip.opacity != 1:
        look.append(("stroke-opacity", strip.opacity))
    tip = f"<title>{html.escape(printable(strip.tip))}</title>" if strip.tip else ""
    return f'<path d="{path}" {_attributes(look)}>{tip}</path>'


def _short(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _svg_line(line: Stroke) -> str:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in line.points)
    look: list[_Pair] = [("class", f"s-{line.colour}"), ("stroke-width", line.thickness)]
    if line.dashed:
        look.append(("stroke-dasharray", "4 3"))
    return f'<polyline points="{points}" fill="none" {_attributes(look)}/>'


def _svg_words(w: Words) -> str:
    anchor = "middle" if w.upright else w.anchor
    clear = " s-paper clear" if w.clear else ""
    look: list[_Pair] = [("font-size", w.size), ("text-anchor", anchor), ("class", f"f-{w.colour}{clear}")]
    if w.bold:
        look.append(("font-weight", "bold"))
    if w.upright:
        look.append(("transform", f"rotate(-90 {_number(w.x)} {_number(w.y)})"))
    place: list[_Pair] = [("x", w.x), ("y", w.y + 0.36 * w.size)]
    return f"<text {_attributes([*place, *look])}>{html.escape(printable(w.text))}</text>"
