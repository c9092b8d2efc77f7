"""The importer of Sailor's measurements, on small files of their layout, and on the published ones where present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.exchange.importers.sailor import curve_link
from hetpipe.files.messages import InputError
from tests.support.commands import Command
from tests.support.external import NEEDS_SAILOR, SAILOR
from tests.support.published import FLAT, from_sailor, refused, write, write_sailor


@pytest.fixture
def sailor(tmp_path: Path) -> Path:
    return write_sailor(tmp_path)


def test_sailor_layers(sailor: Path) -> None:
    profile, _ = from_sailor(sailor)
    assert [layer.name for layer in profile.layers] == ["embedding", "block.0", "block.1", "block.2", "head"]
    assert [layer.parameter_bytes for layer in profile.layers] == [800, 400, 400, 400, 800]
    assert [layer.output_bytes_per_sample for layer in profile.layers] == [10, 10, 10, 10, 4]
    # What a layer leaves, less its output, and its input: 10 − 10 + 3, 40 − 10 + 10, 90 − 4 + 10.
    assert [layer.saved_bytes_per_sample for layer in profile.layers] == [3, 40, 40, 40, 96]
    assert profile.input_bytes_per_sample == 3


def test_sailor_times_at_every_degree(sailor: Path) -> None:
    profile, _ = from_sailor(sailor)
    assert [(m.device_type, m.tensor_parallel, m.microbatch_sizes) for m in profile.measurements] == [
        ("fast", 1, (1, 4)),
        ("fast", 2, (1,)),
        ("slow", 1, (1, 2)),
    ]
    assert profile.provenance["left_out"] == ["slow at degree 4"]
    assert profile.measurement("fast").forward_seconds[1] == (3, 6, 6, 6, 9)
    shard = profile.measurement("fast", 2)
    assert shard.parameter_bytes == (400, 200, 200, 200, 400)
    assert shard.saved_bytes_per_sample == (3, 40, 40, 40, 96)


def test_sailor_optimizer_is_of_the_measured_model_once(sailor: Path) -> None:
    profile, _ = from_sailor(sailor)
    # 0.24 s over 800 + 2 · 400 + 800 bytes; the third block is a copy
    assert profile.measurement("fast").optimizer_seconds == pytest.approx((0.08, 0.04, 0.04, 0.04, 0.08))
    assert sum(profile.measurement("fast", 2).optimizer_seconds) == pytest.approx(0.12 * 2800 / 2400)


def test_sailor_optimizer_by_layer_stays(sailor: Path) -> None:
    document = json.loads((sailor / "layer_times.json").read_text())
    for i, row in document["net"]["fast"]["1"]["2"].items():
        row[2] = 0.1 * (int(i) + 1)
    write(sailor / "layer_times.json", document)
    assert from_sailor(sailor)[0].measurement("fast", 2).optimizer_seconds == pytest.approx((0.1, 0.2, 0.3, 0.4, 0.5))


def test_sailor_cluster(sailor: Path) -> None:
    _, cluster = from_sailor(sailor)
    assert [(node.name, node.devices) for node in cluster.nodes] == [
        ("n0", {"fast": 2}),
        ("n1", {"fast": 2}),
        ("n2", {"slow": 4}),
    ]
    assert cluster.type_of("n2/0").memory == 10**8
    assert cluster.link_between("n0", "n0").seconds(1e9) == pytest.approx(0.02)
    assert cluster.link_between("n2", "n2").seconds(1e9) == pytest.approx(0.5)
    assert cluster.link_between("n0", "n1").seconds(1e9) == pytest.approx(0.5)
    assert cluster.link_between("n0", "n2").seconds(1e9) == pytest.approx(1.0)
    assert cluster == Cluster.parse(json.loads(cluster.to_json()), "itself")


def test_curves_neither_fall_to_zero_nor_turn_round() -> None:
    link = curve_link([[-0.16570216, 2.79431173, 11.74409677], 22.93e9], "curve")
    assert link.points is not None
    sizes, seconds = zip(*link.points, strict=True)
    assert list(seconds) == sorted(seconds)
    assert link.seconds(1) == seconds[0] > 1e-5
    assert link.seconds(1e6) == pytest.approx(1e6 / 11.744e9, rel=1e-3)
    assert link.seconds(2e9) == pytest.approx(2e9 / 22.93e9, rel=1e-2)
    assert min(sizes) > 1e5


@pytest.mark.parametrize(
    "curve", [None, [[1, 2], 1e9], [[0, 0, 1], 0], [["a", 0, 1], 1e9], [[0, 0, -1], 1e9], [[0, 0, True], 1e9], [FLAT[0], 1e-320]]
)
def test_a_bad_curve_is_named(curve: Any) -> None:
    with pytest.raises(InputError, match="^here: "):
        curve_link(curve, "here")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("layer_times.json", lambda d: d["net"]["fast"]["1"]["1"].pop("2"), "expected layers '0' to '3'"),
        ("layer_times.json", lambda d: d["net"]["fast"]["1"]["1"]["2"].pop(), "fast, micro-batch 1, degree 1: 2 numbers for 3"),
        (
            "layer_times.json",
            lambda d: d["net"]["fast"]["1"].update({"1": {"0": [1, 2, 3]}}),
            "1 layers, but layer_sizes.json has 5",
        ),
        ("layer_times.json", lambda d: d["net"]["fast"]["1"]["1"].update({"2": [1, -2, 3]}), "numbers that are not negative"),
        ("layer_sizes.json", lambda d: d["net"].pop("1"), "'net' has no sizes at tensor-parallel degree 1"),
        (
            "layer_sizes.json",
            lambda d: d["net"]["1"]["2"].pop("act_mem_bytes"),
            "degree 1: act_mem_bytes: expected a list of numbers",
        ),
        ("layer_sizes.json", lambda d: d.pop("net"), "layer_sizes.json has no model 'net'; known: "),
        ("layer_times.json", lambda d: d["net"]["fast"].update({"x": {}}), "layer_times.json: fast: expected keys that are num"),
        ("layer_times.json", lambda d: d["net"]["fast"].update({"01": {}}), "expected keys that are numbers from 1 on, found '0"),
        ("layer_times.json", lambda d: d["net"].update(fast=[1]), "layer_times.json: fast: expected an object"),
        ("layer_sizes.json", lambda d: d["net"].update({"0": {}}), "layer_sizes.json: expected keys that are numbers from 1 on"),
        ("layer_sizes.json", lambda d: d["net"]["1"]["2"].update(params_bytes=1e300), "numbers that are not negative, up to 1e+"),
        (
            "layer_times.json",
            lambda d: d["net"]["fast"]["1"]["1"].update({"2": [1e12, 1, 1]}),
            "that these files of sailor and the options make\n  forward_seconds.0.2: Input should be less than or equal",
        ),
        ("intra_node_bandwidths.json", lambda d: d.update(slow={"x": FLAT}), "slow: expected keys that are numbers from 1 on"),
        ("intra_node_bandwidths.json", lambda d: d.update(slow={}), "slow: expected keys that are numbers from 1 on, found none"),
        ("intra_node_bandwidths.json", lambda d: d.pop("slow"), "an object under 'slow'; known: fast"),
        ("multizone_bandwidths_het.json", lambda d: d.pop("zone"), "an object under 'zone'"),
    ],
)
def test_sailor_files_that_are_wrong(sailor: Path, file: str, change: Any, message: str) -> None:
    refused(sailor, file, change, from_sailor, message)


@NEEDS_SAILOR
@pytest.mark.parametrize(("model", "layers"), [("OPT-350", 26), ("GPT-Neo-2.7", 34), ("LLAMA-3-8", 35), ("OPT-30", 50)])
def test_the_published_files(model: str, layers: int) -> None:
    found = import_published("sailor", [SAILOR], ImportOptions(model=model, nodes="2xA100-40x4,1xV100-16x4"))
    assert len(found.profile.layers) == layers
    assert found.profile == Profile.parse(json.loads(found.profile.to_json()), "itself")
    assert found.cluster is not None
    assert [found.cluster.type_of(d).memory for d in ("n0/0", "n2/3")] == [40 * 10**9, 16 * 10**9]


def test_thousands_of_nodes_are_made_by_kinds(sailor: Path) -> None:
    """By kinds of nodes, since pairs of nodes are too many."""
    _, cluster = from_sailor(sailor, nodes="2000xfastx2,1xslowx4")
    assert len(cluster.nodes) == 2_001
    assert len(cluster.links) == 2_000
    assert cluster.link_between("n0", "n1999").seconds(1e9) == pytest.approx(0.5)
    assert cluster.link_between("n0", "n2000").seconds(1e9) == pytest.approx(1.0)


def test_memory_that_no_name_says(sailor: Path) -> None:
    with pytest.raises(InputError, match="the memory of 'fast' is not known. Give it, such as --memory 'fast=24 GB'"):
        from_sailor(sailor, memory={})


def test_the_command(run: Command, sailor: Path) -> None:
    profile, cluster = sailor / "out.json", sailor / "out.yaml"
    there = ("--nodes", "2xfastx2", "--zone", "zone", "--memory", "fast=1 GB", "--cluster-output", cluster)
    assert run("import", "sailor", sailor, "--model", "net", "-o", profile, *there).code == 0
    assert Profile.load(profile).model == "net"
    assert len(Cluster.load(cluster).devices) == 4
    found = run("import", "sailor", sailor, "--model", "nut", "-o", profile)
    assert found.code == 2
    assert "did you mean 'net'?" in found.err
    assert run("import", "sailor", sailor, "--model", "net", "-o", sailor / "none.json", "--cluster-output", cluster).code == 2
    assert not (sailor / "none.json").exists()
