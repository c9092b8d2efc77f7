"""Cards that are played by CPU processes: `3090:24GiB:4,2x1080ti:11GiB:10` as a cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hetpipe.documents.cluster import Cluster
from hetpipe.files.messages import InputError, shown
from hetpipe.files.parsing import yaml_text

EXAMPLE = "3090:24GiB:4,2x1080ti:11GiB:10"
_CARD = re.compile(r"(?:([0-9]{1,5})x)?([^:,\s]+):([^:,]+):([0-9.]+(?:[eE][+-]?[0-9]+)?)")


def parse_emulated(machines: Sequence[str]) -> dict[str, Any]:
    """A cluster file's content: each text is a machine, a node, and each card in it `name:memory:slowdown`, several alike with
    their number before (`2x…`). Links are left to be measured. InputError where a text cannot be read, or where cards of one
    name differ."""
    types, nodes = dict[str, Any](), list[dict[str, Any]]()
    for number, text in enumerate(machines):
        devices = dict[str, int]()
        for part in text.split(","):
            match = _CARD.fullmatch(part.strip())
            if match is None or (match[1] is not None and int(match[1]) == 0):
                raise InputError(
                    f"--emulate {shown(text)}: cannot read {shown(part.strip())}. Write name:memory:slowdown, as in '{EXAMPLE}'"
                )
            if match[3].strip().isdigit():
                size = match[3].strip()
                raise InputError(
                    f"--emulate {shown(text)}: the memory of {shown(match[2])} is {size} without a unit. Write {size}GiB, if "
                    "that is meant"
                )
            name, kind = match[2], {"memory": match[3].strip(), "emulate": {"slowdown": float(match[4])}}
            if types.setdefault(name, kind) != kind:
                raise InputError(
                    f"--emulate {shown(text)}: {shown(name)} is given with two memories or slowdowns. Give the two cards "
                    "different names"
                )
            devices[name] = devices.get(name, 0) + int(match[1] or 1)
        nodes.append({"name": f"n{number}", "devices": devices})
    found = {"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes}
    Cluster.parse(found, f"--emulate {' --emulate '.join(machines)}")
    return found


def cluster_text(content: dict[str, Any]) -> str:
    """The file, as people read it."""
    return f"# The emulated cards of a 'hetpipe finetune'.\n{yaml_text(content)}"
