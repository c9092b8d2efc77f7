"""One's own loop under `torchrun --max-restarts`, saved after every step and taken up again; rank 1 is killed once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hetpipe
from hetpipe.documents.plan import Plan

STEPS, KILLED_IN, RATE = 6, 3, 0.5


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: float64 [8, 8] and int64 [8]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, dtype=torch.float64, generator=generator), torch.randint(4, (8,), generator=generator)


def main() -> None:
    engine = hetpipe.wrap(build(), Plan.load("plan.json"), batch(0)[0], cross_entropy)
    own = list(engine.parameters())
    optimizer = torch.optim.SGD(own, lr=RATE)
    name = f"{engine.replica}-{engine.index}.safetensors"
    saved = [step for step in range(1, STEPS + 1) if len(list(Path(str(step)).glob("*.safetensors"))) == engine.world.size]
    done = saved[-1] if saved else 0
    with torch.no_grad():
        for i, value in (load_file(Path(str(done), name)) if done else {}).items():
            own[int(i)].copy_(value)
    print(f"{engine.name} begins after step {done}", flush=True)
    for step in range(done, STEPS):
        if step == KILLED_IN and engine.world.rank == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch(step)
        engine.step(engine.share(inputs), engine.share(targets))
        optimizer.step()
        Path(str(step + 1)).mkdir(exist_ok=True)
        save_file({str(i): p.detach() for i, p in enumerate(own)}, Path(str(step + 1), name))


if __name__ == "__main__":
    main()
