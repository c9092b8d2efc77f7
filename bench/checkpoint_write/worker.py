"""One process that saves a state and loads it again, by whichever hetpipe is imported. It prints its figures as JSON."""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hetpipe.checkpoints import checkpoint
from hetpipe.processes.world import alone

MIB = 2**20


def resident(key: str) -> float:
    """Return a figure of this process's memory, in MiB."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def timed(action: Callable[[], object]) -> tuple[float, float, float]:
    """Return seconds, processor seconds, and the MiB that were resident at most beyond those at the start."""
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # VmHWM begins anew
    before, began, used = resident("VmRSS"), time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - used, resident("VmHWM") - before


def copies(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, float]:
    """Return the seconds of what nobody is faster than."""
    found = {"a copy in memory": timed(lambda: [t.clone() for t in tensors.values()])[0]}
    found["torch.save"] = timed(lambda: torch.save(tensors, folder / "torch"))[0]
    pieces = [memoryview(t.view(-1).view(torch.uint8).numpy()) for t in tensors.values()]  # type: ignore[arg-type]

    def digest() -> None:
        known = hashlib.blake2b(digest_size=32)
        for piece in pieces:
            known.update(piece)

    def write() -> None:
        with (folder / "bytes").open("wb") as file:
            for piece in pieces:
                file.write(piece)
            os.fsync(file.fileno())

    found["the digest alone"], found["writing alone, until it is on the disk"] = timed(digest)[0], timed(write)[0]
    return found


def model(width: int, layers: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return layers with an AdamW that has done a step."""
    torch.manual_seed(0)
    made = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(made.parameters())
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return made, optimizer


def measured(width: int, layers: int) -> dict[str, float]:
    """Return all figures of one process."""
    made, optimizer = model(width, layers)
    tensors = {name: p.detach() for name, p in made.named_parameters()}
    tensors |= {f"{i}.{k}": t for i, kept in enumerate(optimizer.state.values()) for k, t in kept.items() if t.ndim}
    with tempfile.TemporaryDirectory() as name:
        found = copies(tensors, Path(name))
        del tensors
        for _ in range(2):  # the first imports what it needs
            save = timed(lambda: checkpoint.save(name, 1, made, optimizer, {}, alone(), keep=1))
        saved = checkpoint.list_checkpoints(name)[-1]
        again = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        other = torch.optim.AdamW(again.parameters())
        load = timed(lambda: checkpoint.load(saved, again, other, alone()))
        assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
        size = sum(file.stat().st_size for file in saved.iterdir()) / 1e6
    for what, (seconds, processor, most) in (("save", save), ("load", load)):
        found |= {f"{what}: seconds": seconds, f"{what}: processor seconds": processor, f"{what}: MiB more at most": most}
    return found | {"MB": size}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measured(*map(int, sys.argv[1:3]))))
