"""The command `hetpipe`, which notes when the phases of a training's start are over.

    python -m bench.scale.starting train job.yaml      (started by run.py, in an environment with FOLDER)

Nothing of hetpipe is changed but this: some functions say when they begin or end. Each process leaves its moments as a file of
the folder: by name the seconds of the machine's clock, which is the same for all processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "HETPIPE_SCALE_FOLDER"
PHASES = {  # in their order; the moment at which the last process is through it
    "commands": "the interpreter, and the imports of the command line",
    "job": "reading and checking the job",
    "torch": "importing torch in the process of the command",
    "forks": "the other process, from which ranks are forked, importing more than that; forking them",
    "meeting": "the rendezvous and the first process groups",
    "model": "building data and model, and tracing its shapes",
    "files": "claiming folders, reading plan and profile, and checking them",
    "groups": "agreeing on the plan, and its process groups",
    "engine": "the engine: its hooks, and waiting for the last rank",
    "loop": "simulating the plan, the optimizer, the first batch",
    "first step": "the first step",
}
_moments: dict[str, float] = {}


def mark(phase: str) -> None:
    """This phase ends now, where it has not ended before."""
    _moments.setdefault(phase, time.monotonic())


def noted(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    """Let `owner.name` mark phases when it begins and when it ends."""
    function: Callable[..., Any] = getattr(owner, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        if before:
            mark(before)
        result = function(*arguments, **options)
        if after:
            mark(after)
        return result

    setattr(owner, name, noting)


def save(name: str) -> None:
    """Leave this process's moments."""
    Path(os.environ[FOLDER], f"{name}.json").write_text(json.dumps(_moments))


def rank(program: Callable[..., Any], *arguments: Any) -> Any:
    """The program of a rank."""
    mark("forks")
    from hetpipe.processes.world import World
    from hetpipe.runtime.plan_engine import PlanEngine
    from hetpipe.training import legs, session, trainer

    noted(session, "meet", after="meeting")
    noted(session, "build_model", after="model")
    noted(trainer, "prepare", after="files")
    noted(World, "restrict", after="groups")
    noted(legs, "join", after="engine")
    noted(PlanEngine, "step", before="loop", after="first step")
    result = program(*arguments)
    save(f"rank {os.environ['RANK']}")
    return result


def command() -> None:
    """The command line."""
    from hetpipe.cli import commands
    from hetpipe.processes.ranks import launch

    mark("commands")
    start_ranks = launch.start_ranks

    def start(program: Callable[..., Any], arguments: Any, *others: Any) -> list[Any]:
        mark("torch")
        save("command")
        return start_ranks(rank, (program, *arguments), *others)

    launch.start_ranks = start  # type: ignore[assignment]
    noted(commands, "start_server", before="job")
    commands.main()


if __name__ == "__main__":
    command()
