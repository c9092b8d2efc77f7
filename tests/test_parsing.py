"""YAML and JSON as plain values: what is too much or no value at all is refused where it stands, by both in the same words."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml

from hetpipe.files.limits import LARGEST_INTEGER, MOST_LEVELS
from hetpipe.files.parsing import ParseError, parse_json, parse_yaml, yaml_text

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
    ("a: !!int abc", "line 1, column 4: cannot read this as int ('abc' is none in YAML 1.2)"),
    ("a: !!int 1_000", "cannot read this as int ('1_000' is none in YAML 1.2)"),
    ("a: !!int 0b101", "cannot read this as int ('0b101' is none in YAML 1.2)"),
    ("a: !!bool yes", "cannot read this as bool ('yes' is none in YAML 1.2)"),
    ("a: !!null x", "cannot read this as null ('x' is none in YAML 1.2)"),
    ("a: !!int ''", "line 1, column 4: cannot read this as int"),
    ("a: !!float x", "line 1, column 4: cannot read this as float"),
    ("a: !!bool x", "line 1, column 4: cannot read this as bool"),
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
]

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
]


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
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}\ne: [*x, *x]", {"a": {"b": 1}, "c": {"b": 1, "d": 2}, "e": [{"b": 1}] * 2}),
        (f"{LARGEST_INTEGER}", LARGEST_INTEGER),
        ("a: !!str 5", {"a": "5"}),
        ("[" * MOST_LEVELS + "]" * MOST_LEVELS, None),
        ("é: 🙂", {"é": "🙂"}),
    ],
)
def test_what_yaml_means(text: str, value: Any) -> None:
    assert value is None or parse_yaml(text) == value


INFINITE = float("inf")
SPELLINGS: list[tuple[str, Any]] = [  # of YAML 1.2's core schema, and what it takes for text
    *[(text, None) for text in ("null", "Null", "NULL", "~", "")],
    ("nUll", "nUll"),
    ("none", "none"),
    *[(text, True) for text in ("true", "True", "TRUE")],
    *[(text, False) for text in ("false", "False", "FALSE")],
    *[(text, text) for text in ("yes", "Yes", "NO", "no", "on", "Off", "y", "n", "tRue")],
    ("0", 0),
    ("-0", 0),
    ("+12", 12),
    ("-19", -19),
    ("012", 12),
    ("-007", -7),
    ("0o14", 12),
    ("0xC", 12),
    ("0xfF", 255),
    ("08", 8),
    ("0o8", "0o8"),
    ("0O14", "0O14"),
    ("0x", "0x"),
    ("-0x1", "-0x1"),
    ("0b101", "0b101"),
    ("0x_", "0x_"),
    ("1_000", "1_000"),
    ("1:30", "1:30"),
    ("12:30:45", "12:30:45"),
    ("190:20:30.15", "190:20:30.15"),
    ("1_0.5", "1_0.5"),
    ("1.", 1.0),
    ("-.5", -0.5),
    ("1e-3", 0.001),
    ("2E5", 2e5),
    ("+12e03", 12e3),
    ("1.5e+2", 150.0),
    (".", "."),
    ("1e", "1e"),
    ("1.2.3", "1.2.3"),
    ("1e400", INFINITE),
    ("e5", "e5"),
    ("+", "+"),
    ("--1", "--1"),
    (".inf", INFINITE),
    ("-.INF", -INFINITE),
    ("+.Inf", INFINITE),
    (".iNf", ".iNf"),
    ("inf", "inf"),
    ("nan", "nan"),
    ("2001-12-14", "2001-12-14"),
    ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
    ("=", "="),
    ("<<", "<<"),
]


@pytest.mark.parametrize(("text", "value"), SPELLINGS, ids=[text for text, _ in SPELLINGS])
def test_how_scalars_are_spelled(text: str, value: Any) -> None:
    """The types, too: 1.0 is not 1, nor is true."""
    for document in (f"a: {text}", f"{{a: {text}}}", f"a: {text}\nb: 1") if text != "<<" else ("a: '<<'",):
        found = parse_yaml(document)["a"]
        assert (found, type(found)) == (value, type(value))
    if text:
        assert parse_yaml(f"a: '{text}'") == parse_yaml(f"a: !!str {text}") == {"a": text}
        assert parse_yaml(yaml_text({text: [text, {"b": text}]})) == {text: [text, {"b": text}]}
        assert yaml.safe_load(yaml_text([text, value])) == [text, value], "a reader of YAML 1.1 reads the same"


def test_no_number() -> None:
    assert all(map(math.isnan, parse_yaml("[.nan, .NaN, .NAN]")))


def test_what_json_means() -> None:
    """A pair of surrogates is a character; NaN is refused by the key that wants a number."""
    value = {"a": [1, 2.5, None, True, "x"], "🙂": {"b": "🙂"}}
    assert parse_json(json.dumps(value)) == parse_yaml(json.dumps(value, ensure_ascii=False)) == value
    assert parse_json("[NaN, -Infinity, 1e400]")[1:] == [float("-inf"), float("inf")]
    assert parse_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)
