"""Configurations of other fine-tuning trainers, as jobs; no torch. Read in this order:

table (what becomes of each key: llamafactory.yaml, axolotl.yaml), given (a configuration), found (the job, and what became of
each key), records (files of records), schedule (steps, optimizer, rate), logs (evaluations, checkpoints, curves), adapter,
dataset_info (LLaMA-Factory's data), datasets (axolotl's data), llamafactory, axolotl (a new trainer gets a line in `TRAINERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hetpipe.documents.job import Job
from hetpipe.exchange.configs.axolotl import convert_axolotl
from hetpipe.exchange.configs.found import Asked, Converted, Line, converted
from hetpipe.exchange.configs.given import Given
from hetpipe.exchange.configs.llamafactory import convert_llamafactory
from hetpipe.exchange.configs.table import load_table

__all__ = ["TRAINERS", "Asked", "Converted", "Line", "convert"]

TRAINERS: Mapping[str, Callable[[Given, Asked], None]] = {"llamafactory": convert_llamafactory, "axolotl": convert_axolotl}


def convert(trainer: str, config: Path, asked: Asked) -> Converted:
    """The job that trains what this configuration of a trainer (a key of `TRAINERS`) would, and what became of each of its keys.
    InputError if a value cannot be used, if hetpipe has no such training, or if the number of devices or steps has to be said."""
    given = Given.read(config, load_table(trainer))
    TRAINERS[trainer](given, asked)
    Job.parse(given.job, f"the job that {config} becomes")
    return converted(given)
