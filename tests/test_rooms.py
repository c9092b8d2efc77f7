"""The rooms: imports go down, and CONTRIBUTING.md shows them as they are."""

from __future__ import annotations

import ast
import re

from tests.support.rooms import HOME, ROOT, floors, imported, places, reading_order, up, with_picture


def test_no_import_goes_up() -> None:
    assert up() == []


def test_every_room_is_on_a_floor_and_has_at_most_ten_files() -> None:
    there = {path.parent.name for path in (ROOT / "hetpipe").glob("*/__init__.py")} - {"partitioners", "models"}
    assert {room for floor in floors() for room in floor} == there
    for room in there:
        assert len(list((ROOT / "hetpipe" / room).glob("[!_]*.py"))) <= 10, room


def test_each_file_of_a_room_needs_only_those_before_it() -> None:
    """In the order of reading that the docstrings of the room and of its folders give, in which each file stands once. The files
    of a folder without an order need none of each other."""
    for home in sorted((ROOT / "hetpipe").rglob("__init__.py")):
        folder, order = home.parent, reading_order(home.parent)
        there = [path.stem for path in folder.glob("[!_]*.py")] + [path.parent.name for path in folder.glob("*/__init__.py")]
        if folder != ROOT / "hetpipe" and folder.parent.name not in ("partitioners", "models") and order != [""]:
            assert sorted(name for name in order if "/" not in name) == sorted(there), home
    for room in (room for floor in floors() for room in floor):
        place = places(ROOT / "hetpipe" / room)
        for module, here in place.items():
            path = ROOT.joinpath(*module.split("."))
            for below in imported(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")) & place.keys():
                assert place[below] < here, f"{module} needs {below}, which comes after it"


def test_contributing_shows_the_rooms_as_they_are() -> None:
    text = HOME.read_text()
    assert with_picture(text) == text, "run: make rooms"


def test_the_words_of_the_planners_are_said_where_the_table_says() -> None:
    home = ROOT / "partitioners"
    rows = re.findall(r"^\| (.+) \| .+ \| `(.+\.py)`", (home / "__init__.py").read_text(), re.M)
    assert len({word for word, _ in rows}) == len(rows) > 20
    assert [file for _, file in rows if not (home / file).exists() and not (ROOT / file).exists()] == []


def test_imports_among_the_planners_go_down_the_list_of_their_docstring() -> None:
    """With at most ten files in a room. A name is a room's, or that of a file beside them."""
    home, height = ROOT / "partitioners", dict[str, int]()
    docstring = ast.get_docstring(ast.parse((home / "__init__.py").read_text())) or ""
    for number, line in enumerate(re.split(r"\n(?! )", docstring.rpartition(":\n\n")[2])):
        height |= dict.fromkeys(line.replace(",", " ").split(), -number)
    rooms = {path.parent.name for path in home.glob("*/__init__.py")}  # other folders may hold what was compiled once
    assert rooms | {path.stem for path in home.glob("[!_]*.py")} == height.keys()
    for file in home.rglob("*.py"):
        here = height.get(file.relative_to(home).with_suffix("").parts[0], 1)
        assert len(list(file.parent.glob("[!_]*.py"))) <= 10 or file.parent == home, file.parent
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hetpipe.partitioners"):
                below = (node.module or "").split(".")[2]
                assert below == file.parent.name or height[below] < here, (file, below)
