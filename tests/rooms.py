"""The picture of the rooms in CONTRIBUTING.md, drawn from the imports: `python -m tests.rooms` writes it there (`make rooms`)."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: written by `make rooms` -->\n", "<!-- end of rooms -->\n"


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest first: those of the contract in pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def arrows() -> Counter[tuple[str, str]]:
    """How many imports go from one room into another, of those that run or are for the type checker."""
    found: Counter[tuple[str, str]] = Counter()
    rooms = {room for floor in floors() for room in floor}
    graph = grimp.build_graph("hetpipe", cache_dir=None)
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            above, below = (f"{name}.".split(".")[1] for name in (importer, imported))
            if above != below and {above, below} <= rooms:
                found[above, below] += 1
    return found


def up() -> list[tuple[str, str]]:
    """The arrows that do not go down."""
    height = {room: -number for number, floor in enumerate(floors()) for room in floor}
    return [(a, b) for a, b in arrows() if height[a] <= height[b]]


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / "hetpipe" / room / "__init__.py").read_text())) or ""
    return " ".join(text.split("Read in this")[0].split("\n\n")[0].split()).rstrip(". :")


def picture() -> str:
    """A table: floor, room, what it is for, its size, and the rooms it imports from."""
    counted = arrows()
    lines = ["| floor | room | what lives there | files | lines | imports from |", "|--:|---|---|--:|--:|---|"]
    floor_list = floors()
    for number, floor in enumerate(floor_list):
        for room in floor:
            files = sorted((ROOT / "hetpipe" / room).rglob("*.py"))
            size = sum(len(f.read_text().splitlines()) for f in files)
            below = ", ".join(b for lower in floor_list for b in lower if (room, b) in counted)
            lines.append(f"| {len(floor_list) - number} | `{room}/` | {purpose(room)} | {len(files)} | {size} | {below} |")
    total = f"{sum(counted.values())} imports lead from one room into another ({len(counted)} arrows)"
    lines.append(f"\n{total}; {len(up())} of them go up.")
    return "\n".join(lines) + "\n"


def with_picture(text: str) -> str:
    """The page with the picture as it is now."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + picture() + END + rest.split(END)[1]


if __name__ == "__main__":
    HOME.write_text(with_picture(HOME.read_text()))
    print(picture())
