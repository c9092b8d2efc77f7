"""What the ranks of the tests do with checkpoints."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hetpipe
from hetpipe.checkpoints import checkpoint, digests
from hetpipe.checkpoints.checkpoint import CheckpointError
from hetpipe.checkpoints.stores import shared
from hetpipe.checkpoints.stores.folder import STATE_FILE
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import train_rank

SCHEDULE = ("scheduler", "scheduler_state", "scheduled")
STEP_LR, EXPONENTIAL = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.ExponentialLR


def _refusals(*calls: Callable[[], object]) -> list[str]:
    found = []
    for call in calls:
        try:
            call()
        except InputError as error:
            found.append(str(error))
    return found


def older_version(saved: Path) -> None:
    """As it was written before there were digests, and before a loop of one's own could save more than tensors."""
    file = saved / STATE_FILE
    new = ("files", "digest", "steps") + (() if "sampler" in (state := json.loads(file.read_text())) else SCHEDULE)
    file.write_text(json.dumps({key: value for key, value in state.items() if key not in new}))


def saved_and_loaded(engine: PlanEngine, optimizer: torch.optim.Optimizer, folder: str, train: Any) -> dict[str, Any]:
    """Two steps; back to before them, by a checkpoint and by a state, and the same two again; and what is refused."""
    scheduler = EXPONENTIAL(optimizer, 0.5)
    assert hetpipe.load_checkpoint(engine, optimizer, folder, scheduler) == 0
    scheduler.step()
    engine.steps = 7  # of which some were not saved
    saved = hetpipe.save_checkpoint(engine, optimizer, folder, 3, scheduler)
    whole = engine.whole_state_dict()
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    first = train(2)
    scheduler.step()
    with _files_read() as read:
        step = hetpipe.load_checkpoint(engine, optimizer, folder, scheduler)
    schedule = engine.steps, optimizer.param_groups[0]["lr"], scheduler.last_epoch
    again = train(2)
    engine.load_state_dict(state)
    back = all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())
    name = next(iter(state))
    less = {key: value for key, value in state.items() if key != name}
    plain = torch.optim.SGD(engine.parameters(), lr=0.2)
    odd = EXPONENTIAL(optimizer, 0.5)
    vars(odd)["seen"] = torch.ones(2)
    refused = _refusals(
        lambda: engine.load_state_dict({**state, "99.weight": torch.ones(1)}),
        lambda: engine.load_state_dict({**less, name: torch.ones(1, 2, 3)}),
        lambda: engine.load_state_dict(less),
        lambda: hetpipe.load_checkpoint(engine, plain, folder, EXPONENTIAL(plain, 0.5)),
        lambda: hetpipe.load_checkpoint(engine, optimizer, folder),
        lambda: hetpipe.load_checkpoint(engine, optimizer, folder, STEP_LR(optimizer, 2)),
        lambda: hetpipe.save_checkpoint(engine, optimizer, folder, 4, odd),
        lambda: hetpipe.save_checkpoint(engine, optimizer, folder, 4, scheduler if engine.world.is_main else None),
    )
    engine.world.on_main(lambda: older_version(saved))
    older = hetpipe.load_checkpoint(engine, optimizer, folder), engine.steps
    return {
        "first": first,
        "again": again,
        "older": older,
        "step": step,
        "back": back,
        "refused": refused,
        "whole": whole,
        "read": read,
        "schedule": schedule,
        "files": sorted(path.name for path in saved.glob("*.safetensors")),
    }


@contextmanager
def _files_read() -> Iterator[list[str]]:
    """The files whose digests this rank works out."""
    names, real = list[str](), digests.damage

    def noted(open_file: Any, files: Any, take: Any = None) -> list[str]:
        names.extend(files)
        return real(open_file, files, take)

    vars(checkpoint)["damage"] = noted
    yield names
    vars(checkpoint)["damage"] = real


def cannot_save(engine: PlanEngine, optimizer: torch.optim.Optimizer, folder: str) -> dict[str, Any]:
    """Where a file may have no more than a kilobyte on one rank, and where each rank has a folder of its own."""
    failed, limits = "", resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        hetpipe.save_checkpoint(engine, optimizer, folder, 9)
    except CheckpointError as error:
        failed = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in Path(folder).iterdir())

    vars(shared)["WAIT_SECONDS"] = 0.3
    own = Path(f"{folder}-of-rank-{engine.world.rank}")
    (own / "loop").mkdir(parents=True)
    before = os.getcwd()
    os.chdir(own)
    apart = _refusals(lambda: hetpipe.save_checkpoint(engine, optimizer, "loop", 9))
    vars(shared)["_found"].add(str(own / "loop"))  # as if one folder had become two
    try:
        hetpipe.save_checkpoint(engine, optimizer, "loop", 9)
    except CheckpointError as error:
        apart.append(str(error))
    if engine.world.is_main:
        (own / "loop" / "step-00000009").mkdir()
        (own / "loop" / "step-00000009" / "trainer.json").touch()
    apart += _refusals(lambda: hetpipe.load_checkpoint(engine, optimizer, "loop"))
    (own / "link").symlink_to(folder)
    hetpipe.save_checkpoint(engine, optimizer, "link", 9)  # one folder by five names
    os.chdir(before)
    there = sorted(path.relative_to(own / "loop").as_posix() for path in (own / "loop").rglob("*"))
    return {
        "failed": failed,
        "left": left,
        "apart": apart,
        "own": str(own / "loop"),
        "there": there,
        "one": sorted(path.name for path in Path(folder).iterdir()),
    }


def train_apart(job: Job) -> TrainResult | None:
    """Each rank in a folder of its own, as on hosts that share none."""
    vars(shared)["WAIT_SECONDS"] = 0.3
    own = Path(os.environ["RANK"])
    own.mkdir()
    os.chdir(own)
    return train_rank(job)
