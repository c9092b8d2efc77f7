"""Where data lies that is not in the repository: in the folder that the environment variable HETPIPE_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

from hetpipe.files.messages import InputError

VARIABLE = "HETPIPE_DATA"


def find_data(name: str) -> Path | None:
    """The folder `name` in HETPIPE_DATA; None where the variable is not set, or there is no such folder."""
    root = os.environ.get(VARIABLE)
    found = os.path.join(os.path.expanduser(root), name) if root else ""
    return Path(found) if root and os.path.isdir(found) else None


def data_folder(name: str, otherwise: str) -> Path:
    """As `find_data`; an InputError says what to set, or what to give `otherwise`."""
    found = find_data(name)
    if found is None:
        root = os.environ.get(VARIABLE)
        why = f"the folder {root} of {VARIABLE} has none" if root else f"{VARIABLE} is not set"
        raise InputError(f"no folder {name!r}: {why}; set {VARIABLE} to the folder that holds it, or {otherwise}")
    return found
