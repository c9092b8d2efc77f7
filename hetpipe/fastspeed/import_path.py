"""The model's import path (`package.module:Class`), read from FastSpeed's `model_name` and its import lines. FastSpeed pastes
both into a program that it runs; here they are parsed, and nothing is imported or executed."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from hetpipe.files.messages import InputError, nearest

_WHERE = "strategy.runing_dependency"


def import_path(model_name: str, lines: Sequence[str]) -> str:
    """Where `model_name` comes from: `from a.b import C` gives `a.b:C`; so does `from a.b import *` where no other line names it.
    A name with dots goes through a module: `import a.b as x` and `x.C`, or `from a import b` and `b.C`, give `a.b:C`.
    InputError for a line that is anything but an import, and where the name's home cannot be told."""
    names = model_name.split(".")
    if not all(name.isidentifier() for name in names):
        raise InputError(
            f"strategy.model_name {model_name!r} is not a name; write a class or a function, as in 'AlexNet' or 'models.AlexNet'"
        )
    homes, stars = _bindings([statement for line in lines for statement in _imports(line)])
    for count in range(len(names), 0, -1):
        home, rest = homes.get(".".join(names[:count])), names[count:]
        if home is not None:
            return _target(home, rest, model_name)
    if len(stars) == 1:
        return f"{stars[0]}:{model_name}"
    if stars:
        raise InputError(
            f"strategy.model_name {model_name!r} may come from any of the modules {', '.join(stars)}, of which {_WHERE} "
            f"imports everything; say which: 'from {stars[0]} import {names[0]}'"
        )
    raise InputError(
        f"strategy.model_name {model_name!r} is imported by no line of {_WHERE}{nearest(names[0], sorted(homes))}"
        if homes
        else f"strategy.model_name {model_name!r}: {_WHERE} imports nothing; add 'from package.module import {names[0]}'"
    )


def _imports(line: str) -> list[ast.Import | ast.ImportFrom]:
    """The statements of one line; InputError if one is not a plain import."""
    try:
        body = ast.parse(line.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise InputError(f"{_WHERE}: {line[:120]!r} is not Python ({reason}); write a plain import") from None
    found: list[ast.Import | ast.ImportFrom] = []
    for statement in body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            raise InputError(
                f"{_WHERE}: {line[:120]!r} is not a plain import but runs code ({type(statement).__name__}); write "
                "'from package.module import Class' and put the rest into that module"
            )
        if isinstance(statement, ast.ImportFrom) and statement.level:
            raise InputError(
                f"{_WHERE}: {line[:120]!r} is relative, and there is no package it could be relative to; write the whole path"
            )
        found.append(statement)
    return found


def _bindings(statements: Sequence[ast.Import | ast.ImportFrom]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Name → (module, name in it, "" for the module itself), the last line winning; and the modules imported with a star."""
    homes: dict[str, tuple[str, str]] = {}
    stars: list[str] = []
    for statement in statements:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                homes[alias.asname or alias.name] = (alias.name, "")
                if alias.asname is None:  # `import a.b` binds a
                    first = alias.name.split(".")[0]
                    homes[first] = (first, "")
            elif alias.name == "*":
                stars.append(str(statement.module))
            else:
                homes[alias.asname or alias.name] = (str(statement.module), alias.name)
    return homes, list(dict.fromkeys(stars))


def _target(home: tuple[str, str], rest: Sequence[str], model_name: str) -> str:
    module, name = home
    if rest:
        return f"{module}.{name}:{'.'.join(rest)}" if name else f"{module}:{'.'.join(rest)}"
    if not name:
        raise InputError(f"strategy.model_name {model_name!r} is the module {module!r}, not a class; write '{model_name}.Class'")
    return f"{module}:{name}"
