"""The picture of the rooms in CONTRIBUTING.md, drawn from the imports; `make rooms` writes it there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: written by `make rooms` -->\n", "<!-- end of rooms -->\n"


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest first: those of the contract in pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def arrows() -> set[tuple[str, str]]:
    """Which room imports from which, at run time or for the type checker."""
    found = set[tuple[str, str]]()
    rooms = {room for floor in floors() for room in floor}
    graph = grimp.build_graph("hetpipe", cache_dir=None)
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            above, below = (f"{name}.".split(".")[1] for name in (importer, imported))
            if above != below and {above, below} <= rooms:
                found.add((above, below))
    return found


def up() -> list[tuple[str, str]]:
    """The arrows that do not go down."""
    height = {room: -number for number, floor in enumerate(floors()) for room in floor}
    return [(a, b) for a, b in arrows() if height[a] <= height[b]]


def imported(file: Path) -> set[str]:
    """The modules of hetpipe that a file imports: at its top, inside of functions, or for the type checker."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if any(path.is_file() for path in _paths(name)) else node.module for name in below}
    return {name for name in found if name.startswith("hetpipe.")}


def _paths(module: str) -> list[Path]:
    path = ROOT.joinpath(*module.split("."))
    return [path.with_suffix(".py"), path / "__init__.py"]


def reading_order(folder: Path) -> list[str]:
    """What the docstring of a room, or of a folder in it, says behind "Read in this order:", without what stands in brackets."""
    text = " ".join((ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").split())
    plain = re.sub(r"\([^()]*\)", "", text.partition("Read in this order:")[2])
    return [name.strip(" ./") for name in re.split(r"[,;]| and ", plain)]


def places(room: Path) -> dict[str, tuple[int, int]]:
    """Where each module of a room stands in the order of reading: by the room's docstring, then by that of its folder."""
    found, order = dict[str, tuple[int, int]](), reading_order(room)
    for file in room.rglob("*.py"):
        path = file.relative_to(room).with_suffix("")
        top = str(path) if str(path) in order else path.parts[0]
        inner = [*reading_order(file.parent), "__init__"] if file.parent != room else [path.name]
        inner = [path.name, "__init__"] if inner[0] == "" else inner  # a folder in no order: its files need none of each other
        module = ".".join(("hetpipe", room.name, *path.parts)).removesuffix(".__init__")
        if path.parts[0] not in ("__init__", "__main__"):
            found[module] = order.index(top), inner.index(path.name)
    return found


def purpose(room: str) -> str:
    """The first sentence of the room's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / "hetpipe" / room / "__init__.py").read_text())) or ""
    return " ".join(text.split("Read in this")[0].split("\n\n")[0].split()).rstrip(". :")


def picture() -> str:
    """A table: floor, room, what it is for, and the rooms it imports from."""
    counted = arrows()
    lines = ["| floor | room | what lives there | imports from |", "|--:|---|---|---|"]
    floor_list = floors()
    for number, floor in enumerate(floor_list):
        for room in floor:
            below = ", ".join(b for lower in floor_list for b in lower if (room, b) in counted)
            lines.append(f"| {len(floor_list) - number} | `{room}/` | {purpose(room)} | {below} |")
    lines.append(f"\n{len(counted)} arrows lead from a room to another; {len(up())} of them go up.")
    return "\n".join(lines) + "\n"


def with_picture(text: str) -> str:
    """The page with the picture as it is now."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + picture() + END + rest.split(END)[1]


if __name__ == "__main__":
    HOME.write_text(with_picture(HOME.read_text()))
    print(picture())
