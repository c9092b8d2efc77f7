"""What a run does beside its steps: evaluations, checkpoints, curves, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import PurePath
from typing import Any

from hetpipe.documents.sections.log import TOOLS
from hetpipe.exchange.configs.given import Given
from hetpipe.exchange.configs.schedule import Run
from hetpipe.files.messages import InputError

UNKNOWN = "how many steps an epoch has is not known before the data are read. Write {where} yourself"
BEST = "the job exports the checkpoint of the best evaluation; theirs the last, unless load_best_model_at_end is true"


def put_folders(given: Given, folder: str, *, lora: bool) -> None:
    """Write where checkpoints, the log and what is trained go: folders within theirs."""
    place = PurePath(folder)
    given.put("checkpoint.folder", str(place / "checkpoints"))
    given.put("log.folder", str(place / "run"))
    given.put("export.folder", str(place / ("adapter" if lora else "model")))
    given.notes["output_dir"] = "checkpoints, run (log.folder) and what is trained (export.folder) stand in it"


def put_checkpoints(given: Given, run: Run, strategy: str, per_epoch: int | None = None) -> None:
    """Write how often a checkpoint is saved, and how many are kept."""
    where = "checkpoint.every_steps"
    if strategy != "steps" and not per_epoch:
        given.overrule("save_steps", "save_strategy")
    if strategy == "steps":
        _put_steps(given, "save_steps", where, run)
    elif strategy == "epoch":
        _put_epochs(given, where, run, "saves_per_epoch" if per_epoch else "save_strategy", per_epoch or 1)
    else:
        given.lost["save_strategy"] = "a run always saves its checkpoints, each 100 steps unless checkpoint.every_steps says more"
    keep = given.count("save_total_limit")
    if keep is not None and keep > 0:
        given.put("checkpoint.keep", keep)


def put_evaluation(given: Given, run: Run, strategy: str, per_epoch: int | None, data: Mapping[str, Any] | None) -> None:
    """Write the section `evaluate`: how often, on which data (None: those that are held out), and when the run ends early."""
    if strategy == "no":
        return
    section = given.job.setdefault("evaluate", {})
    where = "evaluate.every_steps"
    if strategy == "steps":
        key = "eval_steps" if given.said("eval_steps") else "logging_steps"
        _put_steps(given, key, where, run)
    else:
        _put_epochs(given, where, run, "evals_per_epoch" if per_epoch else "eval_strategy", per_epoch or 1)
    if data is not None:
        section["data"] = dict(data)
    key = next((each for each in ("early_stopping_steps", "early_stopping_patience") if each in given.table.taken), "")
    if "every_steps" in section and given.said(key):
        section["patience"] = given.positive(key)
    if "every_steps" in section and not given.flag("load_best_model_at_end"):
        for each in ("eval_strategy", "evaluation_strategy", "eval_steps", "evals_per_epoch", "load_best_model_at_end"):
            given.notes.setdefault(each, BEST)
        if (held_out := given.table.held_out) in given.notes:
            given.notes[held_out] += f"; {BEST}"


def _put_steps(given: Given, key: str, where: str, run: Run) -> None:
    """Write a number of steps; below 1 it is a part of the run."""
    value = given.number(key)
    if value is None or not value > 0:
        raise given.fault(key, "Write a number of steps above 0")
    if value < 1 and run.steps is None:
        given.lost[key] = UNKNOWN.format(where=where)
    else:
        given.put(where, max(1, ceil(value * run.steps)) if value < 1 and run.steps is not None else int(value))


def _put_epochs(given: Given, where: str, run: Run, key: str, per_epoch: int) -> None:
    """Write so many times an epoch as a number of steps."""
    if run.steps_per_epoch is None:
        given.lost.update({key: UNKNOWN.format(where=where)} if given.said(key) else {})
    else:
        given.put(where, max(1, run.steps_per_epoch // per_epoch))


def put_curves(given: Given, tools: Mapping[str, Mapping[str, Any]]) -> None:
    """Write to which tools the curves go, each with its arguments."""
    if tools:
        given.put("log.to", ["jsonl", *({"name": name, "args": dict(args)} if args else name for name, args in tools.items())])


def known_tools(given: Given, key: str, asked: Sequence[str]) -> list[str]:
    """Those of these tools that hetpipe can write to; notes say which it cannot."""
    others = [name for name in asked if name not in (*TOOLS, "none", "all")]
    if others and not [name for name in asked if name in TOOLS]:
        given.lost[key] = f"there are no curves for {', '.join(others)}: log.to knows {', '.join(TOOLS)}"
    elif others:
        given.notes[key] = f"without {', '.join(others)}: log.to knows {', '.join(TOOLS)}"
    return [name for name in asked if name in TOOLS]


def steps_or_epoch(given: Given, key: str, value: str) -> str:
    """A strategy; InputError for another word."""
    if value not in ("no", "steps", "epoch", "best"):
        raise InputError(f"{given.source}: {key} is {value!r}. Write no, steps or epoch")
    return "no" if value == "best" else value
