"""Which records of a stream make up which step: each once, in the stream's order or mixed within blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypedDict

import torch
from torch import Tensor


class StreamState(TypedDict):
    """Where a StreamSampler stands; plain numbers, fit for a checkpoint."""

    kind: Literal["stream"]
    seed: int
    block: int
    position: int


class StreamSampler:
    """Global batches of int64 [global_batch] record numbers without end. Records are counted from the begin of the first pass, so
    a batch at the end of a pass is filled from the next.

    Attributes:
        block: this many records in a row are mixed with each other, by `seed` and the number of the block; 1 keeps their order.
        position: samples already yielded. Since it counts samples, a run can resume with another global batch.
    """

    def __init__(self, global_batch: int, *, block: int = 1, seed: int = 0) -> None:
        self.global_batch, self.block, self.seed, self.position = global_batch, block, seed, 0
        self._mixed: tuple[int, Tensor] | None = None  # the last block, and its order

    def forever(self) -> Iterator[Tensor]:
        """Yield batches without end. Each counts as seen as soon as it is yielded."""
        while True:
            first, end = self.position, self.position + self.global_batch
            self.position = end
            yield self._numbers(first, end)

    def _numbers(self, first: int, end: int) -> Tensor:
        if self.block == 1:
            return torch.arange(first, end)
        parts = list[Tensor]()
        for number in range(first // self.block, (end - 1) // self.block + 1):
            begin = number * self.block
            parts.append(begin + self._order(number)[max(0, first - begin) : end - begin])
        return torch.cat(parts)

    def _order(self, number: int) -> Tensor:
        if self._mixed is None or self._mixed[0] != number:
            generator = torch.Generator().manual_seed(self.seed + number)
            self._mixed = number, torch.randperm(self.block, generator=generator)
        return self._mixed[1]

    def state_dict(self) -> StreamState:
        """The state, for a checkpoint."""
        return StreamState(kind="stream", seed=self.seed, block=self.block, position=self.position)

    def load_state_dict(self, state: StreamState) -> None:
        """Continue where the state was saved, in the saved run's order: its seed is taken over, too. ValueError if the records
        are mixed in other blocks."""
        if state["block"] != self.block:
            raise ValueError(
                f"the checkpoint was saved over a stream that is mixed in blocks of {state['block']} records, and now they have "
                f"{self.block}: set `shuffle` back to resume, or start anew"
            )
        self.seed, self.position, self._mixed = state["seed"], state["position"], None
