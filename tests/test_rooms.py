"""The rooms: imports go down, and CONTRIBUTING.md shows them as they are."""

from __future__ import annotations

from tests.rooms import HOME, ROOT, floors, up, with_picture


def test_no_import_goes_up() -> None:
    assert up() == []


def test_every_room_is_on_a_floor_and_has_at_most_ten_files() -> None:
    there = {path.parent.name for path in (ROOT / "hetpipe").glob("*/__init__.py")} - {"partitioners", "models"}
    assert {room for floor in floors() for room in floor} == there
    for room in there:
        assert len(list((ROOT / "hetpipe" / room).glob("[!_]*.py"))) <= 10, room


def test_contributing_shows_the_rooms_as_they_are() -> None:
    text = HOME.read_text()
    assert with_picture(text) == text, "run: make rooms"
