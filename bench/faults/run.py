"""What a run under torchrun loses when a host is cut off, comes back, or loses a rank: steps, seconds by cause, and its losses
beside those of a run to which nothing happens.

    python -m bench.faults.run [--readme]      # as root: the hosts are network namespaces
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from bench.faults.hosts import HOSTS, TIMEOUT_SECONDS, Run
from bench.links.hosts import missing, network
from bench.tables import environment, markdown, replace_table
from hetpipe.cli.commands import main

NAMES = ("what happened", "in step", "steps redone", "noticed", "torchrun", "starting", "planning", "first step", "seconds lost")


BETWEEN = 30  # steps from one to the next
ENDLESS = "train.steps=100000"
FAILED, STOPPED = "error: ", "stopped by"  # what ranks say that lose another, or are told to stop


class Lost(NamedTuple):
    """What an event has cost: in which step it came, how many were done anew, seconds by cause, and all of them less a step."""

    what: str
    step: int
    redone: int
    parts: tuple[float, float, float, float, float]
    seconds: float

    def row(self) -> list[str]:
        """Of the table."""
        return [self.what, str(self.step), str(self.redone), *(f"{x:.1f}" for x in self.parts), f"{self.seconds:.1f}"]


def lost(run: Run, what: str, began: float, step: int, ended: str) -> Lost:
    """Wait until the run goes on after an event that came in the step after `step`. `ended`: what survivors say when they end."""
    seen = len(run.records())
    deadline = time.monotonic() + 240
    while len(run.records()) <= seen + (1 if ended == STOPPED else 0) or not run.said("resuming from", began):
        if time.monotonic() > deadline:
            raise run.fault(f"{what}, and nobody goes on")
        if ended == STOPPED:
            run.start_those_that_ended(ENDLESS)
        time.sleep(0.05)
    resumed = run.said("resuming from", began)[-1]
    on = run.reach(_resumed_step(run, began) + 1)
    noticed = run.said(ended, began)[0]
    again = run.said("job.yaml: mlp on", began)[-1]
    planned = [x for x in (*run.said("planning", again), *run.said("measuring links: 0", again)) if x <= resumed]
    ready = min(planned, default=resumed)
    parts = noticed - began, again - noticed, ready - again, resumed - ready, on - resumed
    usual = statistics.median(r["step_seconds"] for r in run.records()[:seen] if "step_seconds" in r)
    Console(stderr=True).print(f"{what}: {parts}", highlight=False)
    return Lost(what, step + 1, max(0, step - _resumed_step(run, began)), parts, on - began - usual)


def _resumed_step(run: Run, since: float) -> int:
    text = next(x.text for x in reversed(run.lines) if x.seconds >= since and "resuming from" in x.text)
    return int(text.split("step-")[1].split(";")[0])


def disturbed(run: Run, switch: str) -> list[Lost]:
    """A host is cut off and comes back, a rank is killed, and a host is switched off and on."""
    found = list[Lost]()
    for host in HOSTS:
        run.start(host, ENDLESS)
    run.reach(BETWEEN)
    port = ["ip", "-n", switch, "link", "set", f"port{len(HOSTS) - 1}"]
    subprocess.run([*port, "down"], check=True)
    found.append(lost(run, "host d is cut off", time.monotonic(), run.step(), FAILED))
    run.reach(run.step() + BETWEEN)
    subprocess.run([*port, "up"], check=True)
    found.append(lost(run, "host d is back", time.monotonic(), run.step(), STOPPED))
    run.reach(run.step() + BETWEEN)
    began, step = time.monotonic(), run.step()
    os.kill(run.ranks("c")[0], signal.SIGKILL)
    found.append(lost(run, "the rank of c is killed", began, step, FAILED))
    run.reach(run.step() + BETWEEN)
    began, step = time.monotonic(), run.step()
    run.switch_off("d")
    found.append(lost(run, "host d is switched off", began, step, FAILED))
    run.reach(run.step() + BETWEEN)
    began, step = time.monotonic(), run.step()
    run.start(HOSTS[-1], ENDLESS)
    found.append(lost(run, "host d is switched on", began, step, STOPPED))
    run.reach(run.step() + BETWEEN)
    run.stop()
    return found


def whole(run: Run, steps: int) -> None:
    """Nothing happens."""
    for host in HOSTS:
        run.start(host, f"train.steps={steps}")
    run.finish()


def run(readme: Annotated[bool, typer.Option("--readme", help="Write the table into README.md.")] = False) -> None:
    """Both runs, and the table."""
    if (why := missing()) is not None:
        raise RuntimeError(why)
    console, root, where = Console(), Path(tempfile.mkdtemp(prefix="hetpipe-faults-")), environment()
    with network(HOSTS) as spaces:
        runs = [Run(root / name, spaces) for name in ("disturbed", "whole")]
        try:
            found = disturbed(runs[0], f"hetpipe{os.getpid()}-switch")
            whole(runs[1], steps := runs[0].step())
        finally:
            for each in runs:
                each.end()
    ours, truth = ({r["step"]: r["loss"] for r in each.records()} for each in runs)
    in_order = [r["step"] for r in runs[0].records()] == list(range(1, steps + 1))
    off = max(abs(ours[step] - loss) / abs(loss) for step, loss in truth.items())
    text = (
        f"On {where}; HETPIPE_TIMEOUT_SECONDS={TIMEOUT_SECONDS}:\n\n{markdown(NAMES, [each.row() for each in found])}\n"
        f"{steps} steps; each is in the log once and in order: {in_order}. The largest difference of a loss from that of the run "
        f"to which nothing happened: {off:.1e} of it."
    )
    console.print(text, markup=False, soft_wrap=True)
    if off > 1e-9 or not in_order:
        raise RuntimeError("the disturbed run is not the whole one")
    if readme:
        replace_table(Path(__file__).with_name("README.md"), "faults", text)


if __name__ == "__main__":
    main(lambda: typer.run(run))
