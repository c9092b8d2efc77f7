"""The job that a configuration becomes, and what became of each of its keys: every key stands in exactly one list."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hetpipe.exchange.configs.given import Given
from hetpipe.files.messages import InputError, cut

NOTHING = "–"
OFF, UNSAID = "off, there and here", "not said, there and here"
EVALUATED = ("test_datasets[", "eval_dataset[")  # entries of the data on which the run evaluates
COLUMNS, FOUND = "data.args.columns", "hetpipe finds it without being told"


class Asked(NamedTuple):
    """What the command says: how many `devices` and `steps` the run had; the job's section `data` in the place of theirs, and its
    cluster file."""

    devices: int | None = None
    steps: int | None = None
    data: Mapping[str, Any] | None = None
    cluster: str | None = None


class Line(NamedTuple):
    """A key, its value there, what the job says for it (– for nothing), and what that means."""

    key: str
    there: str
    job: str
    note: str


class Converted(NamedTuple):
    """The content of job.yaml. Keys that are `taken` over, decided by the plan (`planned`), without a counterpart, or unknown;
    `defaults`: keys that are not said, whose value there is written into the job."""

    job: dict[str, Any]
    taken: tuple[Line, ...]
    planned: tuple[Line, ...]
    no_counterpart: tuple[Line, ...]
    unknown: tuple[Line, ...]
    defaults: tuple[Line, ...]

    @property
    def lists(self) -> dict[str, tuple[Line, ...]]:
        """The lists by their names, in the order in which they are shown."""
        return {name: getattr(self, name) for name in self._fields if name != "job"}


def converted(given: Given) -> Converted:
    """Sort all keys into the lists."""
    lists: dict[str, list[Line]] = {name: [] for name in Converted._fields if name != "job"}
    for key, value in (*given.keys.items(), *given.inner.items()):
        place, line = _sorted(given, key, value)
        lists[place].append(line)
    for key, known in given.table.taken.items():
        written, note = _written(given, key) if "[]" not in key else NOTHING, given.notes.get(key, "")
        silent = given.said(key) or key in given.overruled
        if known.default is not None and not silent and (written != NOTHING or note):
            lists["defaults"].append(Line(key, _text(known.default), written, note))
    return Converted(given.job, **{name: tuple(lines) for name, lines in lists.items()})


def _sorted(given: Given, key: str, value: Any) -> tuple[str, Line]:
    """The list of a key, and its line in it."""
    table, there, general = given.table, _text(value), _general(key)
    lack = table.lack(general)
    if key in given.lost:
        return "no_counterpart", Line(key, there, NOTHING, given.lost[key])
    if general in table.taken:
        if value in (None, ""):
            return "taken", Line(key, there, NOTHING, UNSAID)
        written, note = NOTHING if key in given.overruled else _written(given, key), given.notes.get(key)
        if value is False and note is None and not written.endswith(": false"):
            return "taken", Line(key, there, NOTHING, OFF)
        silent = FOUND if table.taken[general].to == COLUMNS else "it has no effect, there and here"
        return "taken", Line(key, there, written, note or (silent if written == NOTHING else ""))
    if (why := table.planned_why(general)) is not None:
        return "planned", Line(key, there, NOTHING, why)
    if lack is not None and value in (None, "", [], {}):
        return "taken", Line(key, there, NOTHING, UNSAID)
    if lack is not None and (value in lack.off or value in lack.same):
        return "taken", Line(key, there, NOTHING, OFF if value in lack.off else lack.kept)
    if lack is not None:
        return "no_counterpart", Line(key, there, NOTHING, lack.why)
    near = difflib.get_close_matches(general, table.known, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return "unknown", Line(key, there, NOTHING, f"{table.trainer} may know it, hetpipe does not{meant}")


def _written(given: Given, key: str) -> str:
    """What the job says where this key goes."""
    path = given.table.taken[_general(key)].to
    if key.startswith(EVALUATED):
        if "evaluate" not in given.job:
            return NOTHING
        path = own if _at(given.job, own := f"evaluate.{path}") is not None else path
    paths = [path, *([given.also[key]] if key in given.also else [])]
    values = {path: value for path in paths if (value := _at(given.job, path)) is not None}
    said = [path if isinstance(value, Mapping) else f"{path}: {_text(value)}" for path, value in values.items()]
    return ", ".join(said) or NOTHING


def _at(job: Mapping[str, Any], path: str) -> Any:
    """What stands in the job at `section.key`; None for nothing."""
    place: Any = job
    for part in path.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _general(key: str) -> str:
    """The key of an entry of a list as the table has it: `dataset[].path` for datasets[0].path."""
    return re.sub(r"^\w+\[[^]]*\](?=\.)", "dataset[]", key)


def _text(value: Any) -> str:
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), 120)


def refuse(given: Given, key: str, what: str) -> InputError:
    """The error about a configuration of another kind of training, with what would be taken over of one for fine-tuning."""
    kept = [name for name in given.keys if given.said(name) and name in given.table.taken and name != key]
    return given.fault(
        key,
        f"That is {what}, of which convert makes no job: it takes over fine-tuning on answers, training on texts, DPO, "
        "SimPO, ORPO and reward models. "
        f"Of this file it would take over {', '.join(kept) or 'nothing'}",
    )
