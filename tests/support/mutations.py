"""Files as damage, other programs and other people leave them: mutations of a whole file, for the fuzz."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]
CODE = "!!python/object/apply:os.mkdir [seen]"  # what loads it must not run it
LAUGHS = "b: &b [1, 1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("bcdefgh", "cdefghi", strict=True)
)
VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3.0,
    2.5,
    -0.0,
    1e-320,
    1e300,
    10**9,
    2**31,
    10**18,
    10**30,
    float("inf"),
    float("nan"),
    "",
    "x",
    "3",
    "nan",
    "x" * 5_000,
    "\ud800",
    "a\0b",
    "\x1b[31m",
    "é🙂",
    "../../x",
    "/",
    "~nobody-of-this-name",
    "2001-99-99",
    "0x_",
    "1e400 GiB",
    "5 parsecs",
    "0..999999999",
    "a:b",
    "os:mkdir",
    "None",
    "{}",
    [],
    {},
    [[]],
    [None],
    {"x": 1},
    {"": []},
    [1] * 3,
    ["x"] * 2_000,
    {str(i): i for i in range(2_000)},
    DEEP,
]
TOKENS = [
    "[" * 20_000,
    "{a: " * 5_000,
    "- " * 5_000,
    "1" * 5_000,
    "&a [*a]",
    "*a",
    "!!int abc",
    "!!binary x",
    "0x_",
    "2001-99-99",
    ".inf",
    "1e400",
    "NaN",
    "Infinity",
    '"\\ud800"',
    '"\\u0000"',
    '"\\UFFFFFFFF"',
    "\0",
    "\ufeff",
    "\t",
    "\n",
    ":",
    ",",
    "}",
    "]",
    '"',
    "'",
    "%YAML 9",
    "---\n",
    "<<: 1",
    "? ",
    "| ",
    "é",
    CODE,
    LAUGHS,
]
BYTES = [b"", b"\0", b"\xff\xfe", b"\x80\x81", b"PK\x03\x04", b"\x93NUMPY", b"\xff" * 8, b"\0" * 4_096, b"A" * 100]


class Change(NamedTuple):
    """One mutation; where it does what is up to the file."""

    how: str
    where: int
    other: int


STRUCTURE = ("value", "value", "value", "value", "delete", "rename", "unknown", "swap", "repeat", "wrap", "lists")
TEXT = ("cut", "token", "token", "drop", "byte", "twice")
numbers = st.integers(0, 10**9)


def changes(kinds: tuple[str, ...], most: int = 2) -> st.SearchStrategy[list[Change]]:
    """A few changes, the last of which may be one of text."""
    one = st.builds(Change, st.sampled_from(kinds), numbers, numbers)
    return st.lists(one, min_size=1, max_size=most)


DOCUMENT = st.one_of(changes(STRUCTURE), changes(STRUCTURE), changes(TEXT))
BINARY = changes(("cut", "byte", "drop", "flip", "flip", "flip"), 3)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutated(document: Any, given: list[Change], name: str) -> bytes:
    """The document as a file of this name has it, after the changes: as JSON, or in half of all .yaml files in blocks."""
    document = copy.deepcopy(document)
    for change in given:
        if change.how in STRUCTURE:
            document = _changed(document, change)
    blocks = name.endswith(".yaml") and given[0].other % 2 and DEEP not in (document, *(c[k] for c, k in places(document)))
    text = yaml.safe_dump(document, sort_keys=False) if blocks else json.dumps(document)
    data = text.encode("utf-8", "surrogatepass")
    for change in given:
        if change.how in TEXT:
            data = _damaged(data, change)
    return data


def _changed(document: Any, change: Change) -> Any:
    found = list(places(document))
    value = copy.deepcopy(VALUES[change.other % len(VALUES)])
    if not found or change.where % 97 == 0:
        return value
    holder, key = found[change.where % len(found)]
    if change.how == "value":
        holder[key] = value
    elif change.how == "delete":
        del holder[key]
    elif change.how == "rename" and isinstance(holder, dict):
        holder[value if isinstance(value, str) else f"{key}s"] = holder.pop(key)
    elif change.how == "unknown" and isinstance(holder, dict):
        holder["surplus"] = value
    elif change.how == "swap":
        there, other = found[change.other % len(found)]
        if not _inside(holder[key], there) and not _inside(there[other], holder):
            holder[key], there[other] = there[other], holder[key]
    elif change.how == "repeat" and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(1 + change.other % 200)]
    elif change.how in ("wrap", "lists"):
        holder[key] = [holder[key]] if change.how == "wrap" else {"x": holder[key]}
    return document


def _inside(outer: Any, inner: Any) -> bool:
    return outer is inner or any(container is inner or container[key] is inner for container, key in places(outer))


def _damaged(data: bytes, change: Change) -> bytes:
    at = change.where % (len(data) + 1)
    if change.how == "cut":
        return data[:at]
    if change.how == "token":
        token = TOKENS[change.other % len(TOKENS)].encode("utf-8", "surrogatepass")
        return token + data if change.other % 7 == 0 else data[:at] + token + data[at:]
    if change.how == "drop":
        return data[:at] + data[at + 1 + change.other % 20 :]
    if change.how == "byte":
        return data[:at] + BYTES[change.other % len(BYTES)] + data[at:]
    return data + data


def damaged(data: bytes, given: list[Change]) -> bytes:
    """Bytes after the changes: cut, dropped, flipped, put in."""
    for change in given:
        if change.how != "flip":
            data = _damaged(data, change)
        elif data:  # mostly one of the first bytes, which say what the others are
            at = change.where % min(len(data), 600 if change.other % 4 else len(data))
            data = data[:at] + bytes([data[at] ^ (1 << change.other % 8)]) + data[at + 1 :]
    return data
