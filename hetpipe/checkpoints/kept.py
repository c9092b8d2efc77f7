"""What is left of a run that has lost a rank: each of the others keeps its layers, as they were after the last step that is
whole. Where these are all layers, they become a checkpoint of that step, and no step is done anew.

A rank that keeps something cannot ask others what they have, since one of them is gone. So each writes all that it holds into a
folder beside the checkpoints; whoever starts the run again looks whether all is there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from hetpipe.checkpoints.checkpoint import PART, list_checkpoints
from hetpipe.checkpoints.digests import RunningDigest, Written
from hetpipe.checkpoints.state_tensors import model_state, optimizer_state
from hetpipe.checkpoints.stores.folder import PendingFolder
from hetpipe.checkpoints.stores.store import name_of
from hetpipe.checkpoints.stores.tensor_files import write_tensors
from hetpipe.checkpoints.training_state import state_text
from hetpipe.files.formats import Count, Strict
from hetpipe.files.writing import write_text
from hetpipe.layers.shards.split import pieces_in
from hetpipe.processes.progress import say, warn
from hetpipe.runtime.plan_engine import PlanEngine

SUFFIX = ".kept"


class Keeping(Strict):
    """What one rank has kept: layers [first, end) `of` so many, as tensors of these `keys` in `part`; `state` is what
    trainer.json of a checkpoint has beside its tensors and files."""

    format: Literal["hetpipe.kept/1"] = "hetpipe.kept/1"
    layers: tuple[Count, Count]
    of: Count
    part: str
    keys: tuple[str, ...]
    file: Written
    state: dict[str, Any]


def keep(folder: str, step: int, engine: PlanEngine, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> bool:
    """Keep this rank's state after `step`. False where it is not to be used: parameters are not finite, or of layers that are
    split over devices it has a part only. OSError if it cannot be written."""
    stage, rank = engine.stage, engine.world.rank
    if pieces_in(stage) or not all(bool(torch.isfinite(p).all()) for p in stage.parameters() if p.is_floating_point()):
        return False
    pending = PendingFolder(_place(folder, step), Path(folder, name_of(step)), step)
    pending.partial.mkdir(parents=True, exist_ok=True)
    tensors, part = model_state(stage) | optimizer_state(stage, optimizer), PART.format(rank + 1)
    with RunningDigest() as digest:
        with pending.create(part) as file:
            write_tensors(tensors, file, digest)
        written = digest.written()
    keys = tuple(tensors)
    kept = Keeping(layers=engine.layer_range, of=len(engine.layers), part=part, keys=keys, file=written, state=dict(state))
    write_text(_note(pending.partial, rank), kept.model_dump_json())
    return True


def salvage(folder: str) -> int | None:
    """Make a checkpoint of what the ranks of a run before have kept, if it is of a later step than the newest and all of it is
    there, and remove the rest. Return its step. One process calls it."""
    found, newest = None, list_checkpoints(folder)
    for place in sorted(Path(folder).glob(f"step-*{SUFFIX}"), reverse=True):
        final = place.with_suffix("")
        if found is None and (not newest or final.name > newest[-1].name) and _completed(place, final):
            found = int(final.name.removeprefix("step-"))
            say(f"the ranks that were left have kept all of step {found}: it is {final}")
        shutil.rmtree(place, ignore_errors=True)
    return found


def _completed(place: Path, final: Path) -> bool:
    kept = _read(place)
    used = _cover(kept)
    if not used:
        return False
    step = int(final.name.removeprefix("step-"))
    for file in place.iterdir():
        if file.name not in {one.part for one in used}:
            file.unlink()
    state = dict(used[0].state)
    if "stream" in state:  # known to those that read it
        state["stream"] = next((one.state["stream"] for one in kept if one.state.get("stream") is not None), None)
    keys = {key for one in used for key in one.keys}
    files = {one.part: one.file.model_dump() for one in used}
    text = state_text({"step": step, "tensors": len(keys), "files": dict(sorted(files.items())), **state})
    try:
        PendingFolder(place, final, step).finish(text)
    except OSError as error:
        warn(f"note: what was kept of step {step} cannot be made a checkpoint: {error}")
        return False
    return True


def _read(place: Path) -> list[Keeping]:
    """What ranks have kept there, whole."""
    found = list[Keeping]()
    for note in sorted(place.glob("*.json")):
        with suppress(OSError, ValidationError):
            kept = Keeping.model_validate_json(note.read_text(encoding="utf-8"))
            if (place / kept.part).stat().st_size == kept.file.size_bytes:
                found.append(kept)
    return found


def _cover(kept: Sequence[Keeping]) -> list[Keeping]:
    """Few of these that have all layers together; none where some are missing."""
    used, end = list[Keeping](), 0
    while not used or end < used[0].of:
        further = max((one for one in kept if one.layers[0] <= end), key=lambda one: one.layers[1], default=None)
        if further is None or further.layers[1] <= end:
            return []
        used.append(further)
        end = further.layers[1]
    return used


def _place(folder: str, step: int) -> Path:
    return Path(folder, name_of(step) + SUFFIX)


def _note(place: Path, rank: int) -> Path:
    return place / f"rank-{rank:05d}.json"
