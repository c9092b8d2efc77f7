"""Text → plain values (mappings, lists, texts, numbers, booleans, nothing): YAML and JSON, with the same limits and the same
errors. No tags but those of plain values, no code. Which spelling of a scalar is what: YAML 1.2's core schema (YAML 1.2.2,
section 10.3.2), not PyYAML's YAML 1.1, in which 1:30 is ninety, 012 ten, 1_000 a thousand, 1e-3 a text, and yes is true."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from hetpipe.files.limits import LARGEST_INTEGER, MOST_LEVELS, MOST_YAML_VALUES

_TAG = "tag:yaml.org,2002:"
_DIGITS = 4_000  # more than Python reads at once is no number of ours either


class ParseError(ValueError):
    """Text that cannot be read. The message goes on behind "FILE is …"."""


_SPELLINGS = {  # of the core schema: the kind of a scalar, and the characters with which it begins
    "null": (re.compile(r"null|Null|NULL|~|"), ["n", "N", "~", ""]),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    "int": (re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), list("-+0123456789")),
    "float": (
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
        list("-+.0123456789"),
    ),
}
_BASES = {"0o": 8, "0x": 16}


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of the core schema, in which no key stands twice in a mapping; `<<` merges, as it does in YAML 1.1.
    Levels and values are counted while nodes are composed, an alias as all that it stands for, and nothing is built of what has
    too many."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._levels, self._values = 0, 0
        self._size_of: dict[int, int] = {}  # by id of a node that is whole

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event, before = self.peek_event(), self._values  # type: ignore[no-untyped-call]
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise _refused(event, f"more than {MOST_LEVELS} levels of mappings and lists")
        node = super().compose_node(parent, index)
        self._levels -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._values += 1
            self._size_of[id(node)] = self._values - before
        elif id(node) in self._size_of:
            self._values += self._size_of[id(node)]
        else:
            raise _refused(event, f"the alias {event.anchor!r} stands in what it stands for")
        if self._values > MOST_YAML_VALUES:
            raise _refused(event, f"more than {MOST_YAML_VALUES} values, an alias counted as all that it stands for")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError) as error:  # int("abc"), int("") of 0x_, 5,000 digits, !!bool x
            kind, reason = node.tag.removeprefix(_TAG), str(error).partition(";")[0]
            raise ConstructorError(None, None, f"cannot read this as {kind} ({reason})", node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                if key.value in seen:
                    raise ConstructorError(None, None, _twice(key.value), key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refused(event: yaml.Event, why: str) -> ComposerError:
    return ComposerError(None, None, why, event.start_mark)  # type: ignore[arg-type]


def _no_plain_value(loader: _Loader, node: yaml.Node) -> Any:
    raise ConstructorError(None, None, f"{node.tag.removeprefix(_TAG)} is no plain value", node.start_mark)


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """The value of a scalar of _SPELLINGS, whose kind was resolved or is its tag."""
    text, kind = loader.construct_scalar(node), node.tag.removeprefix(_TAG)
    if _SPELLINGS[kind][0].fullmatch(text) is None:
        raise ValueError(f"{text[:80]!r} is none in YAML 1.2")
    if kind == "int":
        return int(text, _BASES.get(text[:2], 10))
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return None if kind == "null" else text.lower() == "true"


def _resolvers(*others: type[yaml.resolver.BaseResolver]) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """By the first character of a scalar, which patterns say what it is: those of the core schema, of merges, and of `others`."""
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {"<": [(f"{_TAG}merge", re.compile(r"<<\Z"))]}
    for kind, (pattern, firsts) in _SPELLINGS.items():
        for first in firsts:
            found.setdefault(first, []).append((_TAG + kind, re.compile(rf"(?:{pattern.pattern})\Z")))
    for other in others:
        for first, pairs in other.yaml_implicit_resolvers.items():
            found.setdefault(first, []).extend(pairs)
    return found


for _kind in ("timestamp", "binary", "set", "omap", "pairs"):
    _Loader.add_constructor(_TAG + _kind, _no_plain_value)
for _kind in _SPELLINGS:
    _Loader.add_constructor(_TAG + _kind, _scalar)
_Loader.yaml_implicit_resolvers = _resolvers()


class _Dumper(yaml.SafeDumper):
    """Quotes each text that is none without quotes in YAML 1.2 or in YAML 1.1."""


_Dumper.yaml_implicit_resolvers = _resolvers(yaml.SafeDumper)


def yaml_text(value: Any) -> str:
    """Plain values as YAML, which everybody reads as the same values."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def parse_yaml(text: str) -> Any:
    """YAML as plain values; ParseError where it is none, or too much."""
    try:
        return checked(yaml.load(text, _Loader))  # a SafeLoader
    except ParseError:
        raise
    except yaml.MarkedYAMLError as error:
        mark, context = error.problem_mark or error.context_mark, f" ({error.context})" if error.context else ""
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ParseError(f"not valid YAML: {where}{error.problem or error.context}{context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also an escape beyond Unicode, a version of 5,000 digits
        raise ParseError(f"not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ParseError(f"not valid YAML: more than {MOST_LEVELS} levels of mappings and lists") from None


def parse_json(text: str, largest: float = LARGEST_INTEGER) -> Any:
    """JSON as plain values; ParseError where it is none, or too much (whole numbers above `largest`). NaN and Infinity are read,
    as YAML's .nan and .inf are: whoever wants a number refuses them by their key."""
    try:
        return checked(json.loads(text, object_pairs_hook=_mapping, parse_int=_integer), largest)
    except json.JSONDecodeError as error:
        raise ParseError(f"not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ParseError(f"not valid JSON: more than {MOST_LEVELS} levels of mappings and lists") from None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ParseError(f"not valid JSON: {_twice(twice)}")
    return found


def _twice(key: str) -> str:
    return f"the key {key[:80]!r} is given twice"


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ParseError(f"not usable: a whole number has {len(digits)} digits, {_LARGEST}")
    return int(digits)


_LARGEST = f"the largest here is {LARGEST_INTEGER}"


def checked(value: Any, largest: float = LARGEST_INTEGER) -> Any:
    """The value, if it is not nested too deeply and every text and whole number in it (up to `largest`) can be used; else a
    ParseError that says where. Level by level, so that no depth is too much for it."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_LEVELS:
            raise ParseError(f"not usable: it has more than {MOST_LEVELS} levels of mappings and lists")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str | int) and _fault(item, largest):
                where, found = next((w, f) for w, item in _places(value) if (f := _fault(item, largest)))
                raise ParseError(f"not usable: {where}: {found}")
        level = below
    return value


def _fault(value: Any, largest: float) -> str:
    if isinstance(value, str):
        if "\0" in value:
            return "the text holds a NUL character"
        return "" if value.isascii() or not re.search("[\ud800-\udfff]", value) else "the text holds half of a surrogate pair"
    if isinstance(value, int) and abs(value) > largest:
        return f"a whole number of about {value.bit_length() * 3 // 10} digits, {_LARGEST}"
    return ""


def _places(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every key and value with the keys that lead to it; not deeper than MOST_LEVELS."""
    yield where or "top level", value
    if isinstance(value, dict):
        for key, inner in value.items():
            place = ascii(key)[1:-1][:60] if isinstance(key, str) else str(key)[:60]
            yield f"the key {place}", key
            yield from _places(inner, f"{where}.{place}" if where else place)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _places(inner, f"{where}.{i}" if where else str(i))
