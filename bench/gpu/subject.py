"""What the parts run: a small GPT of the zoo, its batches, and plans of one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.documents.plan import Backend, Plan, ReplicaPlan, StagePlan
from hetpipe.layers.model import Loss, Model, cross_entropy
from hetpipe.models import gpt

NAME = "gpt"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """`device_type`: cuda or cpu. `arguments`: of the zoo's gpt. `microbatch`: samples of a micro-batch, of which a step has
    `microbatches`. `steps` and `repeats`: how many steps, and how many runs of a layer, a median is of. `folder`: where a part
    leaves files for those after it. `tests`: arguments of pytest (None: the tests are not run), `tests_seconds` their limit."""

    device_type: str
    arguments: Mapping[str, Any]
    microbatch: int
    microbatches: int
    steps: int
    repeats: int
    folder: str
    tests: tuple[str, ...] | None = None
    tests_seconds: float = 0.0

    @property
    def device(self) -> torch.device:
        """The first card, or the CPU."""
        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.microbatch * self.microbatches

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of each micro-batch."""
        return (self.microbatch,) * self.microbatches

    def layers(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        """The model on the CPU, with the same values at every call."""
        torch.manual_seed(0)
        return gpt.build(**self.arguments).to(dtype)

    def batch(self, samples: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens after them, int64 [samples, context] each (`samples`: those of a step), always the same."""
        size = gpt.SIZES[self.arguments.get("size", "tiny")]
        context, words = self.arguments.get("context", size.context), self.arguments.get("vocabulary", 256)
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(words, (samples or self.samples, context + 1), generator=draw)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def model(self, dtype: torch.dtype = torch.float32) -> Model:
        """The layers with a sample and the loss, a mean over samples."""
        inputs, targets = self.batch(2)
        return Model(name=NAME, layers=self.layers(dtype), inputs=inputs, targets=targets, loss=Loss(function=cross_entropy))

    def plan(self, stages: int = 1, backend: Backend = "torch") -> Plan:
        """One replica of so many stages of about as many layers, on the devices n0/0, n0/1, …"""
        count = len(self.layers())
        cuts = [count * s // stages for s in range(stages + 1)]
        replica = ReplicaPlan(
            microbatch_sizes=self.sizes,
            stages=tuple(StagePlan(layers=(cuts[s], cuts[s + 1]), devices=(f"n0/{s}",)) for s in range(stages)),
        )
        return Plan(model=NAME, global_batch=self.samples, schedule="gpipe", backend=backend, replicas=(replica,))
