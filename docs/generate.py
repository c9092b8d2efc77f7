"""The parts of the reference that the software writes itself: each command, and each format with an example of every key."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hetpipe.cli.commands import FORMATS, app
from hetpipe.files.formats import Document, Strict

EXAMPLES = Path(__file__).parent / "reference" / "examples"
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def filled(page: str) -> str:
    """The page with its marks replaced by what they stand for."""
    parts = {"commands": commands, "formats": formats}
    return MARK.sub(lambda found: parts[found[1]](), page)


def examples(name: str) -> list[Mapping[str, Any]]:
    """The example documents of a format."""
    files = sorted(path for path in EXAMPLES.glob("*.yaml") if path.stem.split("-")[0] == name)
    return [yaml.safe_load(path.read_text("utf-8")) for path in files]


def commands() -> str:
    """A section for each command: how it is called, what it does, its arguments and options."""
    return "\n".join(_command(path, command) for path, command in tree(typer.main.get_command(app)))


def tree(command: Any, path: str = "hetpipe") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    if not hasattr(command, "commands"):
        yield path, command
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from tree(inner, f"{path} {name}")


def _command(path: str, command: Any) -> str:
    given = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([path, *(_called(p) for p in given), "[OPTIONS]"])
    lines = [f"## {path}", "", command.help or "", "", f"    {usage}", ""]
    options = [p for p in command.params if p.name != "help"]
    if options:
        hints = get_type_hints(command.callback)
        rows = [_option(option, hints.get(option.name)) for option in options]
        lines += ["| argument or option | | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _called(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name).strip("{}").upper() + ("..." if parameter.nargs == -1 else "")


def _option(option: Any, hint: Any) -> str:
    name = ", ".join(f"`{word}`" for word in option.opts) if option.param_type_name == "option" else f"`{_called(option)}`"
    choices = _kind(hint) if get_origin(hint) is Literal else ""
    text = " ".join(part for part in (option.help, choices) if part)
    default = "required" if option.required else "" if option.default in (None, False, "", (), []) else f"`{option.default}`"
    return f"| {name} | {_cell(text)} | {default} |"


def formats() -> str:
    """A section for each format: for each of its parts what the keys may be, their defaults, and an example of each."""
    return "\n".join(f"## {name}\n\n{_parts(model, examples(name))}" for name, model in FORMATS.items())


def parts(model: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every part of a format with its place: ("", Cluster), ("nodes[]", Node), ("nodes[].link", Link), …"""
    yield place, model
    for name, field in model.model_fields.items():
        for mark, inner in _models(field.annotation):
            if not issubclass(inner, Document):
                yield from parts(inner, f"{place}.{key_of(name, field)}{mark}".removeprefix("."))


def key_of(name: str, field: Any) -> str:
    """What a file calls it."""
    return field.alias or name


def _models(annotation: Any, mark: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The parts that a key's value is made of, and whether it holds several: in a list ([]), or under names (.*)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield mark, annotation
        return
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _models(inner[0], mark)
    elif origin in (Union, types.UnionType):
        for each in inner:
            yield from _models(each, mark)
    elif origin in (tuple, list, Sequence):
        yield from _models(inner[0], mark + "[]")
    elif origin in (dict, Mapping):
        yield from _models(inner[1], mark + ".*")


def values(document: Any, place: str) -> Iterator[Any]:
    """What stands at a place of an example."""
    if not place:
        yield document
        return
    first, _, rest = place.partition(".")
    if first == "*":
        inner = list(document.values())
    else:
        key, several = first.removesuffix("[]"), first.endswith("[]")
        found = document.get(key)
        inner = [] if found is None else list(found) if several else [found]
    for each in inner:
        yield from values(each, rest)


def _parts(model: type[BaseModel], documents: Sequence[Mapping[str, Any]]) -> str:
    lines: list[str] = []
    seen: dict[type[BaseModel], str] = {}
    for place, part in parts(model):
        if place:
            lines += [f"### `{place}`", ""]
        if part in seen:
            lines += [f"The same keys as `{seen[part]}`.", ""]
            continue
        seen[part] = place
        found = [value for document in documents for value in values(document, place)]
        lines += [_about(part), "", "| key | what it may be | default | example |", "|---|---|---|---|"]
        lines += [_key(key_of(name, field), field, found) for name, field in part.model_fields.items()]
        lines.append("")
    return "\n".join(lines)


def _about(part: type[BaseModel]) -> str:
    """What a part's docstring says, and those of the parts whose keys it has, too."""
    classes = [c for c in part.__mro__ if issubclass(c, BaseModel) and c not in (BaseModel, Strict, Document)]
    return " ".join(" ".join((c.__doc__ or "").split()) for c in classes)


def _key(key: str, field: Any, found: Sequence[Any]) -> str:
    example = next((value[key] for value in found if isinstance(value, Mapping) and key in value), None)
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        shown = "required"
    elif isinstance(default, BaseModel):
        shown = "its defaults"
    else:
        shown = "" if default in (None, (), {}) else f"`{_text(default)}`"
    shown_example = "below" if any(_models(field.annotation)) else f"`{_cell(_text(example))}`"
    return f"| `{key}` | {_cell(_kind(field.annotation))} | {shown} | {shown_example} |"


def _text(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


OWN = "keys of its own"
PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "a text": "texts", OWN: "parts with keys of their own"}
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Any: "any value", type(None): ""}


def _kind(annotation: Any) -> str:
    """What a key may be, in words."""
    if annotation in KINDS:
        return KINDS[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, map(_kind, inner)))
    if origin is tuple:
        return f"a list of {_several(inner[0])}" if inner[-1] is Ellipsis else "[" + ", ".join(map(_kind, inner)) + "]"
    if origin is dict:
        return f"names, each with {_kind(inner[1])}"
    return OWN


def _several(annotation: Any) -> str:
    kind = _kind(annotation)
    return PLURALS.get(kind, f"lists: {kind}" if kind.startswith("[") else kind.replace("a list of", "lists of"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
