"""Profiles that other planners published, as profile.json and cluster.yaml. Read in this order:

options (what no published file says), transformer (a profile from a model's sizes), metis, sailor, fasop_factors, fasop,
zorse_cluster, zorse (a new system gets a line in `LAYOUTS`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from hetpipe.exchange.importers.fasop import import_fasop
from hetpipe.exchange.importers.metis import import_metis
from hetpipe.exchange.importers.options import Imported, ImportOptions, parse_quantities
from hetpipe.exchange.importers.sailor import import_sailor
from hetpipe.exchange.importers.zorse import import_zorse
from hetpipe.files.formats import explained
from hetpipe.files.messages import InputError, cut, listed, nearest

__all__ = ["LAYOUTS", "ImportOptions", "Imported", "import_published", "parse_quantities"]


def _one(layout: str, sources: Sequence[Path]) -> Path:
    if len(sources) != 1:
        raise InputError(f"{layout} takes one folder, but {len(sources)} were given")
    return sources[0]


LAYOUTS: dict[str, Callable[[Sequence[Path], ImportOptions], Imported]] = {
    "sailor": lambda sources, options: import_sailor(_one("sailor", sources), options),
    "fasop": lambda sources, options: import_fasop(_one("fasop", sources), options),
    "metis": lambda sources, options: import_metis(sources, options),
    "zorse": lambda sources, options: import_zorse(_one("zorse", sources), options),
}


def import_published(layout: str, sources: Sequence[Path], options: ImportOptions) -> Imported:
    """Read `sources` in a published layout. InputError, naming the file and the place, where they are not of it."""
    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout!r}{nearest(layout, list(LAYOUTS))}")
    for source in sources:
        if not os.path.exists(source):
            raise InputError(f"cannot read {cut(str(source))}: no such file or folder")
    try:
        return LAYOUTS[layout](sources, options)
    except ValidationError as error:  # numbers that are numbers, and yet make no profile or cluster
        faults = explained(error)
        what = f"{len(faults)} fault(s) in the {error.title} that these files of {layout} and the options make"
        raise InputError(f"{', '.join(map(str, sources))}: {what}\n{listed(faults)}") from None
