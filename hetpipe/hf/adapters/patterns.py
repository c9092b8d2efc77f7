"""Names by which peft finds the modules of a model: those that get adapters, and those that are saved as a whole."""

from __future__ import annotations

import re
from collections.abc import Collection

from hetpipe.files.messages import natural_key
from hetpipe.layers.adapters.folder import PREFIX


def target_modules(paths: Collection[str], known: Collection[str] | None, *, short: bool) -> list[str] | str:
    """What adapts these modules of a model, and no others of those that are `known`: if `short`, the ends of their names (q_proj)
    where that does; else the names; or a regular expression, where a name is also the end of another's, or none are known."""
    for names in _choices(paths, short) if known is not None else []:
        if {name for name in known or () if any(name == end or name.endswith(f".{end}") for end in names)} == {*paths}:
            return names
    return "|".join(map(re.escape, sorted(paths, key=natural_key)))


def modules_to_save(
    paths: Collection[str], known: Collection[str] | None, adapted: Collection[str], *, short: bool
) -> list[str] | None:
    """What lets peft take these modules as a whole, likewise, and adapt those that are `adapted`. Where no name does, it is that
    of the file, with its prefix: peft then finds no such module, and loads the tensors into the model itself."""
    for names in _choices(paths, short) if known is not None else []:
        if _saves(names, paths, known or (), adapted):
            return names or None
    sure = {path for path in paths if known is not None and _saves([path], [path], known, adapted)}
    return sorted(path if path in sure else f"{PREFIX}{path}" for path in paths) or None


def _choices(paths: Collection[str], short: bool) -> list[list[str]]:
    whole, ends = sorted(paths, key=natural_key), sorted({path.rpartition(".")[2] for path in paths})
    return [ends, whole] if short else [whole]


def _saves(names: Collection[str], paths: Collection[str], known: Collection[str], adapted: Collection[str]) -> bool:
    """Whether peft saves just these modules by these names: it takes each whose name ends with the letters of one, and adapts
    none in whose name one stands between dots."""
    taken = {name for name in known if name.endswith(tuple(names))}
    return taken == {*paths} and not any(re.match(rf"(^|.*\.){end}($|\..*)", name) for end in names for name in adapted)
