"""The plan class that `auto` and `exhaustive` search, and its words.

Any set of devices is split into ordered pipelines (replicas) with any cuts. A stage is on one device, or on t of one type and
node (tensor parallel) where the profile measured that type at degree t (back end torch only). Replica r is given n_r ≥ 1
samples, Σ n_r = B, and a micro-batch size b_r that the profile measured on every type and degree that it uses, at most B or the
next above: it does ⌊n_r / b_r⌋ micro-batches of b_r samples and a last one of the remainder, if there is one (so n_r < b_r is one
micro-batch of n_r). Each stage recomputes, offloads or neither. Each replica has one family of warm-up depths: n − s ("1f1b"),
2(n − s) − 1 ("deep"), 3(n − s) − 2 ("deeper") or m ("gpipe"); a plan whose replicas are all "gpipe" is stored with that schedule,
others store what differs from 1F1B as `warmup`. (While a micro-batch is away on n − s − 1 balanced stages, a stage has time for
that many forwards and backwards; where a backward takes twice as long, for three times as many forwards.) Peak memory is at most
memory × (1 − reserve). The back ends fairscale and torchgpipe: gpipe only, no offload, all devices of a replica on one node. The
objective is `simulate`'s step.

Recompute and offload never shorten a step (the simulated time is a longest path, monotone in every duration), and a stage that
does either takes no device memory from another, so a stage does so only if it does not fit otherwise: this loses no optimum and
leaves few choices. A stage that offloads is on a kind of its own (`types`), and all that do share the memory of their hosts.
Likewise of two pipelines with the same samples, devices and cuts, of which one is ready no later at any stage,
and has made no layer's gradients later, the other can be left out: gradient sums and optimizers depend on nothing else, and the
step is monotone in all these times."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from hetpipe.files.messages import InputError
from hetpipe.planning.partition import PartitionError, Problem

Family = Literal["1f1b", "deep", "deeper", "gpipe"]
FORWARDS: dict[Family, int] = {"1f1b": 1, "deep": 2, "deeper": 3}  # that a stage does more than the next, before a backward


class Load(NamedTuple):
    """What a replica is given: `m` micro-batches of `b` samples, the last of `q` instead if q > 0."""

    b: int
    m: int
    q: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes in order."""
        return (self.b,) * self.m if self.q == 0 else (self.b,) * (self.m - 1) + (self.q,)

    @property
    def last(self) -> int:
        """Samples of the last micro-batch."""
        return self.q or self.b

    @property
    def samples(self) -> int:
        """Samples in all."""
        return sum(self.sizes)


def load_of(samples: int, b: int) -> Load:
    """So many samples with a micro-batch size of b.

    >>> load_of(10, 4), load_of(3, 4)
    (Load(b=4, m=3, q=2), Load(b=3, m=1, q=0))
    """
    return Load(b, -(-samples // b), samples % b) if samples >= b else Load(samples, 1)


def depth_of(family: Family, place: int, m: int) -> int:
    """Warm-up depth of the stage that is `place` stages from the end (the last: 1)."""
    return depth(FORWARDS.get(family, 0), place, m)


def depth(forwards: int, place: int, m: int) -> int:
    """Warm-up depth of the stage that is `place` stages from the end, where each does so many forwards more than the next one; 0:
    all."""
    return max(1, min(m, forwards * (place - 1) + 1)) if forwards else max(1, m)


@lru_cache(maxsize=4096)
def families_of(allowed: tuple[Family, ...], n: int, m: int) -> tuple[Family, ...]:
    """The allowed families with different depths for n stages and m micro-batches, the shallowest of equals.
    One stage alone takes the same time at any depth, so the first (least memory) is enough."""
    seen: dict[tuple[int, ...], Family] = {}
    for family in allowed[:1] if n == 1 else allowed:
        seen.setdefault(tuple(depth_of(family, place, m) for place in range(1, n + 1)), family)
    return tuple(seen.values())


def microbatch_sizes(problem: Problem) -> list[int]:
    """Measured sizes b that a plan may use, at most the global batch, on any type of the cluster. If there are none, other
    types of the profile may still have some, as for the rest of a cluster of which this is a part."""
    batch, measured = problem.global_batch, cluster_sizes(problem)
    if measured[0] > batch:
        other = any(b <= batch for x in problem.profile.measurements for b in x.microbatch_sizes)
        raise (PartitionError if other else InputError)(
            f"the global batch of {batch} samples is below the smallest micro-batch measured on the cluster's types, "
            f"{measured[0]}; measure smaller ones with 'hetpipe profile'"
        )
    return [b for b in measured if b <= batch]


def cluster_sizes(problem: Problem) -> list[int]:
    """All measured sizes of types of the cluster."""
    types = {device.type for device in problem.cluster.devices}
    return sorted({b for x in problem.profile.measurements if x.device_type in types for b in x.microbatch_sizes})


def allowed_families(problem: Problem) -> tuple[Family, ...]:
    """The families that `schedule` and `backend` leave, the shallowest first."""
    if problem.backend != "torch":
        if problem.schedule == "1f1b":
            raise InputError(f"back end {problem.backend!r} runs gpipe only, but schedule '1f1b' is asked for")
        return ("gpipe",)
    found: dict[str, tuple[Family, ...]] = {"1f1b": ("1f1b", "deep", "deeper"), "gpipe": ("gpipe",)}
    found["auto"] = found["1f1b"] + found["gpipe"]
    return found[problem.schedule]


def require_stage_kinds(problem: Problem) -> None:
    """PartitionError where no device can have a stage, for want of a degree that was measured."""
    most = dict.fromkeys(sorted({device.type for device in problem.cluster.devices}), 0)
    for kind in most:
        most[kind] = max(node.devices.get(kind, 0) for node in problem.cluster.nodes)
    there = "the largest nodes have " + " and ".join(f"{count} {kind!r}" for kind, count in most.items())
    if problem.backend != "torch":
        most, there = dict.fromkeys(most, 1), f"the back end {problem.backend!r} runs a stage on one device"
    measured = [(m.device_type, m.tensor_parallel) for m in problem.profile.measurements if m.device_type in most]
    if all(degree > most[kind] for kind, degree in measured):
        raise PartitionError(
            f"the profile measures the cluster's types only at tensor-parallel degrees "
            f"{sorted({degree for _, degree in measured})}, and {there}; measure degree 1 with 'hetpipe profile'"
        )
