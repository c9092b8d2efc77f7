"""What is too much is refused by its number, and no message is longer than a screen."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from tests.support.documents import cluster_document, plan_document, refused
from tests.support.strategies import make_cluster, make_profile


class TestLimits:
    def test_devices(self) -> None:
        nodes = [{"name": f"n{i}", "devices": {"a": 60_000}} for i in range(2)]
        refused(Cluster, cluster_document(nodes=nodes), "the nodes have 120000 devices, the most of a cluster are 65536")
        refused(
            Cluster,
            cluster_document(nodes=[{"name": "n0", "devices": {"a": 10**9}}]),
            "nodes.0.devices.a: Input should be less than or equal to 65536 (got 1000000000)",
        )

    def test_layers(self) -> None:
        document = make_profile({"a": [1.0]}).model_dump(mode="json")
        refused(Profile, document | {"layers": document["layers"] * 20_000}, "layers: Tuple should have at most 10000 items")
        plan = plan_document()
        plan["replicas"][0]["stages"][1]["layers"] = [1, 10**9]
        refused(Plan, plan, "layers.1: Input should be less than or equal to 10000 (got 1000000000)")

    def test_batch(self) -> None:
        refused(Plan, plan_document(global_batch=10**9), "global_batch: Input should be less than or equal to 1048576")

    def test_names(self) -> None:
        refused(Plan, plan_document(model="x" * 5_000), "model: String should have at most 1000 characters (got 'xxx")


class TestMessages:
    def lines(self, document: Any, cls: Any = Cluster) -> list[str]:
        with pytest.raises(InputError) as caught:
            cls.parse(document, "the.file")
        return str(caught.value).splitlines()

    def test_ten_lines_and_how_many_more(self) -> None:
        nodes = [{"name": f"n{i}", "devices": {f"b{i}": 1}} for i in range(2_000)]
        lines = self.lines(cluster_document(nodes=nodes))
        assert lines[0] == "the.file: 2000 fault(s) in this cluster file"
        assert lines[1] == "  top level: node 'n0': unknown device type 'b0'; known: a"
        assert (len(lines), lines[-1]) == (10, "  … and 1992 more")
        lines = self.lines(cluster_document(**{f"key{i}": 1 for i in range(20)}))
        assert (len(lines), lines[-1]) == (10, "  … and 12 more")

    def test_nine_faults_are_all_told(self) -> None:
        lines = self.lines(cluster_document(**{f"key{i}": 1 for i in range(9)}))
        assert len(lines) == 10
        assert lines[-1].startswith("  top level: unknown key 'key8'")

    def test_a_fault_is_cut(self) -> None:
        for document in (
            cluster_document(format=["ha"] * 10**6),
            cluster_document(nodes=[{"name": "n0", "devices": {"b" * 900: 1}}]),
            cluster_document(**{"b" * 10**6: 1}),
            cluster_document(device_types={"a": {"memory": "9" * 10**6}}),
            cluster_document(device_types={"a\x1b[31m\n" * 100: {"memory": "x"}}),
            plan_document(),
        ):
            text = "\n".join(self.lines(document))
            assert all(len(line) <= 310 for line in text.splitlines())
            assert "\x1b" not in text

    def test_a_plan_for_another_cluster_of_thousands(self) -> None:
        """Each device that is not there was looked for among all by likeness: minutes, and megabytes of names."""
        plan = Plan.parse(
            plan_document(
                global_batch=8_000,
                replicas=[
                    {"microbatch_sizes": [2], "stages": [{"layers": [0, 3], "devices": [f"m{i}/0"]}]} for i in range(4_000)
                ],
            ),
            "x",
        )
        with pytest.raises(InputError) as caught:
            plan.check(cluster=make_cluster([{"a": 8}] * 500))
        lines = str(caught.value).splitlines()
        assert (len(lines), lines[-1]) == (10, "  … and 3992 more")
        assert "… (4000 in all)" in lines[1]
