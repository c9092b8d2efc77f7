"""Plans of a few layers, written by hand or drawn."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from hetpipe.documents.plan import Plan

Stage = tuple[int, int, str]


def make_plan(*replicas: tuple[list[int], list[Stage]], **options: Any) -> Plan:
    """Replicas as (micro-batch sizes, stages as (first layer, end, devices joined by spaces))."""
    document = {
        "model": "gpt",
        "global_batch": sum(sum(sizes) for sizes, _ in replicas),
        "replicas": [
            {"microbatch_sizes": sizes, "stages": [{"layers": [lo, hi], "devices": d.split()} for lo, hi, d in stages]}
            for sizes, stages in replicas
        ],
        **options,
    }
    return Plan.parse(document, "the test's plan")


# Two equal pipelines of two stages over two nodes, four blocks between embedding and head:
#     replica 0: n0/0 [0, 3) → n1/0 [3, 6)
#     replica 1: n0/1 [0, 3) → n1/1 [3, 6)
REGULAR = make_plan(([2, 2], [(0, 3, "n0/0"), (3, 6, "n1/0")]), ([2, 2], [(0, 3, "n0/1"), (3, 6, "n1/1")]))
# Everything unequal: depth, cuts, shares, sizes.
IRREGULAR = make_plan(([4, 4, 3], [(0, 4, "n0/0"), (4, 6, "n1/0")]), ([2], [(0, 6, "n0/1")]))


@st.composite
def plans(draw: st.DrawFn, alike: bool = False) -> Plan:
    """Up to three replicas of up to three stages over three nodes of three devices. `alike`: all of one depth."""
    L = draw(st.integers(3, 7))
    devices = draw(st.permutations([f"n{i}/{j}" for i in range(3) for j in range(3)]))
    replicas = []
    depth = st.just(draw(st.integers(1, 3))) if alike else st.integers(1, 3)
    for _ in range(draw(st.integers(1, 3))):
        n = draw(depth)
        inner = sorted(draw(st.sets(st.integers(1, L - 1), min_size=n - 1, max_size=n - 1)))
        ends = [0, *inner, L]
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        replicas.append((sizes, [(ends[s], ends[s + 1], devices.pop()) for s in range(n)]))
    return make_plan(*replicas)
