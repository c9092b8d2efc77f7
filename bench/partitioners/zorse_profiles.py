"""Layers that Zorse's and Cephalo's authors measured, as profiles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hetpipe.building.datasets import find_data
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.exchange.importers import ImportOptions, import_published

PREFIX = "zorse:"
ZORSE = find_data("zorse")
TOKENS = 512  # where a name does not say it
SIZES = (1, 2, 4, 8, 16)  # of those that were measured
VOCABULARY, CLASSES = 49152, 10  # with which the published totals of parameters were counted


def options(model: str, hidden: int, tokens: int) -> ImportOptions:
    """What the files do not say: heads of 128 in Llamas, of 64 in others."""
    heads, words = hidden // (128 if "llama" in model else 64), CLASSES if "vit" in model else VOCABULARY
    return ImportOptions(model=model, sequence_length=tokens, attention_heads=heads, vocabulary=words)


@cache
def imported(model: str, folder: Path, tokens: int = TOKENS) -> Profile:
    """All that was measured of a model."""
    stats = json.loads((folder / "model_stats.json").read_text())
    known = model if model in stats else f"deepspeed{model}"
    return import_published("zorse", [folder], options(model, stats[known]["hidden_size"], tokens)).profile


def measured(name: str, types: Sequence[str], folder: Path | None) -> Profile | None:
    """The profile of `zorse:MODEL:PRECISION:TOKENS` on these types at the micro-batch sizes of `SIZES`; None without the data."""
    if folder is None:
        return None
    _, model, precision, tokens = name.split(":")
    whole = imported(model, folder, int(tokens))
    kept = [m for m in whole.measurements if m.device_type in types and m.precision == precision]
    return whole.model_copy(update={"measurements": tuple(map(thinned, kept))})


def thinned(m: Measurement) -> Measurement:
    """At the micro-batch sizes of `SIZES` only."""
    rows = [i for i, b in enumerate(m.microbatch_sizes) if b in SIZES]
    names = ("microbatch_sizes", "forward_seconds", "backward_seconds")
    return m.model_copy(update={name: tuple(getattr(m, name)[i] for i in rows) for name in names})
