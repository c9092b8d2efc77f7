"""LLaMA-Factory's data: names of `dataset`, and dataset_info.json, which says what each is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpipe.exchange.configs.given import Given
from hetpipe.exchange.configs.records import Set
from hetpipe.files.formats import read_mapping
from hetpipe.files.messages import InputError, nearest, shown

FILE = "dataset_info.json"
ONLINE = "ONLINE"  # dataset_dir: names are those of the hub
PAIRS = {"instruction": ("prompt", "instruction"), "input": ("query", "input"), "output": ("response", "output")}
BOTH = ("system", "tools")  # read only if `columns` names them
ROLES = {"user": "user_tag", "assistant": "assistant_tag", "tool": "observation_tag", "system": "system_tag"}
USUAL = {"user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation", "system_tag": "system"}
CALL = ("function_tag", "function_call")
ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
SEEN = ("images", "videos", "audios")
ANSWERS = ("chosen", "rejected")


def sets_of(given: Given, key: str, stage: str) -> list[Set]:
    """The data sets that this key names, for a stage of training. InputError if one cannot be found or read, or is for another
    stage."""
    folder = str(given.text("dataset_dir"))
    if folder == ONLINE:
        return [_set(given, name, {"hf_hub_url": name}, "", stage) for name in given.names(key)]
    where = _found(given, folder)
    info = read_mapping(where / FILE)
    if not isinstance(info, dict):
        raise InputError(f"{where / FILE}: expected a mapping of names to data sets, found {shown(info)}")
    given.notes["dataset_dir"] = f"read from {where / FILE}"
    found = []
    for name in given.names(key):
        entry = info.get(name)
        if not isinstance(entry, dict):
            raise given.fault(key, f"{where / FILE} has no data set {shown(name)}{nearest(name, [*map(str, info)])}")
        given.inner.update({f"{key}[{name}].{inner}": value for inner, value in entry.items()})
        found.append(_set(given, name, entry, str(where), stage))
    return found


def _found(given: Given, folder: str) -> Path:
    """The folder with dataset_info.json, seen from the current folder, or from the configuration's and those above it."""
    home = Path(given.source).resolve().parent
    for base in (Path(), home, *list(home.parents)[:3]):
        if (base / folder / FILE).is_file():
            return base / folder if base == Path() else Path(os.path.relpath(base / folder))
    raise InputError(
        f"there is no {Path(folder) / FILE} (from {Path.cwd()}, nor from the folder of {given.source} or those above it), "
        f"which says what the data {shown(given.value('dataset'))} are. Start the command where LLaMA-Factory was started, or "
        "name the data: --data '{name: chat, args: {file: chats.jsonl}}'"
    )


def _set(given: Given, label: str, entry: Mapping[str, Any], folder: str, stage: str) -> Set:
    """A data set of dataset_info.json."""
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if not isinstance(columns, dict) or not isinstance(tags, dict):
        raise InputError(f"{FILE}: columns and tags of {label} must be mappings, found {shown(columns)} and {shown(tags)}")
    if columns.get("kto_tag"):
        raise InputError(f"{FILE}: {label} has kto_tag, of single answers that are judged. hetpipe learns from pairs of answers")
    ranked, wanted = bool(entry.get("ranking") or any(columns.get(name) for name in ANSWERS)), stage in ("dpo", "rm")
    if ranked != wanted:
        held = "preferences, on which the stages dpo and rm train" if ranked else "no preferences (ranking: true)"
        raise InputError(f"{FILE}: {label} holds {held}, but the stage is {stage}. Name another data set, or another stage")
    if seen := next((name for name in SEEN if columns.get(name)), None):
        raise InputError(f"{FILE}: {label} has {seen}, but models see texts only here. Name another data set")
    args = {name: entry[name] for name in ("split", "subset") if entry.get(name) and "hf_hub_url" in entry}
    files = (_file(label, entry, folder),)
    if stage == "pt":
        return Set(label, "text", files, {"text": columns.get("prompt", "instruction")})
    pairs = entry.get("formatting", "alpaca") == "alpaca"
    if ranked:
        own = _pairs(columns) if pairs else _turns(given, label, columns, tags)
        answers = {name: str(columns.get(name) or name) for name in ANSWERS}
        return Set(label, "preferences", files, {**{key: name for key, name in own.items() if key != "output"}, **answers}, args)
    if pairs:
        return Set(label, "instructions", files, _pairs(columns), args)
    return Set(label, "chat", files, _turns(given, label, columns, tags), args)


def _file(label: str, entry: Mapping[str, Any], folder: str) -> str:
    if isinstance(entry.get("hf_hub_url"), str):
        return str(entry["hf_hub_url"])
    if isinstance(entry.get("file_name"), str):
        return str(Path(folder) / entry["file_name"])
    other = next((key for key in ELSEWHERE if key in entry), "no file_name")
    raise InputError(f"{FILE}: {label} has {other}, where hetpipe does not look. Download the data, and name the files by --data")


def _pairs(columns: Mapping[str, Any]) -> dict[str, str]:
    """What a data set of Alpaca's form calls its keys; with `columns`, only those that it names are read."""
    found = {ours: str(columns.get(key) or "") if columns else usual for ours, (key, usual) in PAIRS.items()}
    return found | {ours: str(columns.get(ours) or "") for ours in ("history", *BOTH)}


def _turns(given: Given, label: str, columns: Mapping[str, Any], tags: Mapping[str, Any]) -> dict[str, str]:
    """What a data set of ShareGPT's form calls its keys and roles."""
    if tags.get(CALL[0], CALL[1]) not in (CALL[1], "tool_call"):
        lost = f"calls of tools are turns of the role function_call here, not {tags[CALL[0]]}"
        given.lost.update({key: lost for key in given.inner if key.endswith(f"[{label}].tags")})
    found = {
        "messages": str(columns.get("messages") or "conversations"),
        "role": str(tags.get("role_tag") or "from"),
        "content": str(tags.get("content_tag") or "value"),
    }
    roles = {ours: str(tags.get(tag) or USUAL[tag]) for ours, tag in ROLES.items()}
    return found | roles | {ours: str(columns.get(ours) or "") for ours in BOTH}
