"""YAML and JSON as plain values: what is too much or no value at all is refused where it stands, by both in the same words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetpipe.files.limits import LARGEST_INTEGER, MOST_LEVELS
from hetpipe.files.parsing import ParseError, parse_json, parse_yaml

LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED_LAUGHS = "a: &a {k: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

YAML_REFUSED = [
    (LAUGHS, "line 6, column 8: more than 100000 values, an alias counted as all that it stands for"),
    (MERGED_LAUGHS, "more than 100000 values, an alias counted as all that it stands for"),
    ("a: &a [1, *a]", "line 1, column 11: the alias 'a' stands in what it stands for"),
    ("[" * 20_000, "line 1, column 101: more than 100 levels of mappings and lists"),
    ("- " * 20_000, "more than 100 levels of mappings and lists"),
    ("{a: " * 20_000, "more than 100 levels of mappings and lists"),
    ("a: !!int abc", "line 1, column 4: cannot read this as int (invalid literal for int() with base 10: 'abc')"),
    ("a: !!int ''", "line 1, column 4: cannot read this as int"),
    ("a: !!float x", "line 1, column 4: cannot read this as float"),
    ("a: !!bool x", "line 1, column 4: cannot read this as bool"),
    ("a: 0x_", "line 1, column 4: cannot read this as int"),
    (f"a: {'1' * 5_000}", "line 1, column 4: cannot read this as int (Exceeds the limit (4300 digits)"),
    (f"a: [b, {{c: {'1' * 30}}}]", f"a.1.c: a whole number of about 29 digits, the largest here is {LARGEST_INTEGER}"),
    ("a: !!timestamp 2001-01-01", "line 1, column 4: timestamp is no plain value"),
    ("a: !!binary aGk=", "line 1, column 4: binary is no plain value"),
    ("a: !!set {b, c}", "set is no plain value"),
    ("!!python/object/apply:os.system ['true']", "could not determine a constructor for the tag"),
    ("a: 1\na: 2", "line 2, column 1: the key 'a' is given twice"),
    ("? [1]\n: 2", "line 1, column 3: found unhashable key"),
    ('a: "x\\0"', "not usable: a: the text holds a NUL character"),
    ('a: ["\\ud800"]', "not usable: a.0: the text holds half of a surrogate pair"),
    ('"\\UFFFFFFFF"', "not valid YAML"),
    (f"%YAML {'1' * 5_000}.1\n--- a", "not valid YAML"),
    ("a\0b", "not valid YAML"),
    ("!!map a", "expected a mapping node, but found scalar"),
    ("---\na\n---\nb", "but found another document"),
]  # fmt: skip

JSON_REFUSED = [
    ("[" * 20_000, "more than 100 levels of mappings and lists"),
    ("[" * 500 + "]" * 500, "more than 100 levels of mappings and lists"),
    ('{"a": ' * 200 + "1" + "}" * 200, "more than 100 levels of mappings and lists"),
    ("1" * 5_000, f"a whole number has 5000 digits, the largest here is {LARGEST_INTEGER}"),
    ('{"a": [1, {"b": -9999999999999999999999}]}', "not usable: a.1.b: a whole number of about 22 digits"),
    ('{"a": 1, "b": {"c": 1, "c": 2}}', "not valid JSON: the key 'c' is given twice"),
    ('{"a": ["\\ud800"]}', "not usable: a.0: the text holds half of a surrogate pair"),
    ('{"\\udfff": 1}', "not usable: the key \\udfff: the text holds half of a surrogate pair"),
    ('{"folder": "a\\u0000b"}', "not usable: folder: the text holds a NUL character"),
    ('{"a": 1', "not valid JSON: line 1, column 8: Expecting ',' delimiter"),
    ("", "not valid JSON: line 1, column 1: Expecting value"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), YAML_REFUSED, ids=[text[:20] for text, _ in YAML_REFUSED])
def test_what_yaml_is_refused_and_where(text: str, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_yaml(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), JSON_REFUSED, ids=[text[:20] for text, _ in JSON_REFUSED])
def test_what_json_is_refused_and_where(text: str, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_json(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2001-99-99", {"a": "2001-99-99"}),
        ("2001-01-01: 2001-01-01T10:00:00", {"2001-01-01": "2001-01-01T10:00:00"}),
        ("[1e-3, 2E5, .5, 1_000, 0x1F]", [0.001, 2e5, 0.5, 1000, 31]),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}\ne: [*x, *x]", {"a": {"b": 1}, "c": {"b": 1, "d": 2}, "e": [{"b": 1}] * 2}),
        (f"{LARGEST_INTEGER}", LARGEST_INTEGER),
        ("a: !!str 5", {"a": "5"}),
        ("[" * MOST_LEVELS + "]" * MOST_LEVELS, None),
        ("é: 🙂", {"é": "🙂"}),
    ],
)  # fmt: skip
def test_what_yaml_means(text: str, value: Any) -> None:
    assert value is None or parse_yaml(text) == value


def test_what_json_means() -> None:
    """A pair of surrogates is a character; NaN is refused by the key that wants a number."""
    value = {"a": [1, 2.5, None, True, "x"], "🙂": {"b": "🙂"}}
    assert parse_json(json.dumps(value)) == parse_yaml(json.dumps(value, ensure_ascii=False)) == value
    assert parse_json("[NaN, -Infinity, 1e400]")[1:] == [float("-inf"), float("inf")]
    assert parse_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)
