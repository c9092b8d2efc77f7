"""axolotl's data: the entries of `datasets`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hetpipe.exchange.configs.given import Given
from hetpipe.exchange.configs.records import Set
from hetpipe.files.messages import InputError, shown
from hetpipe.language.formats.turns import OTHER_NAMES
from hetpipe.language.records.files import KINDS

PAIRS = ("alpaca", "alpaca_chat", "alpaca_w_system")
CHATS = ("chat_template", "sharegpt")
WRITTEN = ("chatml", "llama3")  # formats of preferences that write chats themselves
OWN_NAMES: Mapping[str, str] = {}
ANSWERED: Mapping[str, Mapping[str, str]] = {  # type of preferences → what it calls our keys
    **dict.fromkeys(("argilla", "argilla_chat", "intel", "prompt_pairs", "ultra"), OWN_NAMES),
    "icr": {"prompt": "input"},
    **dict.fromkeys((f"chat_template{how}" for how in ("", ".default", ".argilla", ".argilla_chat")), OWN_NAMES),
    "bradley_terry.chat_template": {"prompt": "input"},
}
TEXTS = ("completion", "pretrain")
OWN = {"field_instruction": "instruction", "field_input": "input", "field_output": "output", "field_system": "system"}
PROMPTS = "the tokenizer's chat template writes question and answer, not the text of Alpaca's prompt (### Instruction:)"
LEARNED = "the same: only answers of the assistant are learned"
ENDED = "the same: the token that ends each learned answer is learned"
TURNS = {"field_messages": "messages", "field_tools": "tools", "message_field_training": "training"}


def sets_of(given: Given, key: str, *, prefers: bool) -> list[Set]:
    """The data sets of this list; `prefers`: of preferences. InputError if one is of a kind that hetpipe does not read."""
    entries = given.value(key)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise given.fault(key, "Write a list of data sets, each with a path and a type")
    found = []
    for number, entry in enumerate(entries):
        label = f"{key}[{number}]"
        given.inner.update({f"{label}.{name}": value for name, value in entry.items()})
        read = _preferences if prefers else _set
        found.append(read(given, label, {name: value for name, value in entry.items() if value not in (None, "")}))
    return found


def _preferences(given: Given, label: str, entry: Mapping[str, Any]) -> Set:
    """A data set of better and worse answers."""
    kind = str(entry.get("type"))
    files, args = _files(given, label, entry)
    name, _, how = kind.partition(".")
    if (columns := ANSWERED.get(how if name in WRITTEN else kind)) is None:
        raise InputError(
            f"{given.source}: {label}.type is {shown(entry.get('type'))}, but of preferences hetpipe reads "
            f"{', '.join(key if '.' in key else f'chatml.{key}' for key in ANSWERED)} and those of llama3. Write the data with "
            "the keys prompt, chosen and rejected: --data '{name: preferences, args: {file: pairs.jsonl}}'"
        )
    if name in WRITTEN:
        given.notes[f"{label}.type"] = f"the tokenizer's chat template writes question and answers, not the text of {name}"
        return Set(label, "preferences", files, columns, args)
    if name == "chat_template":
        turns = _turns(given, label, entry)
        columns = turns if how in ("", "default") else {key: own for key, own in turns.items() if key != "messages"}
    answers = {ours: str(entry.get(f"field_{ours}", ours)) for ours in ("chosen", "rejected")}
    return Set(label, "preferences", files, {**columns, **answers}, {**args, **_template(given, label, entry)})


def _set(given: Given, label: str, entry: Mapping[str, Any]) -> Set:
    kind = entry.get("type")
    files, args = _files(given, label, entry)
    if isinstance(kind, dict):
        given.notes[f"{label}.type"] = PROMPTS
        lacking = sorted(set(map(str, kind)) - set(OWN))
        if lacking:
            given.lost[f"{label}.type"] = f"only its fields are taken over, not {', '.join(lacking)}: {PROMPTS}"
        return Set(label, "instructions", files, {ours: str(kind[key]) for key, ours in OWN.items() if kind.get(key)}, args)
    name = str(kind).partition(":")[0].partition(".")[0]
    if name in PAIRS:
        given.notes[f"{label}.type"] = PROMPTS
        return Set(label, "instructions", files, {}, args)
    if name in TEXTS:
        given.notes[f"{label}.type"] = "texts are joined, and cut into windows of sequence_len tokens; theirs cuts each text"
        return Set(label, "text", files, {"text": str(entry.get("field", "text"))})
    if name in CHATS:
        return Set(label, "chat", files, _turns(given, label, entry), {**args, **_template(given, label, entry)})
    raise InputError(
        f"{given.source}: {label}.type is {shown(kind)}, but hetpipe reads {', '.join((*PAIRS, *CHATS, *TEXTS))}, and mappings "
        "with field_instruction and field_output. Write the data as chats, and name them: "
        "--data '{name: chat, args: {file: chats.jsonl}}'"
    )


def _files(given: Given, label: str, entry: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The files of a data set, or its name on the hub with split and subset."""
    path, inner = entry.get("path"), entry.get("data_files") or ()
    inner = [inner] if isinstance(inner, str) else inner
    if not isinstance(path, str) or not isinstance(inner, list | tuple) or not all(isinstance(name, str) for name in inner):
        raise InputError(f"{given.source}: {label} must have a path, and names of files, if any; found {shown(dict(entry))}")
    if inner and (os.path.isdir(path) or path in ("json", "csv", "parquet")):
        return tuple(os.path.join(path, name) if os.path.isdir(path) else name for name in inner), {}
    if inner:
        given.lost[f"{label}.data_files"] = "of a data set of the hub all files are read. Download these, and name them by --data"
    split = entry.get("split", "train")
    if os.path.exists(path) or path.endswith(KINDS):
        if split != "train":
            given.lost[f"{label}.split"] = "all records of a file are read. Cut the file"
        return (path,), {}
    args = {"split": split} if split != "train" else {}
    args |= {"subset": entry["name"]} if "name" in entry else {}
    return (path,), args


def _turns(given: Given, label: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """What a data set of chats calls its keys and roles."""
    found = {ours: str(entry[key]) for key, ours in TURNS.items() if key in entry}
    found.setdefault("messages", "conversations" if str(entry["type"]).startswith("sharegpt") else "messages")
    mapped = entry.get("message_property_mappings") or {}
    if not isinstance(mapped, dict):
        raise InputError(f"{given.source}: {label}.message_property_mappings must be a mapping, found {shown(mapped)}")
    for ours in ("role", "content"):
        name = mapped.get(ours) or entry.get(f"message_field_{ours}")
        found.update({ours: str(name)} if name else {})
    if others := sorted(set(map(str, mapped)) - {"role", "content"}):
        given.notes[f"{label}.message_property_mappings"] = f"without {', '.join(others)}: the template reads it by its own name"
    found |= _roles(given, label, entry.get("roles") or {})
    learned = entry.get("roles_to_train", ["assistant"])
    if not isinstance(learned, list) or any(role not in ("assistant", "gpt") for role in learned):
        given.lost[f"{label}.roles_to_train"] = "only answers of the assistant are learned"
    given.notes.update({f"{label}.roles_to_train": LEARNED, f"{label}.train_on_eos": ENDED})
    if entry.get("train_on_eos", "turn") != "turn":
        given.lost[f"{label}.train_on_eos"] = "the token that ends each learned answer is learned"
    return found


def _roles(given: Given, label: str, roles: object) -> dict[str, str]:
    """Our role → what the data set calls it, where hetpipe does not know that name."""
    if not isinstance(roles, dict) or not all(isinstance(names, list) for names in roles.values()):
        raise InputError(f"{given.source}: {label}.roles must be a mapping of roles to lists of names, found {shown(roles)}")
    unknown = {role: [name for name in map(str, names) if OTHER_NAMES.get(name, name) != role] for role, names in roles.items()}
    if several := next((role for role, names in unknown.items() if len(names) > 1), None):
        given.lost[f"{label}.roles"] = (
            f"a role has one name beside the known ones, and {several} has {', '.join(unknown[several])}"
        )
    return {str(role): names[0] for role, names in unknown.items() if names}


def _template(given: Given, label: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """The file of a template of its own."""
    text = entry.get("chat_template_jinja")
    if text is None:
        return {}
    if not isinstance(text, str) or "{" in text:
        given.lost[f"{label}.chat_template_jinja"] = "write the template into a file, and name it as data.args.template"
        return {}
    return {"template": text}
