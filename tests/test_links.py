"""What is made of rates that were measured between nodes; and, between real hosts, which are measured."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.links.hosts import HOSTS, missing
from bench.links.run import carried, off
from bench.links.steps import compared
from hetpipe.documents.cluster import AdapterOf, Cluster, LinkBetween
from hetpipe.measuring.confirm import both_ways
from hetpipe.measuring.links import EQUAL, FlowFound, alone_on_hosts, explaining, many_flows, of_flows
from hetpipe.predict.simulator import simulate
from tests.support.ranks import cluster_of, make_plan
from tests.support.strategies import UNHURRIED, make_profile

RATES = st.floats(1e6, 1e9)


def pairs_of(ways: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """A latency for each pair."""
    return {(a, b): 1e-4 for a, b in ways if a < b}


def one_flow(ways: dict[tuple[str, str], float]) -> list[FlowFound]:
    return [FlowFound(a, b, 1, rate, 0.0) for (a, b), rate in ways.items()]


def planned(links: tuple[LinkBetween, ...], adapters: tuple[AdapterOf, ...], a: str, b: str) -> float:
    """What a flow from a to b gets in the simulator's model."""
    link = next(link for link in links if set(link.between) == {a, b})
    rates = {adapter.node: adapter.rates for adapter in adapters}
    assert link.bandwidth is not None
    return min([link.bandwidth] + ([rates[a].out, rates[b].into] if rates else []))


@settings(**UNHURRIED)
@given(st.lists(st.tuples(RATES, RATES), min_size=2, max_size=5))
def test_links_and_adapters_explain_each_way_between_nodes_with_adapters(rates: list[tuple[float, float]]) -> None:
    out, into = ({f"n{i}": rate[way] for i, rate in enumerate(rates)} for way in (0, 1))
    ways = {(a, b): min(out[a], into[b]) for a, b in permutations(out, 2)}
    links, adapters, unlike = explaining(one_flow(ways), pairs_of(ways), list(out))
    assert not unlike
    for (a, b), rate in ways.items():
        assert planned(links, adapters, a, b) == pytest.approx(rate, rel=2 * EQUAL)


def test_ways_that_no_adapter_explains_are_as_one_message_there_and_back_and_a_note_says_so() -> None:
    #     a ══ b   90 both ways;  c ══ all 90;  but a → c only 30
    ways = dict.fromkeys(permutations("abc", 2), 90e6) | {("a", "c"): 30e6}
    links, adapters, unlike = explaining(one_flow(ways), pairs_of(ways), list("abc"))
    assert {link.between: link.bandwidth for link in links} == pytest.approx(
        {("a", "b"): 90e6, ("a", "c"): 2 / (1 / 30e6 + 1 / 90e6), ("b", "c"): 90e6}
    )
    assert {adapter.rates for adapter in adapters} == {(90e6, 90e6)}
    assert "\n".join(unlike) == (
        "note: from a to c one flow gets 30.0 MB/s, and back 90.0 MB/s, though their adapters carry more: the link is planned as "
        "45.0 MB/s both ways"
    )


def test_several_flows_show_whether_an_adapter_is_shared() -> None:
    ways = dict.fromkeys(permutations("ab", 2), 100e6)
    shared = [FlowFound("a", None, 4, 103e6, 0.3), FlowFound(None, "a", 4, 98e6, 0.3)]
    apart = [FlowFound("a", None, 4, 400e6, 0.3), FlowFound(None, "a", 4, 250e6, 0.3)]
    for several, rates in ((shared, (100e6, 100e6)), (apart, (400e6, 250e6))):
        _, adapters, _ = explaining([*one_flow(ways), *several], pairs_of(ways), ["a", "b"])
        assert {adapter.node: adapter.rates for adapter in adapters} == {"a": rates, "b": (100e6, 100e6)}


def test_nodes_on_one_host_have_no_adapters_and_a_link_inside_a_node_is_as_there_and_back() -> None:
    assert alone_on_hosts({"a": [0, 1], "b": [2], "c": [3]}, ["x", "x", "x", "y"]) == ["c"]
    found = [FlowFound("a", "a", 1, 1e9, 0.1), FlowFound("a", "a", 1, 3e9, 0.1), FlowFound("a", "a", 2, 9e9, 0.1)]
    across = one_flow(dict.fromkeys(permutations("ab", 2), 1e9))
    links, adapters, unlike = explaining([*found, *across], {("a", "a"): 1e-5, ("a", "b"): 1e-4}, ["a", "b"])
    assert [(link.between, link.bandwidth) for link in links] == [(("a", "a"), 1.5e9), (("a", "b"), 1e9)]
    assert {adapter.rates for adapter in adapters} == {(1e9, 1e9)}
    assert explaining(found, {("a", "a"): 1e-5}, ["a"])[1] == ()
    assert unlike == []


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_many_flows_have_each_rank_once_and_go_to_as_many_nodes_as_they_can(own: int, counts: list[int]) -> None:
    ends = [sum(counts[:i]) + 100 for i in range(len(counts) + 1)]
    others = [list(range(*pair)) for pair in pairwise(ends)]
    found = many_flows(range(own), others)
    assert len(found) == min(own, sum(counts)) == len({a for a, _ in found}) == len({b for _, b in found})
    assert len({i for _, b in found for i, ranks in enumerate(others) if b in ranks}) == min(len(others), len(found))


def test_what_a_flow_carried_is_by_the_median_and_that_of_several_by_the_mean_and_a_slow_answer_makes_none_fast() -> None:
    one = of_flows("a", "b", [[0.2, 0.1, 0.1, 9.0, 0.1]], 1000, 0.02)
    assert one.bytes_per_second == pytest.approx(1000 / 0.08)
    assert one.relative_spread == pytest.approx(1.0)  # the quartiles are 0.1 and 0.2
    two = of_flows("a", None, [[0.1, 0.3], [0.4, 0.4]], 1000, 0.0)
    assert (two.source, two.target, two.flows) == ("a", None, 2)
    assert two.bytes_per_second == pytest.approx(1000 / 0.2 + 1000 / 0.4)
    assert of_flows("a", "b", [[0.1] * 3], 1000, 5.0).bytes_per_second == pytest.approx(2 * 1000 / 0.1)


def two_hosts() -> Cluster:
    return cluster_of(1, 1)


def adapters_of(**rates: tuple[float, float]) -> tuple[AdapterOf, ...]:
    return tuple(AdapterOf(node=name, bandwidth=out, bandwidth_in=into) for name, (out, into) in rates.items())


def test_a_step_over_unequal_ways_takes_each_as_long_as_it_is() -> None:
    profile = make_profile({"cpu": [1.0, 1.0]}, layer={"output_bytes_per_sample": 1000})
    plan = make_plan([{"cuts": [1, 1], "sizes": [1], "devices": ["n0/0", "n1/0"]}], model=profile.model)
    link = LinkBetween(between=("n0", "n1"), bandwidth=1000.0)
    seconds = [
        simulate(plan, profile.model_copy(update={"links": (link,), "adapters": adapters}), two_hosts()).step_seconds
        for adapters in ((), adapters_of(n0=(1000.0, 250.0), n1=(250.0, 1000.0)))
    ]
    assert seconds[1] - seconds[0] == pytest.approx(4.0 - 1.0)  # the gradient comes back at a quarter of the rate


def test_what_a_cluster_file_says_of_an_adapter_is_kept_and_several_adapters_share_what_was_measured() -> None:
    given_rates = Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {"cpu": {"memory": 0}},
            "link": {"bandwidth": 8e9},
            "nodes": [
                {"name": "a", "devices": {"cpu": 2}, "adapter": {"bandwidth": 5e9}},
                {"name": "b", "devices": {"cpu": 2}, "adapters": "per_device"},
                {"name": "c", "devices": {"cpu": 1}},
            ],
        },
        "test",
    )
    found = given_rates.with_links((), adapters_of(a=(1e9, 1e9), b=(4e9, 6e9), elsewhere=(1.0, 1.0)))
    assert found.adapter_rates == {"a": (5e9, 5e9), "b": (4e9, 6e9), "c": (8e9, 8e9)}
    assert found.nodes[1].adapter is not None
    assert found.nodes[1].adapter.rates == (2e9, 3e9)


def test_there_and_back_over_adapters_is_as_slow_as_each_way() -> None:
    link = LinkBetween(between=("a", "b"), bandwidth=100.0, latency=1.0)
    assert both_ways(link, (), 200) == pytest.approx(1 + 2)
    assert both_ways(link, adapters_of(a=(100.0, 25.0), b=(100.0, 100.0)), 200) == pytest.approx(1 + (2 + 8) / 2)


def test_the_bench_tells_rates_that_are_not_as_they_were_set() -> None:
    def found(**factors: float) -> list[str]:
        ways = [*permutations("abc", 2), ("b", None), (None, "b"), ("b", "b")]
        rows = [{"from": a, "to": b, "bytes_per_second": factors.get(f"{a}_{b}", 1.0) * carried(HOSTS, a, b)} for a, b in ways]
        return off(make_profile({"cpu": [1.0]}).model_copy(update={"provenance": {"links": rows}}))

    assert found(a_b=0.9, b_None=1.1, b_b=9.0) == []
    assert found(a_b=0.8, None_b=1.5) == [
        "from a to b: set 19.1 MB/s, measured 15.3",
        "from the others to b: set 19.1 MB/s, measured 28.7",
    ]


@pytest.mark.thorough
@pytest.mark.slow
def test_each_way_between_three_hosts_is_measured_and_what_two_ranks_send_and_receive_at_once() -> None:
    """How high the rates are, on hosts of which they are set, `bench.links.run` checks: it depends on what else runs."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    profile, _ = compared(HOSTS, {})
    rows = {(row.get("from"), row.get("to"), row["flows"]): row for row in profile.provenance["links"]}
    assert all(row["bytes_per_second"] > 0 and row["relative_spread"] >= 0 for row in rows.values())
    assert {key for key in rows if key[0] != key[1]} == {
        *((a, b, 1) for a, b in permutations("abc", 2)),
        ("b", None, 2),
        (None, "b", 2),
    }
    assert {adapter.node for adapter in profile.adapters} == set("abc")
    assert {frozenset(link.between) for link in profile.links} == {frozenset(p) for p in ("ab", "ac", "bc", "b")}
    assert profile.overheads[0].transfer_overlap is not None  # what it is depends on how many cores are free
