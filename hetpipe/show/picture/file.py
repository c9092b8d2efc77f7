"""A drawing as a file: its SVG as it is, or as PNG, for which resvg turns the same SVG into dots."""

from __future__ import annotations

import struct
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hetpipe.files.messages import InputError
from hetpipe.files.writing import check_output, write_bytes, write_text
from hetpipe.show.picture.canvas import FONTS, Canvas

_MOST_PIXELS = 20_000  # a side of a PNG
_HEAD = 8 + 25  # bytes of a PNG's signature and of its first chunk, IHDR
_LETTER = f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><text y="9" font-family="{FONTS}">H</text></svg>'


def check_picture(path: str | Path | None, *endings: str) -> None:
    """InputError if no picture can be written at `path`, with one of these endings: before the work whose result goes there."""
    check_output(path, *endings)
    if path is None or Path(path).suffix.lower() != ".png":
        return
    if find_spec("resvg_py") is None:
        raise InputError("a .png needs resvg_py: pip install 'hetpipe[viz]' (.svg and .html need nothing)")
    if not _has_font():
        raise InputError("a .png needs a font, and this machine has none of them: install DejaVu Sans, or write .svg or .html")


def write_picture(path: str | Path, canvas: Canvas) -> None:
    """Write a drawing as .svg or .png, by the file's ending."""
    if Path(path).suffix.lower() == ".svg":
        write_text(path, canvas.to_svg())
    else:
        write_bytes(path, png(canvas))


def png(canvas: Canvas, *, dots_per_pixel: float = 2.0) -> bytes:
    """The drawing as PNG, a very large one with fewer dots; its title and description are texts in the PNG."""
    dots = min(dots_per_pixel, _MOST_PIXELS / max(canvas.width, canvas.height))
    found, texts = _dots(canvas.to_svg(), dots), {"Title": canvas.title, "Description": canvas.description}
    return found[:_HEAD] + b"".join(_text(name, text) for name, text in texts.items() if text) + found[_HEAD:]


@cache
def _has_font() -> bool:
    """Whether a letter leaves dots: resvg leaves out texts for which the machine has no font, without a word."""
    return _dots(_LETTER) != _dots(_LETTER, fonts=False)


def _dots(svg: str, zoom: float = 1.0, *, fonts: bool = True) -> bytes:
    from resvg_py import svg_to_bytes

    return svg_to_bytes(svg_string=svg, zoom=zoom, skip_system_fonts=not fonts)


def _text(name: str, text: str) -> bytes:
    """An iTXt chunk (PNG, third edition, section 11.3.3.4): a name, and a text in UTF-8 that is not compressed."""
    body = b"iTXt" + name.encode("latin-1") + bytes(5) + text.encode("utf-8")
    return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
