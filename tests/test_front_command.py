"""`hetpipe plan --pareto`: what it prints and writes, and how it ends."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.planning.front import Front
from tests.support.commands import Command
from tests.support.strategies import make_cluster
from tests.test_pareto import PROFILE, catalogue

OPTIONS = (
    "plan",
    "--pareto",
    "--profile",
    "profile.json",
    "--cluster",
    "catalogue.json",
    "--global-batch",
    6,
    "--memory-reserve",
    0,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with profile.json, catalogue.json and cluster.json."""
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.json")
    catalogue({"fast": "0..2", "slow": "0..1"}, 8_500).save("catalogue.json")
    make_cluster([{"a": 1}, {"b": 2}], price={"a": 3.0, "b": 1.0}).save("cluster.json")
    return tmp_path


def test_the_table_and_all_files(run: Command, folder: Path) -> None:
    said = run(*OPTIONS, "-o", "front.json", "--csv", "out/front.csv", "--plans", "plans")
    assert said.code == 0
    front = Front.load("front.json")
    assert [row.status for row in front.rows].count("infeasible") == 1
    assert "test, 6 samples a step: price against time" in said.out
    assert "2 fast + 1 slow" in said.out
    assert f"5 sub-clusters: {len(front.front)} on the front" in said.out
    assert "1 out of memory" in said.out
    assert "bytes more memory" in said.out
    assert said.out.endswith("written to front.json\nwritten to out/front.csv\nwritten to plans\n")
    lines = list(csv.DictReader(io.StringIO((folder / "out/front.csv").read_text())))
    assert [line["is_oom"] for line in lines].count("True") == 1
    for row in front.front:
        name = "_".join(f"{key}-{count}" for key, count in row.nodes.items() if count)
        plan = Plan.load(f"plans/{name}.plan.json")
        plan.check(cluster=Cluster.load(f"plans/{name}.cluster.json"), profile=PROFILE)
        simulated = run(
            "simulate",
            "--plan",
            f"plans/{name}.plan.json",
            "--profile",
            "profile.json",
            "--cluster",
            f"plans/{name}.cluster.json",
            "--json",
        )
        assert row.plan is not None
        assert json.loads(simulated.out)["step_seconds"] == row.plan.step_seconds


def test_json_is_the_front_and_a_picture_is_drawn(run: Command, folder: Path) -> None:
    said = run(*OPTIONS, "--json", "-o", "front.svg")
    assert said.code == 0
    assert Front.parse(json.loads(said.out), "printed").front
    assert "<svg" in (folder / "front.svg").read_text()


def test_a_cluster_and_limits(run: Command) -> None:
    options = (*OPTIONS[:5], "cluster.json", *OPTIONS[6:], "--json")
    front = Front.parse(json.loads(run(*options).out), "printed")
    assert [row.nodes for row in front.rows] == [{"ax1": 0, "bx2": 1}, {"ax1": 1, "bx2": 0}, {"ax1": 1, "bx2": 1}]
    cheap = Front.parse(json.loads(run(*options, "--max-price-per-hour", 2).out), "printed")
    assert [row.status for row in cheap.rows] == ["planned", "excluded", "excluded"]
    assert cheap.max_price_per_hour == 2


def test_time_limit(run: Command) -> None:
    said = run(*OPTIONS, "--time-limit", "1e-9")
    assert said.code == 3
    assert "5 not planned in time" in said.out
    assert said.err.startswith("error: no sub-cluster has a plan; of the largest: the time limit ended the search")


def test_nothing_fits_ends_with_3_and_writes_the_csv(run: Command, folder: Path) -> None:
    catalogue({"fast": "0..1"}, 1_000).save("catalogue.json")
    said = run(*OPTIONS, "--csv", "front.csv")
    assert said.code == 3
    assert said.err.startswith("error: no sub-cluster has a plan; of the largest: no plan fits the memory of the cluster")
    assert "1 out of memory" in said.out
    (line,) = csv.DictReader(io.StringIO((folder / "front.csv").read_text()))
    assert (line["is_oom"], line["status"]) == ("True", "infeasible")
    assert int(line["missing_bytes"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*OPTIONS, "-o", "front.pdf"), "cannot write 'front.pdf': unknown suffix '.pdf'; known: .json, .svg, .png"),
        ((*OPTIONS, "--time-limit", 0), "time_limit_seconds must be a positive number, got 0.0"),
        ((*OPTIONS, "--max-price-per-hour", 0), "max_price_per_hour must be a positive number, got 0.0"),
        ((*OPTIONS, "--partitioner", "atuo"), "unknown partitioner 'atuo'; did you mean 'auto'?"),
        ((OPTIONS[0], *OPTIONS[2:]), "catalogue.json is a catalogue. To plan over all sub-clusters, give --pareto"),
        ((*OPTIONS[:5], "nowhere.yaml", *OPTIONS[6:]), "cannot read nowhere.yaml: No such file"),
        ((*OPTIONS[:5], "profile.json", *OPTIONS[6:]), "expected 'hetpipe.catalogue/1' or 'hetpipe.cluster/1'"),
    ],
)
def test_wrong_arguments_end_with_2(run: Command, arguments: tuple[object, ...], message: str) -> None:
    said = run(*arguments)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert "Traceback" not in said.err
