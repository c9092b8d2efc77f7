"""Copies between a device and the memory of its host: on a card from and to pinned memory, beside the layers; else at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Copies:
    """Copies of flat tensors [bytes]. On a card they run on two streams of their own, one each way, behind what the card has been
    given so far, and whoever uses what they bring waits for their event; elsewhere they are done, in `paced()`, and the event is
    None."""

    def __init__(self, device: torch.device, paced: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.device, self.paced = device, paced
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def out(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """These of the device on the host; when they are. Until then the device's must stay as they are."""
        if not self._streams:
            return self._at_once(tensors), None
        out, _ = self._streams
        hosts = [torch.empty(t.numel(), dtype=t.dtype, pin_memory=True) for t in tensors]
        out.wait_stream(torch.cuda.current_stream(self.device))
        return hosts, self._copied(out, tensors, hosts)

    def back(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """These of the host on the device; when they are. The current stream must have waited until they were on the host, and
        must wait for their event before their memory, which is its own, is given back."""
        if not self._streams:
            return self._at_once(hosts), None
        _, back = self._streams
        tensors = [torch.empty(t.numel(), dtype=t.dtype, device=self.device) for t in hosts]
        back.wait_stream(torch.cuda.current_stream(self.device))  # what had that memory before may still be read there
        return tensors, self._copied(back, hosts, tensors)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What the device is given from now on comes after this event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @staticmethod
    def _copied(stream: torch.cuda.Stream, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> torch.cuda.Event:
        """When they are. (torch gives pinned memory to nobody else before copies that it has seen are done.)"""
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _at_once(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with self.paced():
            return [t.clone() for t in tensors]
