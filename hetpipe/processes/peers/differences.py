"""What differs between the ranks of a job and must not: their versions, and what each was told to do (see `check_alike`)."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import hetpipe
from hetpipe.files.messages import InputError, counted, listed, shown
from hetpipe.processes.progress import warn
from hetpipe.processes.pulse import peers_named
from hetpipe.processes.whereabouts import waiting

MOST_RANKS, MOST_VALUES = 6, 4  # in a line of a message
NOT_GIVEN = "not given"


class Told(NamedTuple):
    """What a rank says of itself: its host, its versions, and by what it was told to do."""

    host: str
    versions: Mapping[str, str]
    values: Mapping[str, Any]


def check_alike(values: Mapping[str, Any]) -> None:
    """InputError on every rank, with the values and the hosts, if ranks were told differently, or have another hetpipe or another
    minor version of torch; a note on the first where other versions differ. Collective."""
    if dist.get_world_size() == 1:
        return
    own = (socket.gethostname(), own_versions(), dict(values))  # nothing of this version's: others may not know it
    found: list[Any] = [None] * dist.get_world_size()
    with waiting(), peers_named():
        dist.all_gather_object(found, own)
    faults, notes = differences([Told(*one) for one in found])
    if faults:
        raise InputError(
            "the ranks differ in what must be the same on all hosts; give these the same files, settings and versions:\n"
            + listed(faults)
        )
    for note in notes if dist.get_rank() == 0 else ():
        warn(f"note: {note}")


def own_versions() -> dict[str, str]:
    """Of what runs here."""
    return {"hetpipe": hetpipe.__version__, "torch": torch.__version__, "Python": platform.python_version()}


def differences(ranks: Sequence[Told]) -> tuple[list[str], list[str]]:
    """(what must not differ and does, what else does). Pure."""
    faults, notes = list[str](), list[str]()
    for name in dict.fromkeys(name for rank in ranks for name in rank.versions):
        versions = [rank.versions.get(name, NOT_GIVEN) for rank in ranks]
        if len({_binding(name, version) for version in versions}) > 1:
            faults.append(f"{name} {_by_rank(versions, ranks)}")
        elif len({*versions}) > 1:
            notes.append(f"{name} {_by_rank(versions, ranks)}; other versions may compute slightly other numbers")
    for key in dict.fromkeys(key for rank in ranks for key in rank.values):
        told = [shown(rank.values[key]) if key in rank.values else NOT_GIVEN for rank in ranks]
        if any(rank.values.get(key, NOT_GIVEN) != ranks[0].values.get(key, NOT_GIVEN) for rank in ranks):
            faults.append(f"{key} {_by_rank(told, ranks)}")
    return faults, notes


def _binding(name: str, version: str) -> str:
    """What of a version must be the same on all hosts."""
    if name == "torch":
        return ".".join(version.split(".")[:2])
    return version if name == "hetpipe" else ""


def _by_rank(values: Sequence[str], ranks: Sequence[Told]) -> str:
    """`is 0.1 on rank 0 (host a), 0.2 on ranks 1, 2 (host b)`."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    parts = []
    for value, own in list(groups.items())[:MOST_VALUES]:
        hosts = list(dict.fromkeys(ranks[rank].host for rank in own))
        more = f" and {len(own) - MOST_RANKS} more" if len(own) > MOST_RANKS else ""
        numbers = f"{'rank' if len(own) == 1 else 'ranks'} {', '.join(map(str, own[:MOST_RANKS]))}{more}"
        where = f"host {hosts[0]}" if len(hosts) == 1 else f"{counted(len(hosts), 'host')}, {hosts[0]} first"
        parts.append(f"{value} on {numbers} ({where})")
    return f"is {', '.join(parts)}" + (", …" if len(groups) > MOST_VALUES else "")
