"""Where partitioners, models, data sets and observers are found (the room `building` makes the objects). The only way
from `hetpipe/` to `hetpipe.partitioners` and `hetpipe.models`, by name and when first used; other packages add
theirs by entry points (`setup.py` lists the groups)."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError, nearest
from hetpipe.planning.partition import Partitioner

DATASETS = {
    "chat": "hetpipe.language.conversations",
    "instructions": "hetpipe.language.conversations",
    "preferences": "hetpipe.language.conversations",
    "text": "hetpipe.language.documents",
    "latents": "hetpipe.diffusion.latents",
    "random_latents": "hetpipe.diffusion.random",
    "cifar10": "hetpipe.building.datasets",
    "random_classification": "hetpipe.building.datasets",
    "source_packages": "hetpipe.building.texts",
    "function_docs": "hetpipe.building.texts",
}


def partitioner_names() -> list[str]:
    """All known partitioners."""
    return _names("hetpipe.partitioners", dash=True)


@cache
def rules() -> tuple[Any, ...]:
    """The simple rules, by name: those of our partitioners that have `candidates`, whose drafts `auto` tries, too. Whoever lists
    rules takes them from here. All of our partitioners are imported for that."""
    package = "hetpipe.partitioners"
    each = [import_module(f"{package}.{name}").partitioner for name in _modules(package)]
    return tuple(sorted((one for one in each if hasattr(one, "candidates")), key=lambda one: str(one.name)))


def model_names() -> list[str]:
    """All known models."""
    return _names("hetpipe.models")


def dataset_names() -> list[str]:
    """All known data sets."""
    return sorted({*DATASETS, *_points("hetpipe.datasets")})


def check_partitioner(name: str) -> None:
    """InputError naming the nearest partitioner if there is none of this name, or if another package's cannot be loaded. Ours
    are not imported, which takes seconds."""
    point = _points("hetpipe.partitioners").get(name)
    if point is not None:
        load_point(point)
    else:
        _check("partitioner", name, partitioner_names())


def check_names(job: Job) -> None:
    """InputError if there is no model, no data or no partitioner of the job's names. None of ours is imported, so that it is
    known before anything starts."""
    check_partitioner(job.plan.partitioner)
    for what, section, known in (("model", job.model, model_names), ("data", job.data, dataset_names)):
        if section.name is not None:
            _check(what, section.name, known())


def partitioner(name: str) -> Partitioner:
    """The partitioner of this name; InputError naming the nearest one if there is none."""
    found = _find("partitioner", name, "hetpipe.partitioners", "partitioner", partitioner_names())
    if isinstance(found, type):
        found = found()
    return cast(Partitioner, found)


def model(name: str) -> Callable[..., Any]:
    """The function that builds the model of this name."""
    return cast(Callable[..., Any], _find("model", name, "hetpipe.models", "build", model_names()))


def dataset(name: str) -> Callable[..., Any]:
    """The function that makes the data of this name."""
    point = _points("hetpipe.datasets").get(name)
    if point is not None:
        return cast(Callable[..., Any], load_point(point))
    _check("data", name, dataset_names())
    return cast(Callable[..., Any], getattr(import_module(DATASETS[name]), name))


def observer_points() -> list[EntryPoint]:
    """The observers of runs that other packages bring, whose names need not differ."""
    return sorted(_all_points(tuple(sys.path)).get("hetpipe.observers", ()), key=lambda point: (point.name, source_of(point)))


def source_of(point: EntryPoint) -> str:
    """`csv_log:CsvLog, of csv-log 1.0`."""
    return f"{point.value}, of {point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def load_target(target: str) -> Callable[..., Any]:
    """The function at `package.module:function`; InputError saying what failed."""
    module_name, _, path = target.partition(":")
    if not module_name or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise InputError(f"cannot read the target {target!r}: write it as 'package.module:function'")
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        raise InputError(f"cannot import {module_name!r} for the target {target!r}: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_") and callable(getattr(found, name))]
            raise InputError(f"{module_name!r} has no {part!r} (target {target!r}){nearest(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"the target {target!r} is a {type(found).__name__}, expected a function")
    return cast(Callable[..., Any], found)


def _find(what: str, name: str, package: str, attribute: str, known: list[str]) -> Any:
    """The entry point of that name, else the attribute of the module of that name."""
    point = _points(package).get(name)
    if point is not None:
        return load_point(point)
    _check(what, name, known)
    try:
        return getattr(import_module(f"{package}.{name.replace('-', '_')}"), attribute)
    except ImportError as error:
        raise InputError(f"cannot import the {what} {name!r}: {error}") from error


def _check(what: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise InputError(f"unknown {what} {name!r}{nearest(name, known)}")


def _names(package: str, *, dash: bool = False) -> list[str]:
    """Modules of a package, and entry points of that group."""
    return sorted({*(name.replace("_", "-") if dash else name for name in _modules(package)), *_points(package)})


def _modules(package: str) -> list[str]:
    """Modules of a package whose names do not begin with an underscore, without its folders."""
    modules = pkgutil.iter_modules(import_module(package).__path__)
    return [info.name for info in modules if not (info.ispkg or info.name.startswith("_"))]


def _points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in _all_points(tuple(sys.path)).get(group, ())}


@cache
def _all_points(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Our entry points of all packages on this path, by their groups; to read them takes 14 ms."""
    found = entry_points()
    return {group: tuple(found.select(group=group)) for group in found.groups if group.startswith("hetpipe.")}


def load_point(point: EntryPoint) -> Any:
    """What it names. InputError if that cannot be had."""
    try:
        return point.load()
    except Exception as error:  # whatever another package does when it is imported
        raise InputError(
            f"cannot load {point.name!r} ({source_of(point)}) of the entry points {point.group!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
