"""Ranks that a plan does not use wait until the others have done with it: the run may go on under a plan that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hetpipe.processes.pulse import peers_named
from hetpipe.processes.stopping import StopRequest
from hetpipe.processes.whereabouts import waiting
from hetpipe.processes.world import World

FOR_EVER = timedelta(days=10_000)  # a message of which nobody knows when it comes


@dataclass(frozen=True)
class Standby:
    """The ranks that wait, and the one that tells them, with a group of theirs (others are not in it). While they wait they stand
    still in a receive, which takes no processor; a signal that asks for a stop is left to those that train, who tell them. Where
    the rank that tells is gone, or failed, its connection ends: PeerLostError."""

    group: dist.ProcessGroup
    teller: int
    members: tuple[int, ...]
    rank: int

    @classmethod
    def create(cls, world: World, used: Sequence[int]) -> Standby | None:
        """None where all ranks of `world` are used. Collective."""
        teller = min(used)
        members = tuple(rank for rank in world.ranks if rank == teller or rank not in used)
        if len(members) == 1:
            return None
        return cls(dist.new_group(list(members), backend="gloo", timeout=FOR_EVER), teller, members, world.rank)

    def over(self) -> None:
        """Those that train have done with the plan: one tells so, and those that wait return when it has."""
        if self.rank == self.teller:
            self._pass_word()
        elif self.rank in self.members:
            with StopRequest(), waiting():
                self._pass_word()

    def close(self) -> None:
        """End the group."""
        dist.destroy_process_group(self.group)

    def _pass_word(self) -> None:
        with peers_named():
            dist.broadcast(torch.zeros(1), self.teller, group=self.group)
