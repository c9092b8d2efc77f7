"""Importers of published profiles, on small files of their layouts; Sailor's also on the published ones, where present."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetpipe.cli import commands as cli
from hetpipe.exchange.importers import ImportOptions, import_published, parse_quantities
from hetpipe.exchange.importers.options import NodeSpec, parse_nodes
from hetpipe.exchange.importers.sailor import curve_link
from hetpipe.exchange.importers.transformer import gpt_bytes
from hetpipe.files.messages import InputError
from hetpipe.spec.cluster import Cluster, Link
from hetpipe.spec.profile import Profile
from tests.external import NEEDS_SAILOR, SAILOR

FLAT = [[0.0, 0.0, 2.0], 2e9]  # 2 GB/s at any size


# ---- Sailor


def sailor_sizes(degree: int) -> dict[str, dict[str, int]]:
    """Embedding, three blocks and a head; the head's logits are 50 bytes of the 90 that it leaves."""
    rows = [(800, 3, 10, 10), *[(400, 10, 10, 40)] * 3, (800, 10, 54, 90)]
    keys = ("params_bytes", "act_input_bytes", "act_output_bytes", "act_mem_bytes")
    return {
        str(i): {
            key: value // (degree if key == "params_bytes" else 1)
            for key, value in zip(keys, row, strict=True)
        }
        for i, row in enumerate(rows)
    }


def sailor_times(scale: float, optimizer: float = 0.24) -> dict[str, list[float]]:
    return {str(i): [scale * f, scale * 2 * f, optimizer] for i, f in enumerate((1.0, 2.0, 2.0, 2.0, 3.0))}


@pytest.fixture
def sailor(tmp_path: Path) -> Path:
    return write_sailor(tmp_path)


def write_sailor(tmp_path: Path) -> Path:
    """One model on two device types; `fast` at degrees 1 and 2, `slow` at 1 and at 4, of which there are no sizes."""
    times = {
        "fast": {"1": {"1": sailor_times(1), "2": sailor_times(0.6, 0.12)}, "4": {"1": sailor_times(3)}},
        "slow": {"2": {"1": sailor_times(8), "4": sailor_times(2)}, "1": {"1": sailor_times(5)}},
    }
    other = {"1": FLAT, "2": [[0.0, 0.0, 4.0], 4e9]}
    pairs = {"zone": {"fast": other, "slow": {"1": [[0.0, 0.0, 1.0], 1e9]}}}
    zones = {"zone": {"fast": {"1": pairs}, "slow": {"1": pairs}}}
    write(tmp_path / "layer_times.json", {"net": times})
    write(tmp_path / "layer_sizes.json", {"net": {"1": sailor_sizes(1), "2": sailor_sizes(2)}})
    write(
        tmp_path / "intra_node_bandwidths.json",
        {"fast": {"2": [[0.0, 0.0, 50.0], 5e10]}, "slow": {"4": FLAT}},
    )
    write(tmp_path / "multizone_bandwidths_het.json", zones)
    return tmp_path


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), "utf-8")


def from_sailor(folder: Path, **options: Any) -> tuple[Profile, Cluster]:
    memory = {"fast": 10**9, "slow": 10**8}
    given = {"model": "net", "nodes": "2xfastx2,1xslowx4", "zone": "zone", "memory": memory} | options
    found = import_published("sailor", [folder], ImportOptions(**given))
    assert found.cluster is not None
    return found.profile, found.cluster


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
    assert from_sailor(sailor)[0].measurement("fast", 2).optimizer_seconds == pytest.approx(
        (0.1, 0.2, 0.3, 0.4, 0.5)
    )


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
        (
            "layer_times.json",
            lambda d: d["net"]["fast"]["1"]["1"]["2"].pop(),
            "fast, micro-batch 1, degree 1: 2 numbers for 3",
        ),
        (
            "layer_times.json",
            lambda d: d["net"]["fast"]["1"].update({"1": {"0": [1, 2, 3]}}),
            "1 layers, but layer_sizes.json has 5",
        ),
        (
            "layer_times.json",
            lambda d: d["net"]["fast"]["1"]["1"].update({"2": [1, -2, 3]}),
            "numbers that are not negative",
        ),
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
    document = json.loads((sailor / file).read_text())
    change(document)
    write(sailor / file, document)
    with pytest.raises(InputError) as error:
        from_sailor(sailor)
    assert message in str(error.value)


@NEEDS_SAILOR
@pytest.mark.parametrize(
    ("model", "layers"), [("OPT-350", 26), ("GPT-Neo-2.7", 34), ("LLAMA-3-8", 35), ("OPT-30", 50)]
)
def test_the_published_files(model: str, layers: int) -> None:
    found = import_published("sailor", [SAILOR], ImportOptions(model=model, nodes="2xA100-40x4,1xV100-16x4"))
    assert len(found.profile.layers) == layers
    assert found.profile == Profile.parse(json.loads(found.profile.to_json()), "itself")
    assert found.cluster is not None
    assert [found.cluster.type_of(d).memory for d in ("n0/0", "n2/3")] == [40 * 10**9, 16 * 10**9]


# ---- FASOP


SIZES: dict[str, Any] = {"hidden_size": 8, "sequence_length": 16, "attention_heads": 2, "vocabulary": 100}


@pytest.fixture
def fasop(tmp_path: Path) -> Path:
    return write_fasop(tmp_path)


def write_fasop(tmp_path: Path) -> Path:
    for name, row in {
        "net_A100_1": [1, 2, 2, 3],
        "net_A100_2": [1, 1, 1, 2],
        "net_A10_1": [4, 5, 5, 6],
        "t5_A10_1": [1],
    }.items():
        np.save(tmp_path / f"{name}.npy", np.array(row, dtype=np.float64))
    return tmp_path


def test_fasop(fasop: Path) -> None:
    links = {"A100": Link(bandwidth=2e11), "A10": Link(bandwidth=1e10)}
    options = ImportOptions(
        model="net", nodes="1xA100x4,1xA10x2", link=Link(bandwidth=5e9), inside=links, number_bytes=2, **SIZES
    )
    profile, cluster = import_published("fasop", [fasop], options)
    assert [(m.device_type, m.tensor_parallel) for m in profile.measurements] == [
        ("A100", 1),
        ("A100", 2),
        ("A10", 1),
    ]
    forward, backward = profile.measurement("A10").times(3)
    assert list(forward) == [12, 15, 15, 18]  # times grow with the micro-batch
    assert list(forward + backward) == [36, 45, 45, 54]  # three times the forward
    assert profile.layers[0].parameter_bytes == 2 * 100 * 8
    assert profile.layers[1].parameter_bytes == 2 * (12 * 64 + 13 * 8)
    assert profile.measurement("A100", 2).parameter_bytes == (800, 872, 872, 800)
    assert profile.optimizer.state_bytes_per_parameter_byte == 6
    assert cluster is not None
    assert (cluster.type_of("n0/0").memory, cluster.type_of("n1/0").memory) == (40 * 10**9, 24 * 10**9)
    assert cluster.link_between("n1", "n1").bandwidth == 1e10


def test_fasop_ties_embedding_and_head(fasop: Path) -> None:
    profile, _ = import_published("fasop", [fasop], ImportOptions(model="net", **SIZES))
    assert [layer.tied for layer in profile.layers] == ["vocabulary", None, None, "vocabulary"]
    assert profile.layers[3].tied_parameter_bytes == profile.layers[3].parameter_bytes == 4 * 100 * 8
    assert profile.measurement("A100").microbatch_sizes == (1,)  # FASOP has no factors of it


def fasop_model(folder: Path, model: str, row: list[float]) -> Profile:
    for device in ("A100", "A10"):
        np.save(folder / f"{model}_{device}_1.npy", np.array(row))
    return import_published("fasop", [folder], ImportOptions(model=model, **SIZES))[0]


def test_fasop_factors(tmp_path: Path) -> None:
    """Times of FASOP's own models grow as in its estimator: worked out by hand from its source."""
    gpt = fasop_model(tmp_path, "gpt2XL", [1.0, 2.0, 2.0, 3.0])
    assert gpt.measurement("A100").microbatch_sizes == (1, 2, 4, 8, 16, 32)
    assert list(gpt.measurement("A100").times(16)[0]) == [1, 32, 32, 3]
    assert list(gpt.measurement("A10").times(16)[0]) == [16, 32, 32, 48]
    bert = fasop_model(tmp_path, "bert", [1.0, 1.0, 1.0])
    assert list(bert.measurement("A100").times(4)[0]) == [1, 1, 4]
    assert list(bert.measurement("A100").times(32)[0]) == pytest.approx([1.385 * 1.589 * 1.565, 1.235 * 1.658 * 2, 32])
    assert list(bert.measurement("A10").times(4)[0]) == [1, 1, 4]
    assert list(bert.measurement("A10").times(16)[0]) == [4, 4, 16]


def test_fasop_t5_has_two_halves_and_no_head(tmp_path: Path) -> None:
    t5 = fasop_model(tmp_path, "T5", [1.0] * 6)
    assert [layer.name for layer in t5.layers] == [
        "embedding", "encoder.0", "encoder.1", "decoder_embedding", "decoder.0", "decoder.1",
    ]  # fmt: skip
    assert [layer.tied for layer in t5.layers] == ["vocabulary", None, None, "vocabulary", None, None]
    assert [layer.parameter_bytes for layer in t5.layers[2:5]] == [4 * (12 * 64 + 13 * 8), 4 * 100 * 8, 4 * (12 * 64 + 13 * 8)]
    own = [1.386 * 1.244, 1.173, 1.173, 1.386 * 1.244, 1.142, 1.142]
    assert list(t5.measurement("A100").times(4)[0]) == pytest.approx(own)
    assert list(t5.measurement("A10").times(4)[0]) == pytest.approx([1.44, 2.28, 2.28, 1.44, 2.188, 2.188])


def test_activations_of_a_block_are_those_of_korthikanti_et_al() -> None:
    # s·h·(34 + 5·a·s/h) bytes a sample in 16-bit numbers
    options = ImportOptions(
        model="gpt3",
        hidden_size=12288,
        sequence_length=2048,
        attention_heads=96,
        vocabulary=50000,
        number_bytes=2,
    )
    assert gpt_bytes(3, options).saved[1] == 2048 * 12288 * (34 + 5 * 96 * 2048 // 12288)


def test_fasop_says_what_it_needs(fasop: Path) -> None:
    with pytest.raises(
        InputError, match="--hidden-size, --sequence-length, --attention-heads, --vocabulary would say"
    ):
        import_published("fasop", [fasop], ImportOptions(model="net"))
    sizes = ImportOptions(model="nett", **SIZES)
    with pytest.raises(InputError, match="has no model 'nett'; did you mean 'net'\\?"):
        import_published("fasop", [fasop], sizes)
    with pytest.raises(InputError, match="A10 at degree 1: 1$"):
        import_published("fasop", [fasop], ImportOptions(model="t5", **SIZES))
    (fasop / "net_T4_1.npy").write_bytes(b"no array")
    with pytest.raises(InputError, match="net_T4_1.npy is not a NumPy array of numbers"):
        import_published("fasop", [fasop], ImportOptions(model="net", **SIZES))


def test_links_that_are_not_given(fasop: Path) -> None:
    with pytest.raises(
        InputError, match="the link inside nodes of A10 is not known; say it: --inside 'A10=12 GB/s'"
    ):
        import_published("fasop", [fasop], ImportOptions(model="net", nodes="1xA10x2", **SIZES))
    with pytest.raises(InputError, match="--link '5 GB/s'"):
        import_published("fasop", [fasop], ImportOptions(model="net", nodes="2xA10x1", **SIZES))


# ---- what they share


def test_nodes_as_text() -> None:
    assert parse_nodes("4xGH-96x4, A10x1,2xTitan-RTXx8") == [
        NodeSpec(4, "GH-96", 4),
        NodeSpec(1, "A10", 1),
        NodeSpec(2, "Titan-RTX", 8),
    ]


@pytest.mark.parametrize("text", ["", "4xGH-96", "0xA10x4", "2xA10x0", "A10", "4x4x4"])
def test_nodes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="write, for example, '4xGH-96x4'"):
        parse_nodes(text)


def test_absurd_numbers_of_nodes_and_sizes() -> None:
    with pytest.raises(InputError, match="--nodes asks for 799999200000 devices, the most of a cluster are 65536"):
        parse_nodes("999999xA100x800000")
    with pytest.raises(InputError, match="cannot read nodes '9{20}"):
        parse_nodes(f"{'9' * 5_000}xA100x8")
    with pytest.raises(InputError, match=r"--hidden-size must be from 0 to 16777216, got 1000000000"):
        ImportOptions(model="net", hidden_size=10**30)
    with pytest.raises(InputError, match=r"--number-bytes must be from 1 to 16, got 0"):
        ImportOptions(model="net", number_bytes=0)


def test_thousands_of_nodes_are_made_by_kinds(sailor: Path) -> None:
    """By kinds of nodes, since pairs of nodes are too many."""
    _, cluster = from_sailor(sailor, nodes="2000xfastx2,1xslowx4")
    assert len(cluster.nodes) == 2_001
    assert len(cluster.links) == 2_000
    assert cluster.link_between("n0", "n1999").seconds(1e9) == pytest.approx(0.5)
    assert cluster.link_between("n0", "n2000").seconds(1e9) == pytest.approx(1.0)


def test_quantities() -> None:
    links, sizes = parse_quantities("5 GB/s", ["A10=12 GB/s"], ["A10=24 GiB"])
    assert (links[""].bandwidth, links["A10"].bandwidth, sizes) == (5e9, 12e9, {"A10": 24 * 2**30})
    assert parse_quantities(None, (), ()) == ({}, {})
    with pytest.raises(InputError, match="cannot read '12 parsecs'"):
        parse_quantities(None, ["A10=12 parsecs"], ())
    with pytest.raises(InputError, match="'A10'; write, for example, 'A100=40 GiB'"):
        parse_quantities(None, (), ["A10"])


def test_memory_that_no_name_says(sailor: Path) -> None:
    with pytest.raises(
        InputError, match="how much memory 'fast' has is not known; say it: --memory 'fast=24 GB'"
    ):
        from_sailor(sailor, memory={})


def test_layouts_and_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown layout 'sailer'; did you mean 'sailor'\\?"):
        import_published("sailer", [tmp_path], ImportOptions(model="net"))
    with pytest.raises(InputError, match="no such file or folder"):
        import_published("sailor", [tmp_path / "nowhere"], ImportOptions(model="net"))
    with pytest.raises(InputError, match="sailor takes one folder, 2 were given"):
        import_published("sailor", [tmp_path, tmp_path], ImportOptions(model="net"))
    with pytest.raises(InputError, match="cannot read .*layer_times.json"):
        import_published("sailor", [tmp_path], ImportOptions(model="net"))


# ---- the command


def test_the_command(
    sailor: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["hetpipe", "import", "sailor", str(sailor), *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    profile, cluster = sailor / "out.json", sailor / "out.yaml"
    there = ("--nodes", "2xfastx2", "--zone", "zone", "--memory", "fast=1 GB", "--cluster-output", cluster)
    assert run("--model", "net", "-o", profile, *there) == 0
    assert Profile.load(profile).model == "net"
    assert len(Cluster.load(cluster).devices) == 4
    assert run("--model", "nut", "-o", profile) == 2
    assert "did you mean 'net'?" in capsys.readouterr().err
    assert run("--model", "net", "-o", sailor / "none.json", "--cluster-output", cluster) == 2
    assert not (sailor / "none.json").exists()
