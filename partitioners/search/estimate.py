"""About what a whole plan takes, compiled, with what shares network adapters: for choosing among thousands of plans.

Pipelines are simulated as if alone, over links that adapters make slower: where one is busy for the whole step, a transfer holds
the link as long as the adapter takes for all that it carries for each micro-batch of the pipeline; where for half of it, half as
much longer. Half of that is a wait for the link, which delays what is sent next but not what is sent now. Gradient sums go from
the last layer to the first; an adapter serves them in that order. What a plan really takes says the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.pipelines.line_cuts import Loaded, about, durations
from hetpipe.partitioners.pipelines.real import Pipeline, Reals
from hetpipe.predict.compiled import compiled, get_ready, inlined, once

Array = NDArray[np.float64]
Index = NDArray[np.int64]
PATTERNS = 16  # ways of crossing nodes that are told apart for one kind of pipeline; of others the last counts


class Built(NamedTuple):
    """S pipelines: their numbers of stages and their families (`forwards`) [S], the kinds, ends and recompute of their stages
    [S, n], and their loads, b, m and q [S, 3], with the arrays of `Loaded` for each of these."""

    stages: Index
    forwards: Index
    lines: Index
    ends: Index
    flags: Index
    loads: Index
    forward: Array
    backward: Array
    occupied: Array
    latency: Array


class Network(NamedTuple):
    """What is the same for all plans: what adapters carry, out and in [2, nodes], the bytes of outputs and of gradients before
    each layer [L + 1], the latency and the seconds a byte of rings between and inside of nodes [2, 2], the seconds of optimizers
    [V, lo, hi], and how many `more` each action takes; whether transfers block, and sums begin early; and how many first layers
    need no backward (`frozen`)."""

    capacity: Array
    output: Array
    summed: Array
    rings: Array
    optimizer: Array
    more: float
    blocking: bool
    early: bool
    frozen: int


class Estimates:
    """Estimates of what plans of one problem take."""

    def __init__(self, reals: Reals) -> None:
        self.reals, types = reals, reals.types
        cluster, profile = types.problem.cluster, types.problem.profile
        rates = [cluster.adapter_rates[node.name] for node in cluster.nodes]
        self.capacity = np.array(rates, dtype=np.float64).T.copy()  # [out and in, nodes]
        self.output = np.concatenate([[0.0], np.asarray(profile.output_bytes, dtype=np.float64)])
        between, inside = types.between, [link for links in types.inside.values() for link in links]
        self.rings = np.array([self._ring(between), self._ring(inside)])
        self.network = Network(
            self.capacity,
            self.output,
            types.summed[0],
            self.rings,
            types.optimizer,
            reals.more,
            reals.blocking,
            types.problem.sums_early,
            types.costs.first_trained,
        )

    def _ring(self, links: Sequence[object]) -> tuple[float, float]:
        """Latency and seconds a byte of the slowest link."""
        one = 2.0**20
        each = [(link.seconds(0), (link.seconds(one) - link.seconds(0)) / one) for link in links]  # type: ignore[attr-defined]
        return max(each, key=lambda x: x[1], default=(0.0, 0.0))

    def seconds(self, mix: Sequence[tuple[Pipeline, int]], which: Index, nodes: Index) -> float:
        """The seconds, about, of a plan: of each replica, `which` of these pipelines with so many samples it is [R], and on which
        nodes [R, stages]."""
        n, L = nodes.shape[1], self.reals.L
        loads = [self.reals.loaded(p.b, samples) for p, samples in mix]
        stages = np.array([len(p.stages) for p, _ in mix])
        lines, flags = np.zeros((2, len(mix), n), np.int64)
        ends = np.full((len(mix), n + 1), L)
        for i, (p, _) in enumerate(mix):
            lines[i, : stages[i]], ends[i, : stages[i] + 1], flags[i, : stages[i]] = p.stages, p.ends, p.recompute
        forward, backward, occupied, latency = (np.stack([x[at] for x in loads]) for at in range(4))
        built = Built(
            stages,
            np.array([p.forwards for p, _ in mix]),
            lines,
            ends,
            flags,
            np.array([[x.b, x.m, x.q] for x in loads]),
            forward,
            backward,
            occupied,
            latency,
        )
        found: float = _seconds(which, nodes, built, self.network)
        return found


@once
def ready() -> None:
    """Compile the functions of this file, or read them from disk: outside of any time limit."""
    one, zero, times = np.ones(1, np.int64), np.zeros((1, 1), np.int64), np.ones((1, 2, 1, 2))
    sent, ends = np.ones((1, 2, 1, 1, 2, 2)), np.array([[0, 1]])
    built = Built(one, one, zero, ends, zero, np.array([[1, 1, 0]]), times, times, sent, np.ones((1, 1, 1, 2)))
    network = Network(np.ones((2, 1)), np.ones(2), np.ones(2), np.ones((2, 2)), np.ones((1, 2, 2)), 0.0, False, True, 0)
    get_ready(lambda: _seconds(zero[0], zero, built, network))


@compiled
def _adapters(
    which: Index, nodes: Index, stages: Index, ends: Index, capacity: Array, output: Array, samples: Index, frozen: int
) -> tuple[Array, Array]:
    """For how many seconds of a step each adapter carries activations or their gradients, one way [nodes]; and, of each boundary,
    the busier one of its two nodes, −1 where it is inside of one [R, n − 1]."""
    R, n, count = len(which), nodes.shape[1], capacity.shape[1]
    busy, found = np.zeros(count), np.full((R, max(0, n - 1)), -1.0)
    for r in range(R):
        i = which[r]
        for s in range(stages[i] - 1):
            a, c = nodes[r, s], nodes[r, s + 1]
            if a != c:
                sent, back = output[ends[i, s + 1]] * samples[i], ends[i, s + 1] > frozen
                busy[a] += sent / (min(capacity[0, a], capacity[1, a]) if back else capacity[0, a])
                busy[c] += sent / (min(capacity[0, c], capacity[1, c]) if back else capacity[1, c])
    for r in range(R):
        for s in range(stages[which[r]] - 1):
            a, c = nodes[r, s], nodes[r, s + 1]
            if a != c:
                found[r, s] = max(busy[a], busy[c])
    return busy, found


@compiled
def _summed(  # noqa: C901
    which: Index, nodes: Index, stages: Index, ends: Index, made: Array, capacity: Array, summed: Array, rings: Array
) -> float:
    """When the last gradient sum ends. `made` when each replica has the gradients of each layer [R, L]; a sum of several layers
    goes on as they are made."""
    R, L, count = len(which), len(summed) - 1, capacity.shape[1]
    cut, at = np.zeros(L + 1, np.bool_), np.zeros(R, np.int64)
    for i in range(len(stages)):
        cut[ends[i, : stages[i]]] = True
    for r in range(R):
        at[r] = stages[which[r]] - 1
    free, served, seen = np.zeros((R, nodes.shape[1])), np.zeros(count), np.full(count, -1, np.int64)
    end, hi = 0.0, L
    for lo in range(L - 1, -1, -1):
        if not cut[lo]:
            continue
        begin, last, different = 0.0, 0.0, 0
        for r in range(R):
            while ends[which[r], at[r]] > lo:
                at[r] -= 1
            begin, last = max(begin, max(free[r, at[r]], made[r, hi - 1])), max(last, made[r, lo])
            node = nodes[r, at[r]]
            if seen[node] != lo:
                seen[node] = lo
                different += 1
        size, one = summed[hi] - summed[lo], summed[lo + 1] - summed[lo]
        hi = lo
        if size <= 0:
            continue
        k = 0 if different > 1 else 1
        rounds = 2.0 * (R - 1)
        done = max(begin + rounds * (rings[k, 0] + size / R * rings[k, 1]), last + rounds * (rings[k, 0] + one / R * rings[k, 1]))
        if different > 1:
            for node in range(count):
                if seen[node] == lo:
                    served[node] = max(served[node], begin) + rounds * size / R / min(capacity[0, node], capacity[1, node])
                    done = max(done, served[node])
        for r in range(R):
            free[r, at[r]] = done
        end = max(end, done)
    return end


@inlined
def _longest(line: Index, ends: Index, optimizer: Array) -> float:
    """Seconds of a pipeline's longest optimizer."""
    longest = 0.0
    for s in range(len(line)):
        longest = max(longest, optimizer[line[s], ends[s], ends[s + 1]])
    return longest


@inlined
def _share(held: Array, late: Array, crossed: Array, samples: int, load: Index, least: float) -> None:
    """Make transfers longer, of so many samples, in a pipeline that takes this at least."""
    for s in range(len(late)):
        for x, b in enumerate((load[0], load[2])):
            longer = max(0.0, crossed[s] / samples * b - held[s, x]) * min(1.0, crossed[s] / least)
            held[s, x] += longer
            late[s] -= longer / 2 if x == 0 else 0.0


@compiled
def _seconds(which: Index, nodes: Index, built: Built, network: Network) -> float:
    stages, lines, ends, flags, loads, more = built.stages, built.lines, built.ends, built.flags, built.loads, network.more
    forward, backward, capacity, summed = built.forward, built.backward, network.capacity, network.summed
    blocking = network.blocking
    R, S, L = len(which), len(stages), len(summed) - 1
    samples = loads[:, 0] * loads[:, 1] - (loads[:, 0] - loads[:, 2]) * (loads[:, 2] > 0)
    busy, crossed = _adapters(which, nodes, stages, ends, capacity, network.output, samples, network.frozen)
    made, kept = np.zeros((R, L)), np.full((S, PATTERNS), -1, np.int64)
    end, earliest = 0.0, np.inf
    for r in range(R):
        i = which[r]
        n, alike = stages[i], -1
        for x in range(PATTERNS):
            if kept[i, x] < 0:
                kept[i, x] = r
                break
            if x == PATTERNS - 1 or (crossed[kept[i, x]] == crossed[r]).all():
                alike = kept[i, x]
                break
        if alike >= 0:
            made[r] = made[alike]
            continue
        inside = crossed[r, : max(0, n - 1)] < 0
        f, g, held, late, which_size, depths, frozen = durations(
            lines[i, :n],
            inside,
            ends[i],
            flags[i],
            built.forwards[i],
            Loaded(forward[i], backward[i], built.occupied[i], built.latency[i], loads[i, 0], loads[i, 1], loads[i, 2]),
            more,
            blocking,
            network.frozen,
        )
        if not blocking:
            _share(held, late, crossed[r], samples[i], loads[i], loads[i, 1] * (f[:, 0] + g[:, 0]).max())
        done = about(f, g, held, late, which_size, depths, frozen)
        size, begin = 1 if loads[i, 2] > 0 else 0, _longest(lines[i, :n], ends[i], network.optimizer)
        earliest = min(earliest, begin)
        for s in range(n):
            v, lo, hi = lines[i, s], ends[i, s], ends[i, s + 1]
            done[s] += begin
            end = max(end, done[s])
            made[r, lo:hi] = done[s]
            for l in range(lo, hi if network.early else lo):  # noqa: E741
                below = backward[i, size, v, l] - backward[i, size, v, lo]
                run = max(l, network.frozen), max(lo, network.frozen)
                made[r, l] = done[s] - below - flags[i, s] * (forward[i, size, v, run[0]] - forward[i, size, v, run[1]])
    if R > 1:
        end = max(end, _summed(which, nodes, stages, ends, made, capacity, summed, network.rings))
    if not blocking:
        end = max(end, earliest + busy.max())
    return end
