"""What pictures are made of: texts that fit, marks of an axis, SVG and PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.files.messages import InputError
from hetpipe.show.draw import draw_plan
from hetpipe.show.picture import file
from hetpipe.show.picture.axis import Scale, mark_names
from hetpipe.show.picture.canvas import NARROW, Box, Canvas, Group, Words, fitting, text_width
from hetpipe.show.picture.file import png
from hetpipe.study.make import make_study
from tests.support.drawn_plans import CLUSTER, TWO_REPLICAS, profile


@given(st.lists(st.floats(0, 1.5), min_size=1, max_size=4))
def test_names_of_marks_are_apart_and_in_the_picture(moments: list[float]) -> None:
    names = [(seconds, f"bound {seconds:.2f} s", "ink", (-1) ** i) for i, seconds in enumerate(moments)]
    group, scale = Group(), Scale(left=22, room=336, seconds=1.0, largest=1, high=80)
    end = mark_names(group, scale, NARROW, names, 100.0)
    spans = [(words.y, words.x, words.x + text_width(words.text, words.size, bold=True)) for words in group.words]
    assert [words.text for words in group.words] == [name for _, name, *_ in names]
    assert all(100 < y < end and left >= 0 and right <= NARROW for y, left, right in spans)
    for i, (y, left, right) in enumerate(spans):
        assert all(y != v or left > b or right < a for v, a, b in spans[:i])


def test_a_png_of_strange_names(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    names = ["$x_", "日本", "\\frac", "head"]
    known: dict[str, Any] = {"profile": profile(names), "cluster": CLUSTER}
    path = tmp_path / "new" / "plan.png"
    draw_plan(make_study(TWO_REPLICAS, **known), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_png_of_a_thousand_replicas_is_not_larger_than_png_writers_allow() -> None:
    pytest.importorskip("resvg_py")
    tall = Canvas(width=100, height=90_000)
    assert int.from_bytes(png(tall)[20:24], "big") <= 20_000


def test_without_resvg_a_png_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"a \.png needs resvg_py: pip install 'hetpipe\[viz\]'"):
        draw_plan(make_study(TWO_REPLICAS), tmp_path / "plan.png")
    draw_plan(make_study(TWO_REPLICAS), tmp_path / "plan.svg")


def test_without_fonts_a_png_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    dots = file._dots
    monkeypatch.setattr(file, "_dots", lambda svg, fonts=True: dots(svg, fonts=False))
    file._has_font.cache_clear()
    with pytest.raises(InputError, match=r"a \.png needs a font, and this machine has none of them: install DejaVu Sans"):
        draw_plan(make_study(TWO_REPLICAS), tmp_path / "plan.png")
    file._has_font.cache_clear()


def test_a_png_has_the_dots_of_the_svg(tmp_path: Path) -> None:
    """A box where it stands, in its colour; text and pattern leave dots; the title and description are texts of the PNG."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("resvg_py")
    canvas = Canvas(width=40, height=20, title="日本", description="a\nb")
    canvas.groups[0].boxes.append(Box(x=0, y=0, width=10, height=20, fill="type0"))
    canvas.groups[0].boxes.append(Box(x=10, y=0, width=10, height=20, pattern="up"))
    canvas.groups[0].words.append(Words(x=21, y=10, text="M", size=16))
    found = image.open(io.BytesIO(png(canvas)))
    assert (found.size, found.text) == ((80, 40), {"Title": "日本", "Description": "a\nb"})
    dots = found.convert("RGB")
    assert dots.getpixel((5, 20)) == (0x00, 0x72, 0xB2), "the light colour, also where the reader's screen is dark"
    for left in (20, 40):
        assert len(dots.crop((left, 0, left + 20, 40)).getcolors(1600)) > 2


def test_long_texts_lose_their_beginning() -> None:
    assert fitting("layers.12.attention", 1000) == "layers.12.attention"
    cut = fitting("layers.12.attention", 70)
    assert cut[0] == "…"
    assert "layers.12.attention".endswith(cut[1:])
    assert text_width(cut) <= 70
    assert fitting("layers.12.attention", 20) == ""


def test_a_canvas_as_svg() -> None:
    canvas = Canvas(width=10, height=20.4, title="a & b")
    group = canvas.group("a stage", "0.1")
    group.boxes.append(Box(x=1, y=2.5, width=3, height=4, fill="ink", pattern="up", tip="a<b"))
    group.words.append(Words(x=5, y=5, text="up", upright=True))
    assert canvas.to_svg(alone=False).splitlines()[1:] == [
        '<title>a &amp; b</title><rect width="10" height="20" class="f-paper"/>',
        "",
        '<g class="stage" role="img" tabindex="0" aria-label="a stage" data-stage="0.1">',
        (
            '<rect x="1" y="2.5" width="3" height="4" class="f-ink"><title>a&lt;b</title></rect>'
            '<rect x="1" y="2.5" width="3" height="4" fill="url(#p-up)" pointer-events="none"/>'
        ),
        '<text x="5" y="8.96" font-size="11" text-anchor="middle" class="f-ink" transform="rotate(-90 5 5)">up</text>',
        "</g>",
        "</svg>",
    ]
    assert "prefers-color-scheme:dark" in canvas.to_svg()
