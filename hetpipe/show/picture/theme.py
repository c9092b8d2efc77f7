"""Colours and patterns of all pictures, light and dark. Colours are Okabe and Ito's (2008), told apart by the colour-blind;
whatever a colour says, a pattern or a word says too."""

from __future__ import annotations

# name: light, dark
COLOURS = {
    "ink": ("#1a1a1a", "#ececec"),
    "night": ("#111111", "#111111"),
    "faint": ("#5c6167", "#a9aeb5"),
    "paper": ("#ffffff", "#15181c"),
    "panel": ("#f1f2f4", "#23272d"),
    "rule": ("#c3c7cc", "#444a52"),
    "limit": ("#b34700", "#ff9a4d"),
    "type0": ("#0072B2", "#3a9fdc"),
    "type1": ("#E69F00", "#E69F00"),
    "type2": ("#009E73", "#1fbf91"),
    "type3": ("#CC79A7", "#CC79A7"),
    "type4": ("#D55E00", "#e8742a"),
    "type5": ("#56B4E9", "#56B4E9"),
    "type6": ("#F0E442", "#F0E442"),
    "type7": ("#7a5195", "#a884c6"),
    "unknown": ("#5b7083", "#8fa6ba"),
}
TYPES = 8
# name: lines of an 8 × 8 tile (SVG path)
PATTERNS = {
    "up": "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6",
    "down": "M-2,6 L2,10 M0,0 L8,8 M6,-2 L10,2",
    "dots": "M1,2 h2 M5,6 h2",
    "cross": "M0,4 H8 M4,0 V8",
    "rows": "M0,2 H8 M0,6 H8",
    "columns": "M2,0 V8 M6,0 V8",
    "net": "M0,8 L8,0 M0,0 L8,8",
}
CAUSE_PATTERNS = {
    "fill and drain": "dots",
    "slower stage": "up",
    "link": "columns",
    "gradient sum": "net",
    "slower optimizer": "rows",
    "overhead": "cross",
}
TYPE_PATTERNS = ("", "up", "dots", "columns", "net", "rows", "down", "cross")


def type_colour(index: int | None) -> str:
    """The name of the colour of a device type by its place in the cluster; of an unknown one."""
    return "unknown" if index is None else f"type{index % TYPES}"


def style(selector: str = "") -> str:
    """The style sheet: classes f-NAME fill, s-NAME draw lines; dark where the reader asks for it."""

    def rules(which: int) -> str:
        return "".join(
            f"{selector}.f-{name}{{fill:{pair[which]}}}{selector}.s-{name}{{stroke:{pair[which]}}}"
            for name, pair in COLOURS.items()
        )

    rest = ".clear{paint-order:stroke;stroke-width:4px;stroke-linejoin:round}.stage:focus{outline:3px solid #0072B2}"
    return f"{rules(0)}{rest}@media(prefers-color-scheme:dark){{{rules(1)}}}"


def definitions() -> str:
    """The patterns as SVG, for `fill="url(#p-NAME)"`."""
    patterns = "".join(
        f'<pattern id="p-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path d="{path}" class="s-ink" stroke-width="{2 if name == "dots" else 0.9}" stroke-opacity="0.6" fill="none"/>'
        "</pattern>"
        for name, path in PATTERNS.items()
    )
    return f"<defs>{patterns}</defs>"
