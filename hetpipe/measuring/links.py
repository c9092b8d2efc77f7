"""How fast the nodes send each other bytes: each way apart, by one flow and by as many as a node's devices can start."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from hetpipe.documents.cluster import AdapterOf, Cluster, LinkBetween, Rates
from hetpipe.files.units import three_digits
from hetpipe.measuring.traffic import SMALL_BYTES, Flow, Pair, at_once, ping_pong
from hetpipe.processes.progress import Activity, warn
from hetpipe.processes.world import World

LARGE_BYTES = 4 * 2**20
LATENCY_REPEATS = 15
PILOT_BYTES, PILOT_REPEATS = 2**16, 3  # to see about how fast a link is
MESSAGE_SECONDS = 0.05
EQUAL = 0.05  # by which rates may differ that are taken for the same
EXPLAINED = 0.15  # by which adapters may miss the slower way of a link that is as fast as its faster way


class FlowFound(NamedTuple):
    """What so many flows at once carried together, from a node to a node; None: to or from all others. The spread is the
    distance of the quartiles of a message's seconds, over their median."""

    source: str | None
    target: str | None
    flows: int
    bytes_per_second: float
    relative_spread: float


class Wires(NamedTuple):
    """Links and adapters, and what they were made of."""

    links: tuple[LinkBetween, ...]
    adapters: tuple[AdapterOf, ...]
    found: tuple[FlowFound, ...]

    def noted(self) -> list[dict[str, object]]:
        """For a profile's provenance."""
        return [
            {name: value for name, value in (("from", x.source), ("to", x.target)) if value is not None}
            | {"flows": x.flows, "bytes_per_second": round(x.bytes_per_second), "relative_spread": round(x.relative_spread, 4)}
            for x in self.found
        ]


def node_pairs(cluster: Cluster, world: World) -> list[Pair]:
    """Inside every node with two ranks, and between every two nodes."""
    of_node = ranks_of_nodes(cluster, world)
    names = list(of_node)
    found = [Pair(a, a, of_node[a][0], of_node[a][1]) for a in names if len(of_node[a]) > 1]
    return found + [Pair(a, b, of_node[a][0], of_node[b][0]) for i, a in enumerate(names) for b in names[i + 1 :]]


def ranks_of_nodes(cluster: Cluster, world: World) -> dict[str, list[int]]:
    """The ranks of each node that has one, in the order of its devices."""
    found: dict[str, list[int]] = {}
    for device in cluster.devices:
        if device.id in world.rank_of:
            found.setdefault(device.node, []).append(world.rank_of[device.id])
    return found


def many_flows(own: Sequence[int], others: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Pairs of a node's rank and one of another node, as many as there can be: each rank once, the other nodes in turn.

    >>> many_flows([0, 1, 2], [[3, 4], [5]])
    [(0, 3), (1, 5), (2, 4)]
    """
    in_turn = [rank for row in zip_longest(*others) for rank in row if rank is not None]
    return list(zip(own, in_turn, strict=False))


def alone_on_hosts(of_node: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> list[str]:
    """The nodes that share their host with no other: what crosses their border crosses an adapter. Pure."""
    on = {name: {hosts[rank] for rank in ranks} for name, ranks in of_node.items()}
    return [name for name in on if not any(on[name] & on[other] for other in on if other != name)]


def measure_links(cluster: Cluster, world: World) -> Wires:
    """Between every two nodes and inside every node with two ranks: latency (half of a round trip of a few bytes) and the rate of
    one flow, each way apart. Then, of nodes with several ranks and a host of their own, what leaves them, and what enters
    them, by one flow a rank at once; and inside nodes by pairs of ranks at once. Collective."""
    pairs, of_node = node_pairs(cluster, world), ranks_of_nodes(cluster, world)
    alone = alone_on_hosts(of_node, world.hosts)
    many = [x for name, ranks in of_node.items() for x in _many(name, ranks, of_node, leaves=name in alone)]
    latency, found = dict[tuple[str, str], float](), list[FlowFound]()
    with Activity("measuring links", len(pairs) + len(many), shown=world.is_main) as activity:
        for pair in pairs:
            latency[pair.a, pair.b] = small = statistics.median(ping_pong(world, pair, (SMALL_BYTES,), LATENCY_REPEATS)[0])
            pilot = statistics.median(ping_pong(world, pair, (PILOT_BYTES,), PILOT_REPEATS)[0])
            size = _message_bytes(PILOT_BYTES / max(pilot - small, 1e-9))
            there, back = Flow(pair.left, pair.right), Flow(pair.right, pair.left)
            for a, b, flow in ((pair.a, pair.b, there), (pair.b, pair.a, back)):
                answer = statistics.median(at_once(world, [flow], SMALL_BYTES)[0])
                found.append(of_flows(a, b, at_once(world, [flow], size), size, answer))
            activity.advance(f"{pair.a} – {pair.b}")
        for source, target, flows in many:
            fastest = max(x.bytes_per_second for x in found if x.flows == 1 and {source, target} - {None} <= {x.source, x.target})
            size = _message_bytes(fastest / len(flows))
            found.append(of_flows(source, target, at_once(world, flows, size), size, 0.0))
            activity.advance(f"{len(flows)} at once")
    links, adapters, unlike = explaining(found, latency, alone)
    for text in unlike if world.is_main else ():
        warn(text)
    return Wires(links, adapters, tuple(found))


def _many(
    name: str, ranks: Sequence[int], of_node: Mapping[str, Sequence[int]], *, leaves: bool
) -> list[tuple[str | None, str | None, list[Flow]]]:
    """(from, to, flows) of what several ranks of a node can send at once: inside it, and if it `leaves` it, out and in."""
    inside = [Flow(*pair) for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    across = many_flows(ranks, [others for other, others in of_node.items() if other != name]) if leaves else []
    ways = [(name, name, inside), (name, None, [Flow(a, b) for a, b in across]), (None, name, [Flow(b, a) for a, b in across])]
    return [way for way in ways if len(way[2]) > 1]


def explaining(
    found: Sequence[FlowFound], latency: Mapping[tuple[str, str], float], alone: Sequence[str]
) -> tuple[tuple[LinkBetween, ...], tuple[AdapterOf, ...], list[str]]:
    """The links and adapters that explain what was measured, and what is said of ways that they do not explain. A link
    has one rate, its faster way's; that the other way is slower is left to the adapters at its ends. Where these
    do not explain it (or there are none), the link is as fast as a message there and back. Rates within 5 % are one. Pure."""
    ways = {pair: _ways(found, *pair) for pair in latency}
    peak = {pair: _peak(*both) for pair, both in ways.items()}
    rates = {name: Rates(*(_carried(name, way, found, peak) for way in (0, 1))) for name in alone if len(alone) > 1}
    links, unlike = list[LinkBetween](), list[str]()
    for (a, b), seconds in latency.items():
        bandwidth, (there, back) = peak[a, b], ways[a, b]
        seen = (_through(rates, a, b, bandwidth), _through(rates, b, a, bandwidth))
        if any(rate > (1 + EXPLAINED) * way for rate, way in zip(seen, (there, back), strict=True)):
            bandwidth = 2 / (1 / there + 1 / back)
            if a != b and {a, b} <= rates.keys():
                unlike.append(
                    f"note: from {a} to {b} one flow gets {_rate_text(there)}, and back {_rate_text(back)}, though "
                    f"their adapters carry more: the link is planned as {_rate_text(bandwidth)} both ways"
                )
        links.append(LinkBetween(between=(a, b), latency=seconds, bandwidth=bandwidth))
    adapters = tuple(AdapterOf(node=name, bandwidth=x.out, bandwidth_in=x.into) for name, x in rates.items())
    return tuple(links), adapters, unlike


def _ways(found: Sequence[FlowFound], a: str, b: str) -> tuple[float, float]:
    """Bytes/s of one flow there and back."""
    alone = [x for x in found if x.flows == 1]
    there = [x.bytes_per_second for x in alone if (x.source, x.target) == (a, b)]
    return there[0], next(x.bytes_per_second for x in reversed(alone) if (x.source, x.target) == (b, a))


def _rate_text(bytes_per_second: float) -> str:
    return f"{three_digits(bytes_per_second / 1e6)} MB/s"


def _peak(there: float, back: float) -> float:
    """Of a link: the mean of two ways that are alike, else the faster."""
    fast = max(there, back)
    return (there + back) / 2 if min(there, back) >= (1 - EQUAL) * fast else fast


def _carried(name: str, way: int, found: Sequence[FlowFound], peak: Mapping[tuple[str, str], float]) -> float:
    """Bytes/s that a node's adapters carry out (way 0) or in (1): the most that one flow or all together got; that of its fastest
    link, if it is about as much."""
    most = max(x.bytes_per_second for x in found if (x.source, x.target)[way] == name and x.source != x.target)
    fastest = max(rate for pair, rate in peak.items() if name in pair and pair[0] != pair[1])
    return fastest if abs(most - fastest) <= EQUAL * fastest else most


def _through(rates: Mapping[str, Rates], a: str, b: str, bandwidth: float) -> float:
    """What one flow from a to b gets of links and adapters as these."""
    return min(bandwidth, *(x for x in (rates[a].out, rates[b].into))) if a != b and {a, b} <= rates.keys() else bandwidth


def _message_bytes(bytes_per_second: float) -> int:
    """Of a message that takes about as long as it should, and is no larger than activations are."""
    return int(min(LARGE_BYTES, max(PILOT_BYTES, MESSAGE_SECONDS * bytes_per_second)))


def of_flows(source: str | None, target: str | None, times: Sequence[Sequence[float]], size: int, answer: float) -> FlowFound:
    """What flows carried whose messages took so many seconds, of which `answer` is what a message of a few bytes takes as well;
    never more than half is taken for that. One flow counts by the median, since other work on the machine makes single
    messages long; of several the faster ones take turns, so they count by the mean. Pure."""
    centre = statistics.median if len(times) == 1 else statistics.fmean
    rate = sum(size / max(centre(each) - answer, centre(each) / 2) for each in times)
    return FlowFound(source, target, len(times), rate, max(_spread(each) for each in times))


def _spread(seconds: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle
