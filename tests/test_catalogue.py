from __future__ import annotations

from itertools import combinations, combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster, Node
from hetpipe.documents.clusters.catalogue import Catalogue, alike_nodes, choice_of, load_choice
from hetpipe.files.messages import InputError
from tests.support.strategies import make_cluster

EXAMPLE = Path(__file__).parents[1] / "configs" / "catalogues" / "aws.yaml"
DOCUMENT: dict[str, Any] = {
    "format": "hetpipe.catalogue/1",
    "device_types": {"a": {"memory": "4 GiB", "price_per_hour": 3}, "b": {"memory": "2 GiB", "price_per_hour": 1}},
    "templates": {"big": {"devices": {"a": 2, "b": 1}, "link": {"bandwidth": "100 GB/s"}}, "small": {"devices": {"b": 2}}},
    "nodes": {"big": "0..2", "small": 1},
    "link": {"bandwidth": "1 GB/s", "latency": "10 us"},
    "links": [{"between": ["small", "big"], "bandwidth": "5 GB/s"}],
}


def make(**keys: Any) -> Catalogue:
    return Catalogue.parse(DOCUMENT | keys, "the test's catalogue")


class TestCatalogue:
    def test_a_cluster_of_its_nodes(self) -> None:
        cluster = make().cluster((2, 1))
        assert [(d.id, d.type) for d in cluster.devices] == [
            ("big-0/0", "a"),
            ("big-0/1", "a"),
            ("big-0/2", "b"),
            ("big-1/0", "a"),
            ("big-1/1", "a"),
            ("big-1/2", "b"),
            ("small-0/0", "b"),
            ("small-0/1", "b"),
        ]
        assert cluster.link_between("big-0", "big-0").bandwidth == 100e9
        assert cluster.link_between("big-0", "big-1").bandwidth == 1e9
        assert cluster.link_between("small-0", "big-1").bandwidth == 5e9
        assert cluster.type_of("small-0/0").price_per_hour == 1

    def test_a_link_between_two_of_the_same(self) -> None:
        cluster = make(links=[{"between": ["big", "big"], "bandwidth": 7}]).cluster((2, 1))
        assert cluster.link_between("big-0", "big-1").bandwidth == 7
        assert cluster.link_between("big-0", "big-0").bandwidth == 100e9
        assert cluster.link_between("big-0", "small-0").bandwidth == 1e9

    def test_ranges_include_both_ends_and_the_empty_cluster_is_left_out(self) -> None:
        choice = choice_of(make(nodes={"big": "0..2", "small": "0 .. 1"}))
        assert choice.templates == ("big", "small")
        assert list(choice.counts()) == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        assert choice.size == 5
        assert list(choice_of(make()).counts()) == [(0, 1), (1, 1), (2, 1)]
        assert choice_of(make()).size == 3

    def test_it_is_the_same_after_writing_and_reading(self, tmp_path: Path) -> None:
        make().save(tmp_path / "catalogue.json")
        assert Catalogue.load(tmp_path / "catalogue.json") == make()
        assert '"big": "0..2"' in make().to_json()
        assert '"small": 1' in make().to_json()

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"nodes": {"bgi": 1}}, "nodes: unknown template 'bgi'; did you mean 'big'? known: big, small"),
            ({"nodes": {"big": "2..1"}}, "the range '2..1' is empty: 1 is below 2"),
            ({"nodes": {"big": "some"}}, "cannot read 'some'; write a number of nodes, such as 2, or a range"),
            ({"nodes": {"big": -1}}, "cannot read -1"),
            ({"nodes": {"big": 0}}, "no template may be taken even once"),
            ({"nodes": {"big": 10**9}}, "nodes.big.0: Input should be less than or equal to 65536 (got 1000000000)"),
            ({"nodes": {"big": "0..99999999999999999999"}}, "nodes.big: cannot read '0..99999999999999999999'"),
            ({"nodes": {"big": "0..70000"}}, "nodes.big.1: Input should be less than or equal to 65536 (got 70000)"),
            ({"nodes": {"big": "0..60000"}}, "nodes: all of them have 180000 devices, the most of a cluster are 65536"),
            ({"nodes": {"big": True}}, "nodes.big"),
            (
                {"templates": {"big": {"devices": {"c": 1}}, "small": {"devices": {"b": 1}}}},
                "template 'big': unknown device type 'c'",
            ),
            ({"links": [{"between": ["big", "huge"], "bandwidth": 1}]}, "links: unknown template 'huge'"),
            ({"templates": {"a/b": {"devices": {"a": 1}}}}, "templates.a/b"),
        ],
    )
    def test_faults(self, keys: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError) as caught:
            make(**keys)
        assert message in str(caught.value)
        assert "in this catalogue file" in str(caught.value)

    def test_the_example(self) -> None:
        catalogue = Catalogue.load(EXAMPLE)
        assert choice_of(catalogue).size == 80
        whole = choice_of(catalogue).whole()
        assert len(whole.devices) == 128
        assert whole.link_between("p4d-0", "p4d-7").bandwidth == 50e9


class TestClusterAsCatalogue:
    def test_nodes_that_are_alike_are_counted(self) -> None:
        cluster = make_cluster([{"a": 2}, {"b": 1}, {"a": 2}, {"a": 1, "b": 1}])
        choice = choice_of(cluster)
        assert choice.templates == ("ax2", "bx1", "ax1+bx1")
        assert choice.ranges == ((0, 2), (0, 1), (0, 1))
        assert [node.name for node in choice.cluster((2, 0, 1)).nodes] == ["n0", "n2", "n3"]
        assert choice.whole().devices == cluster.devices

    def test_links_tell_nodes_apart(self) -> None:
        document = make_cluster([{"a": 1}] * 4).model_dump(mode="json", exclude_none=True)
        document["links"] = [{"between": ["n0", "n1"], "bandwidth": 5.0}, {"between": ["n2", "n2"], "bandwidth": 9.0}]
        cluster = Cluster.parse(document, "the test's cluster")
        assert [[node.name for node in group] for group in alike_nodes(cluster)] == [["n0", "n1"], ["n2"], ["n3"]]
        choice = choice_of(cluster)
        assert choice.templates == ("ax1@n0", "ax1@n2", "ax1@n3")
        assert choice.cluster((2, 0, 0)).link_between("n0", "n1").bandwidth == 5.0
        assert choice.cluster((1, 1, 0)).links[0].between == ("n2", "n2")

    @given(st.lists(st.sampled_from([5.0, 9.0]), min_size=15, max_size=15))
    def test_any_two_of_a_group_can_be_swapped(self, speeds: list[float]) -> None:
        pairs = combinations_with_replacement([f"n{i}" for i in range(5)], 2)
        links = [{"between": pair, "bandwidth": speed} for pair, speed in zip(pairs, speeds, strict=True)]
        cluster = Cluster.parse(make_cluster([{"a": 1}] * 5).model_dump() | {"links": links}, "the test's cluster")

        def speed(a: Node, b: Node) -> float | None:
            return cluster.link_between(a.name, b.name).bandwidth

        for a, b in (pair for group in alike_nodes(cluster) for pair in combinations(group, 2)):
            assert speed(a, a) == speed(b, b)
            assert all(speed(a, c) == speed(b, c) for c in cluster.nodes if c not in (a, b))


class TestLoad:
    def test_either(self, tmp_path: Path) -> None:
        assert isinstance(load_choice(EXAMPLE), Catalogue)
        unnamed = yaml.safe_load(EXAMPLE.read_text())
        del unnamed["format"]
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(unnamed))
        with pytest.raises(InputError, match=r"x.yaml: 1 fault\(s\) in this catalogue file\n  format: Field required"):
            load_choice(tmp_path / "x.yaml")
        make_cluster([{"a": 1}]).save(tmp_path / "cluster.json")
        assert isinstance(load_choice(tmp_path / "cluster.json"), Cluster)

    def test_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_text("format: hetpipe.job/1\n")
        with pytest.raises(InputError, match="'hetpipe.job/1', expected 'hetpipe.catalogue/1' or 'hetpipe.cluster/1'"):
            load_choice(tmp_path / "x.yaml")


def test_thousands_of_nodes_are_grouped_at_once() -> None:
    """Each node was compared with every other, over the links to all others."""
    cluster = make_cluster([{"a": 1}] * 3_000 + [{"a": 2}] * 3_000)
    assert [len(group) for group in alike_nodes(cluster)] == [3_000, 3_000]
    with pytest.raises(InputError, match="the cluster has 3000 kinds of nodes, and so more than 4000 sub-clusters"):
        choice_of(make_cluster([{f"type{i}": 1} for i in range(3_000)]))
