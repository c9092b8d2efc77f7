"""A run that is killed again and again at random moments: is its end that of a run which never was?

    python -m bench.kills.run [--kills 60] [--seed N] [--elastic]

Kills one rank, the command, the server that its ranks are forked from, or all of them at once, at a random moment after the
first step, or in the midst of saving; starts the same command again, and so on. At the end: the state of model and optimizer
beside that of one uninterrupted run (bit for bit), every step in the log once, no process left after 15 s, nothing left in the
temporary folder. `--elastic`: a run that has lost a rank goes on with the others, by another plan, until the command is killed,
too; the states are then compared to rounding.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
import yaml
from rich.console import Console
from safetensors.torch import load_file

from bench.tables import markdown
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.cli.commands import main

MARK = "HETPIPE_KILLS_RUN"  # in the environment of a command and of all that it starts
GONE_SECONDS = 15.0
ROUNDING = 1e-9  # of the largest number of a tensor in float64
TORCHS_OWN = "torchinductor_"  # an empty cache folder, which torch makes there when an optimizer is first used
SAVED, LOG = "saved", "log"
CLUSTER = {
    "format": "hetpipe.cluster/1",
    "device_types": {"cpu": {"memory": "1 GiB"}},
    "nodes": [{"name": "n0", "devices": {"cpu": 2}}, {"name": "n1", "devices": {"cpu": 1}}],
    "link": {"bandwidth": "1 GB/s", "latency": "10 us"},
}
FIRST, SECOND, WHOLE = (
    {"layers": layers, "devices": [device]} for layers, device in (([0, 4], "n0/0"), ([4, 6], "n0/1"), ([0, 6], "n1/0"))
)
PLAN = {
    "format": "hetpipe.plan/1",
    "model": "mlp",
    "global_batch": 12,
    "schedule": "1f1b",
    "partitioner": "by hand",
    "replicas": [{"microbatch_sizes": [3, 3, 2], "stages": [FIRST, SECOND]}, {"microbatch_sizes": [2, 2], "stages": [WHOLE]}],
}
JOB: dict[str, Any] = {
    "format": "hetpipe.job/1",
    "model": {"name": "mlp", "args": {"layers": 4, "width": 32, "inputs": 8, "outputs": 4}},
    "data": {"name": "random_classification", "args": {"samples": 50, "inputs": 8, "classes": 4}},
    "cluster": "cluster.yaml",
    "profile": "profile.json",
    "plan": {"file": "plan.json"},
    "train": {
        "global_batch": 12,
        "steps": 1_000_000,
        "optimizer": {"name": "AdamW", "lr": 0.001},
        "clip_norm": 1.0,
        "scheduler": {"name": "StepLR", "step_size": 100, "warmup_steps": 5},
    },
    "checkpoint": {"folder": SAVED, "every_steps": 3, "keep": 2},
    "log": {"folder": LOG, "every_steps": 1},
}
ELASTIC = {"elastic": {"restarts": 3}}


class Victim:
    """The command in a folder of its own, started as often as need be."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.folder, self.temporary, self.goes_on = folder, folder / "temporary", "elastic" in job
        self.temporary.mkdir(parents=True)
        for name, content in (("cluster.yaml", CLUSTER), ("plan.json", PLAN), ("job.yaml", job)):
            (folder / name).write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
        self.environment = {**os.environ, MARK: str(folder), "TMPDIR": str(self.temporary)}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """`hetpipe arguments…`; what it says is added to output."""
        with (self.folder / "output").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "hetpipe", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
            )

    def finish(self, *arguments: str) -> None:
        """The same, to its end, which must be a good one."""
        if self.start(*arguments).wait(600) != 0:
            raise RuntimeError((self.folder / "output").read_text()[-3000:])

    def processes(self) -> list[int]:
        """Those of the command that live: itself, the server of ranks, its ranks."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                ours = f"{MARK}={self.folder}".encode() in (process / "environ").read_bytes().split(b"\0")
                if ours and (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(process.name))
            except OSError:
                continue
        return sorted(found)

    def step(self) -> int:
        """How many steps are in the log."""
        return len(self.steps())

    def steps(self) -> list[int]:
        """The steps in the log. (A line about a device that has become slower is of none.)"""
        log = self.folder / LOG / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        records = (json.loads(line) for line in lines if line.endswith("\n"))
        return [record["step"] for record in records if "loss" in record]

    def await_step(self, command: subprocess.Popen[bytes]) -> None:
        """Wait for one that is not yet in the log. RuntimeError if the command ends before."""
        before = self.step()
        while self.step() <= before:
            if command.poll() is not None:
                raise RuntimeError((self.folder / "output").read_text()[-3000:])
            time.sleep(0.02)

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.folder / SAVED).glob("*.partial"))


class Killed(NamedTuple):
    """`what` was killed, `in_saving` or at any moment, at a step; `half`: a checkpoint was half-written, and nobody was left to
    remove it. `left`: what was not gone after 15 `seconds`."""

    what: str
    in_saving: bool
    step: int
    seconds: float
    left: list[int]
    half: bool


def kill_once(victim: Victim, draw: random.Random, what: str, in_saving: bool) -> Killed:
    """Start the command, and kill `what` of it after its first step."""
    command = victim.start("train", "job.yaml")
    victim.await_step(command)
    time.sleep(draw.uniform(0.0, 1.5))
    alive = victim.processes()
    server, ranks = alive[1], alive[2:]
    chosen = {"a rank": [draw.choice(ranks)], "the command": [command.pid], "the server": [server], "all": alive}[what]
    deadline = time.monotonic() + 10
    while in_saving and not victim.saving() and time.monotonic() < deadline:
        pass
    for process in chosen:
        os.kill(process, signal.SIGKILL)
    if what == "a rank" and victim.goes_on:
        victim.await_step(command)
        time.sleep(draw.uniform(0.0, 1.5))
        command.kill()
    began = time.monotonic()
    while (left := [p for p in victim.processes() if p != os.getpid()]) and time.monotonic() - began < GONE_SECONDS:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    for process in left:
        os.kill(process, signal.SIGKILL)
    command.wait()
    return Killed(what, in_saving, victim.step(), seconds, left, victim.saving())


def state(folder: Path, saved: str = SAVED) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint."""
    newest = list_checkpoints(folder / saved)[-1]
    return {key: tensor for file in newest.glob("*.safetensors") for key, tensor in load_file(file).items()}


def run(
    kills: int = 60,
    seed: Annotated[int | None, typer.Option(help="Drawn if not given.")] = None,
    elastic: Annotated[bool, typer.Option(help="Go on with the ranks that are left.")] = False,
) -> None:
    """Kill a run so many times, and compare its end."""
    seed = seed if seed is not None else random.SystemRandom().randrange(2**32)
    console, draw, root = Console(), random.Random(seed), Path(tempfile.mkdtemp(prefix="hetpipe-kills-"))
    console.print(f"seed {seed}, {kills} kills")
    job = JOB | {"train": JOB["train"] | {"dtype": "float64"}} | ELASTIC if elastic else JOB
    victim, whole = Victim(root / "killed", job), Victim(root / "whole", job)
    victim.finish("profile", "job.yaml", "-o", "profile.json")
    shutil.copy(victim.folder / "profile.json", whole.folder)
    rows, litter = list[Killed](), set[str]()
    for number in range(kills):
        what, in_saving = draw.choice(["a rank", "the command", "the server", "all"]), draw.random() < 0.4
        rows.append(killed := kill_once(victim, draw, what, in_saving))
        litter |= {path.name for path in victim.temporary.iterdir() if not path.name.startswith(TORCHS_OWN)}
        when = f"{'while saving ' if in_saving else ''}at step {killed.step}"
        told = f"{', a half-written checkpoint' if killed.half else ''}{f', LEFT {killed.left}' if killed.left else ''}"
        console.print(f"{number + 1}: {what} {when}, gone in {killed.seconds:.2f} s{told}")
    last = f"train.steps={victim.step() + 10}"
    victim.finish("train", "job.yaml", "--set", last)
    whole.finish("train", "job.yaml", "--set", last)
    _report(console, victim, whole, rows, litter)


def _off(tensor: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, over the largest number."""
    if torch.equal(tensor, other):
        return 0.0
    return float((tensor - other).abs().max() / other.abs().max())


def _report(console: Console, victim: Victim, whole: Victim, rows: list[Killed], litter: set[str]) -> None:
    names, lines = ["killed", "times", "of these while saving", "half-written checkpoints left"], list[list[str]]()
    names += ["gone after, at most", "processes left after 15 s"]
    for what in dict.fromkeys(row.what for row in rows):
        _, saving, _, seconds, left, half = zip(*(row for row in rows if row.what == what), strict=True)
        found = [what, str(len(saving)), str(sum(saving)), str(sum(half))]
        lines.append([*found, f"{max(seconds):.2f} s", str(sum(map(len, left)))])
    console.print(markdown(names, lines), markup=False, soft_wrap=True)
    ours, theirs = state(victim.folder), state(whole.folder)
    off = max(_off(tensor, theirs[key]) for key, tensor in ours.items()) if ours.keys() == theirs.keys() else math.inf
    equal = off <= (ROUNDING if victim.goes_on else 0.0)
    count = whole.step()
    once = victim.steps() == whole.steps() == list(range(1, count + 1))
    console.print(f"state of model and optimizer after {count} steps, {len(ours)} tensors: {'equal' if equal else 'DIFFERENT'}")
    console.print(f"the largest difference, of the largest number of its tensor: {off:.1e}")
    console.print(f"every step, and so every sample, once: {once}")
    console.print(f"left in the temporary folder: {sorted(litter) or 'nothing'}")
    unfinished = sorted(path.name for path in (victim.folder / SAVED).iterdir() if path.suffix)
    console.print(f"half-written checkpoints at the end: {unfinished or 'none'}")
    if not (equal and once) or litter or unfinished or any(row.left for row in rows):
        raise RuntimeError("the killed run is not the whole one, or left something behind")


if __name__ == "__main__":
    main(lambda: typer.run(run))
