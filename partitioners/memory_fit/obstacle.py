"""Why nothing fits, and small changes with which a plan does.

That nothing fits is said for certain where no stage with some layer fits any kind of stage, or where the bound of `lower` rules
out every step, however long. Each change is tried on its own, with the other numbers as they are, and a plan that fits was found
with it; with a smaller one of its kind none was found, which proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from hetpipe.documents.cluster import Cluster
from hetpipe.files.messages import counted
from hetpipe.files.units import in_bytes
from hetpipe.partitioners.bound.lower import Lower
from hetpipe.partitioners.memory_fit.hosts import too_small
from hetpipe.partitioners.memory_fit.packing import Packed, Packer, Tables, samples_of
from hetpipe.partitioners.memory_fit.shortage import first_enough, with_more_memory
from hetpipe.partitioners.stage_kinds.plan_class import cluster_sizes, require_stage_kinds
from hetpipe.planning.partition import PartitionError, Problem

MOST_DEVICES = 16  # more than these are no small change
CLOSE = 1e-3  # of a number that is enough: as far below it another may be enough, too
ENDLESS = 1e6  # times all samples one after the other, on the slowest devices: no step that is of interest
EFFORT = 5e6  # of the bound, in labels joined


def explain(problem: Problem, *, one_pipeline: bool = False) -> PartitionError:
    """The error to be raised where no plan was found: limits on price and time first, then memory."""
    return Obstacle(problem, one_pipeline).error()


def refuse(problem: Problem) -> None:
    """Raise that error where it is certain that nothing fits."""
    obstacle = Obstacle(problem, False)
    if obstacle.certain():
        raise obstacle.error()


def fits(problem: Problem) -> bool:
    """Whether a plan is found that fits into memory. Where none is, there may be one."""
    try:
        require_stage_kinds(problem)
    except PartitionError:
        return False
    return Obstacle(problem, False).enough(problem)


class Obstacle:
    """Why nothing fits a problem, in any number of replicas or in one pipeline."""

    def __init__(self, problem: Problem, one_pipeline: bool) -> None:
        self.problem, self.one_pipeline, self.tables = problem, one_pipeline, Tables()
        self.packer = Packer(problem, self.tables)

    def packing(self, changed: Problem) -> list[Packed]:
        """Pipelines that do the batch of a changed problem, without offload if that is enough; not all of it, where none were
        found that fit the devices."""
        found = list[Packed]()
        for way in sorted({False, changed.allow_offload}):
            found = Packer(replace(changed, allow_offload=way), self.tables).packing(self.one_pipeline, whole=True)
            if samples_of(found) >= changed.global_batch:
                break
        return found

    def enough(self, changed: Problem) -> bool:
        """Whether a plan that fits is found for a changed problem."""
        found = self.packing(changed)
        return samples_of(found) >= changed.global_batch and not too_small(Packer(changed, self.tables), found)

    def certain(self) -> bool:
        """Whether it is proven that no plan fits, and has the price."""
        if self.largest_layer()[0] > 0:
            return True
        types, batch = self.packer.types, self.problem.global_batch
        lower = Lower(types, 0.0)
        lower.left = EFFORT
        slowest = max(types.times(v, b)[:, -1].sum() for v, kind in enumerate(types.kinds) for b in types.sizes_of(kind))
        parts = lower.parts[:1] if self.one_pipeline else lower.parts  # the first is of one replica
        return all(lower.ruled_out(part, ENDLESS * slowest * batch) for part in parts)

    def error(self) -> PartitionError:
        """The error of `explain`."""
        problem = self.problem
        free = self.packing(replace(problem, max_price_per_hour=None))
        if samples_of(free) >= problem.global_batch:
            return self._hosts() or self._limits(free)
        packing = self.packer.packing(self.one_pipeline)
        more = self._more_memory()
        text, missing, needed = self._text(packing, more)
        changes = list(self._changes(samples_of(packing), more)) or [
            "use other devices: no single change of memory, batch, schedule or number of devices was found to be enough"
        ]
        found = "no plan fits the memory of the cluster"
        if not self.certain():
            found = "no plan that fits the memory of the cluster was found; there may be one"
        return PartitionError(
            f"{found}: {text}. It would fit if you {', or '.join(changes)}", missing_bytes=missing, needed_bytes=needed
        )

    def _hosts(self) -> PartitionError | None:
        """The error where devices hold the batch only if stages offload more than hosts lend."""
        packing, batch = self.packing(self.problem), self.problem.global_batch
        short = too_small(self.packer, packing)
        if samples_of(packing) < batch or not short:
            return None
        over = " and ".join(host.text(node) for node, host in short.items())
        more = " and ".join(f"of node {node!r} to {in_bytes(host.needed, up=True)}" for node, host in short.items())
        changes = [f"raise the host_memory {more}", *self._changes(batch, self._more_memory())]
        return PartitionError(
            f"no plan that fits the memory of the cluster's hosts was found; there may be one: to hold the {batch} samples of a "
            f"step, stages offload {over}. It would fit if you {', or '.join(changes)}",
            missing_bytes=sum(host.needed - host.lent for host in short.values()),
        )

    def _more_memory(self) -> tuple[int, str] | None:
        """(bytes, type): the least memory more on each device of one type that is enough; None if none is."""
        return self._least(lambda name, more: with_more_memory(self.problem, {name: more}), self._ample)

    def _limits(self, free: list[Packed]) -> PartitionError:
        """The error where memory is enough, but no plan was found that has the price or the deadline."""
        problem, most, wanted = self.problem, self.problem.max_price_per_hour, list[str]()
        if most is not None:
            wanted.append(f"at most {most} per hour")
        if problem.deadline_seconds_per_step is not None:
            wanted.append(f"at most {problem.deadline_seconds_per_step} s per step")
        if not wanted:
            return PartitionError(
                f"no plan was found, though the devices have memory for {problem.global_batch} samples; allow more time "
                "(--time-limit, time_limit_seconds)",
                out_of_time=True,
            )
        change = "raise --deadline-seconds-per-step, or plan without it to see the fastest plan"
        if most is not None:
            least = self._least_price(free)
            change = f"raise --max-price-per-hour, {change}"
            if least > most:
                change = (
                    f"the cheapest devices that were found to hold the model cost {least} per hour: raise "
                    f"--max-price-per-hour to {least}"
                )
        return PartitionError(f"no plan has {' and '.join(wanted)}, though the model fits the cluster; {change}")

    def _least_price(self, free: list[Packed]) -> float:
        """The least price of devices that were found to hold the batch, beginning with some."""
        low, high = 0.0, self.packer.price(free)
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            found = self.packing(replace(self.problem, max_price_per_hour=middle))
            enough = samples_of(found) >= self.problem.global_batch
            low, high = (low, self.packer.price(found)) if enough else (middle, high)
        return high

    def _text(self, packing: list[Packed], more: tuple[int, str] | None) -> tuple[str, int | None, int | None]:
        """Which layer has no device left, and how many bytes are missing on which type; that number; and what is needed there."""
        problem, layers, packer = self.problem, self.problem.profile.layers, self.packer
        short, layer, v = self.largest_layer()
        if short > 0:
            kind, limit = packer.kinds[v], packer.limits[v]
            split = f" split over {kind.degree}" if kind.degree > 1 else ""
            alone = packer.peak(v, 1, 1, 1)[layer, layer + 1] == short + limit
            needs = "alone needs" if alone else "needs at least"
            return (
                (
                    f"layer {layer} ({layers[layer].name!r}) {needs} {in_bytes(short + limit)} on a {kind.type!r}{split}, which "
                    f"has {in_bytes(limit)}{problem.without_reserve}: {in_bytes(short)} are missing"
                ),
                round(short),
                round(short + limit),
            )
        found, text = packer.longest(-(-problem.global_batch // len(packing)) if packing else 1), ""
        devices = sum(count * kind.degree for count, kind in zip(found.take, packer.kinds, strict=True))
        if packing:
            text = (
                f"{samples_of(packing)} of the {problem.global_batch} samples of a step are the most that were found to fit "
                f"({counted(len(packing), 'pipeline')}); with {counted(found.samples, 'sample')} in "
            )
        text += f"{'' if packing else 'with '}micro-batches of {found.b} "
        left = f"layer {found.first - 1} ({layers[found.first - 1].name!r})"
        if found.first == len(layers):
            text += f"no device holds even {left}"
        elif found.first:
            holds = f"a pipeline of {counted(devices, 'device')} holds only layers {found.first} to {len(layers) - 1}"
            text += f"{holds}; {left} is left over"
        else:
            text += f"layer {layer} ({layers[layer].name!r}) is the largest for the devices"
        if more is None:
            return text, None, None
        size, name = more
        needed = (problem.cluster.device_types[name].memory + size) * (1 - problem.memory_reserve)
        return f"{text}: {in_bytes(size)} are missing on each {name!r}", size, round(needed)

    def largest_layer(self) -> tuple[float, int, int]:
        """(bytes missing, layer, kind of stage) of the layer that lacks most, on the kind where it lacks least."""
        table = np.array([self.packer.least(v) - self.packer.limits[v] for v in self.packer.usable])
        layer = int(table.min(axis=0).argmax())
        row = int(table[:, layer].argmin())
        return float(table[row, layer]), layer, self.packer.usable[row]

    def _least(self, changed: Callable[[str, int], Problem], most: Callable[[str], int]) -> tuple[int, str] | None:
        """(number, type): the least number that is enough of one type, up to the most of each; None if none is."""
        best: tuple[int, str] | None = None
        for name in sorted({self.packer.kinds[v].type for v in self.packer.usable}):

            def enough(number: int, name: str = name) -> bool:
                return self.enough(changed(name, number))

            high = most(name) if best is None else min(most(name), int(best[0] * (1 - CLOSE)))
            if high >= 1 and enough(high):
                best = first_enough(enough, 0, high, CLOSE), name
        return best

    def _ample(self, name: str) -> int:
        """So many bytes more that one device of the type holds everything."""
        packer, batch = self.packer, self.problem.global_batch
        whole = [
            packer.peak(v, batch, batch if packer.gpipe else min(b, batch), min(b, batch))[0, -1]
            for b, kinds in packer.sizes
            for v in kinds
            if packer.kinds[v].type == name
        ]
        return int(max(whole, default=0.0) / (1 - self.problem.memory_reserve)) + 1

    def _changes(self, samples: int, more: tuple[int, str] | None) -> Iterator[str]:
        """The changes that are enough, those that cost nothing first; so many samples were found to fit."""
        problem = self.problem
        if not problem.allow_recompute and self.enough(replace(problem, allow_recompute=True)):
            yield "allow recompute"
        if problem.memory_reserve > 0 and self.enough(replace(problem, memory_reserve=0.0)):
            yield f"set the memory reserve of {problem.memory_reserve:.0%} to 0"
        if problem.schedule == "gpipe" and problem.backend == "torch" and self.enough(replace(problem, schedule="auto")):
            yield "allow the schedule 1f1b"
        smallest = cluster_sizes(problem)[0]
        while samples >= smallest and not self.enough(replace(problem, global_batch=samples)):
            samples -= 1 + samples // 50
        if samples >= smallest:
            yield f"use a global batch of {samples} instead of {problem.global_batch}"
        if more is not None:
            yield f"give each {more[1]!r} {in_bytes(more[0], up=True)} more memory"
        spare = None
        if self.largest_layer()[0] <= 0:
            spare = self._least(lambda name, number: with_spares(problem, name, number), lambda name: MOST_DEVICES)
        if spare is not None:
            number, name = spare
            node = next(node.name for node in problem.cluster.nodes if name in node.devices)
            yield f"add {number} {name!r}" + ("" if problem.backend == "torch" else f" to node {node!r}")


def with_spares(problem: Problem, kind: str, number: int) -> Problem:
    """The problem with more devices of a type: each in a node of its own, or, where a pipeline stays within a node, all
    in the first node that has the type."""
    document = problem.cluster.model_dump()
    if problem.backend == "torch":
        taken = {node["name"] for node in document["nodes"]}
        names = [name for i in range(number + len(taken)) if (name := f"spare{i}") not in taken]
        document["nodes"] = [*document["nodes"], *({"name": x, "devices": {kind: 1}} for x in names[:number])]
    else:
        node = next(node for node in document["nodes"] if kind in node["devices"])
        node["devices"][kind] += number
    return replace(problem, cluster=Cluster.model_validate(document))
