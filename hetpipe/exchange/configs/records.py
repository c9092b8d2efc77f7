"""The files of records that a configuration names: how many records they hold, and what these call their keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hetpipe.files.messages import InputError, shown
from hetpipe.language.formats.turns import OTHER_KEYS, OTHER_NAMES
from hetpipe.language.records.source import Source

KNOWN_ANYWAY: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations"),
    **{key: (key, other) for key, other in OTHER_KEYS.items()},
}
SPREAD = "the records that are held out are spread evenly over the data (theirs: drawn at random)"


class Set(NamedTuple):
    """A data set: the function of a job that reads it; its files, or its name on the hub; what it calls each key that is read of
    its records (our name → theirs, "" for what is not read); and further arguments."""

    label: str
    name: str
    files: tuple[str, ...]
    columns: Mapping[str, str]
    args: Mapping[str, Any] = {}


def joined(sets: Sequence[Set], source: str) -> tuple[str, dict[str, Any]]:
    """The name of a job's data and their arguments, for all data sets together; what one of them calls a key is read of all.
    InputError if one function cannot read them together."""
    names = {each.name for each in sets}
    if "text" in names and len(names) > 1:
        kinds = ", ".join(f"{each.label} ({each.name})" for each in sets)
        raise InputError(f"{source}: some data are plain text, and others have answers: {kinds}. Convert each kind by itself")
    name = "chat" if "chat" in names else sets[0].name
    columns, args, files = dict[str, str](), dict[str, Any](), list[str]()
    for each in sets:
        for key, theirs in each.columns.items():
            if theirs and (columns.get(key) or theirs) != theirs:
                raise InputError(
                    f"{source}: the data sets call {key} by two names, {shown(columns[key])} and {shown(theirs)} (of "
                    f"{each.label}). Write them into files with the same keys, and name these by --data"
                )
            columns[key] = theirs or columns.get(key, "")
        for key, value in each.args.items():
            if args.setdefault(key, value) != value or len({key in other.args for other in sets}) > 1:
                raise InputError(
                    f"{source}: the data sets differ in {key} ({shown(value)}, of {each.label}), but a job reads all of its "
                    "data alike. Download them, and name the files by --data"
                )
        files += each.files
    told = {key: theirs for key, theirs in columns.items() if not _is_known(key, theirs)}
    found: dict[str, Any] = {"files" if name == "text" else "file": files[0] if len(files) == 1 else files, **args}
    return name, {**found, "columns": told} if told else found


def instead(data: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """The section `data` that a user names in the place of a configuration's, with what the configuration says of samples
    (`args`) where it is a function of hetpipe's that takes it; its own arguments come first."""
    kept = {"chat": args, "instructions": args, "text": of_texts(args), "preferences": of_pairs(args)}.get(
        str(data.get("name")), {}
    )
    own = data.get("args") or {}
    if not isinstance(own, Mapping):
        raise InputError(f"--data: args must be a mapping, found {shown(own)}")
    return {**data, "args": {**kept, **own}}


def of_texts(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of plain text, from those of chats."""
    return {"context": args["length"], "tokenizer": args["tokenizer"], "test_fraction": args["test_fraction"]}


def of_pairs(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of preferences, from those of chats: rows of pairs are padded, and their last answers compared."""
    return {key: value for key, value in args.items() if key not in ("pack", "turns")}


def _is_known(key: str, theirs: str) -> bool:
    """Whether hetpipe reads this name of theirs as ours without being told."""
    return theirs == key or theirs in KNOWN_ANYWAY.get(key, ()) or OTHER_NAMES.get(theirs) == key


def count(data: Mapping[str, Any]) -> int | None:
    """How many records a job's data have that train; None if that cannot be known from the files alone."""
    args = data["args"]
    files = [args["file"]] if isinstance(args.get("file"), str) else args.get("file")
    if (
        data.get("name") not in ("chat", "instructions", "preferences")
        or args.get("pack")
        or not files
        or not all(map(os.path.exists, files))
    ):
        return None
    records, held = sum(1 for _ in Source.of(files, limit=args.get("limit")).records()), args.get("test_fraction", 0)
    return records - int(records * held)
