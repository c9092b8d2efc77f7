"""Importers of published profiles, on small files of their layouts; Sailor's also on the published ones, where present."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetpipe.documents.cluster import Link
from hetpipe.documents.profile import Profile
from hetpipe.exchange.importers import ImportOptions, import_published, parse_quantities
from hetpipe.exchange.importers.options import NodeSpec, parse_nodes
from hetpipe.exchange.importers.transformer import gpt_bytes
from hetpipe.files.messages import InputError
from tests.support.published import FASOP_SIZES, write_fasop

# ---- FASOP


@pytest.fixture
def fasop(tmp_path: Path) -> Path:
    return write_fasop(tmp_path)


def test_fasop(fasop: Path) -> None:
    links = {"A100": Link(bandwidth=2e11), "A10": Link(bandwidth=1e10)}
    options = ImportOptions(
        model="net", nodes="1xA100x4,1xA10x2", link=Link(bandwidth=5e9), inside=links, number_bytes=2, **FASOP_SIZES
    )
    profile, cluster = import_published("fasop", [fasop], options)
    assert [(m.device_type, m.tensor_parallel) for m in profile.measurements] == [("A100", 1), ("A100", 2), ("A10", 1)]
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
    profile, _ = import_published("fasop", [fasop], ImportOptions(model="net", **FASOP_SIZES))
    assert [layer.tied for layer in profile.layers] == ["vocabulary", None, None, "vocabulary"]
    assert profile.layers[3].tied_parameter_bytes == profile.layers[3].parameter_bytes == 4 * 100 * 8
    assert profile.measurement("A100").microbatch_sizes == (1,)  # FASOP has no factors of it


def fasop_model(folder: Path, model: str, row: list[float]) -> Profile:
    for device in ("A100", "A10"):
        np.save(folder / f"{model}_{device}_1.npy", np.array(row))
    return import_published("fasop", [folder], ImportOptions(model=model, **FASOP_SIZES))[0]


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
        "embedding",
        "encoder.0",
        "encoder.1",
        "decoder_embedding",
        "decoder.0",
        "decoder.1",
    ]
    assert [layer.tied for layer in t5.layers] == ["vocabulary", None, None, "vocabulary", None, None]
    assert [layer.parameter_bytes for layer in t5.layers[2:5]] == [4 * (12 * 64 + 13 * 8), 4 * 100 * 8, 4 * (12 * 64 + 13 * 8)]
    own = [1.386 * 1.244, 1.173, 1.173, 1.386 * 1.244, 1.142, 1.142]
    assert list(t5.measurement("A100").times(4)[0]) == pytest.approx(own)
    assert list(t5.measurement("A10").times(4)[0]) == pytest.approx([1.44, 2.28, 2.28, 1.44, 2.188, 2.188])


def test_activations_of_a_block_are_those_of_korthikanti_et_al() -> None:
    # s·h·(34 + 5·a·s/h) bytes a sample in 16-bit numbers
    options = ImportOptions(
        model="gpt3", hidden_size=12288, sequence_length=2048, attention_heads=96, vocabulary=50000, number_bytes=2
    )
    assert gpt_bytes(3, options).saved[1] == 2048 * 12288 * (34 + 5 * 96 * 2048 // 12288)


def test_fasop_says_what_it_needs(fasop: Path) -> None:
    with pytest.raises(InputError, match="Give --hidden-size, --sequence-length, --attention-heads, --vocabulary, too"):
        import_published("fasop", [fasop], ImportOptions(model="net"))
    sizes = ImportOptions(model="nett", **FASOP_SIZES)
    with pytest.raises(InputError, match="has no model 'nett'; did you mean 'net'\\?"):
        import_published("fasop", [fasop], sizes)
    with pytest.raises(InputError, match="A10 at degree 1: 1$"):
        import_published("fasop", [fasop], ImportOptions(model="t5", **FASOP_SIZES))
    (fasop / "net_T4_1.npy").write_bytes(b"no array")
    with pytest.raises(InputError, match="net_T4_1.npy is not a NumPy array of numbers"):
        import_published("fasop", [fasop], ImportOptions(model="net", **FASOP_SIZES))


def test_links_that_are_not_given(fasop: Path) -> None:
    with pytest.raises(InputError, match="the link inside nodes of A10 is not known. Give it, such as --inside 'A10=12 GB/s'"):
        import_published("fasop", [fasop], ImportOptions(model="net", nodes="1xA10x2", **FASOP_SIZES))
    with pytest.raises(InputError, match="--link '5 GB/s'"):
        import_published("fasop", [fasop], ImportOptions(model="net", nodes="2xA10x1", **FASOP_SIZES))


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
    with pytest.raises(InputError, match="--nodes asks for 799999200000 devices, but a cluster may have at most 65536"):
        parse_nodes("999999xA100x800000")
    with pytest.raises(InputError, match="cannot read nodes '9{20}"):
        parse_nodes(f"{'9' * 5_000}xA100x8")
    with pytest.raises(InputError, match=r"--hidden-size must be from 0 to 16777216, got 1000000000"):
        ImportOptions(model="net", hidden_size=10**30)
    with pytest.raises(InputError, match=r"--number-bytes must be from 1 to 16, got 0"):
        ImportOptions(model="net", number_bytes=0)


def test_quantities() -> None:
    links, sizes = parse_quantities("5 GB/s", ["A10=12 GB/s"], ["A10=24 GiB"])
    assert (links[""].bandwidth, links["A10"].bandwidth, sizes) == (5e9, 12e9, {"A10": 24 * 2**30})
    assert parse_quantities(None, (), ()) == ({}, {})
    with pytest.raises(InputError, match="cannot read '12 parsecs'"):
        parse_quantities(None, ["A10=12 parsecs"], ())
    with pytest.raises(InputError, match="'A10'; write, for example, 'A100=40 GiB'"):
        parse_quantities(None, (), ["A10"])


def test_layouts_and_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown layout 'sailer'; did you mean 'sailor'\\?"):
        import_published("sailer", [tmp_path], ImportOptions(model="net"))
    with pytest.raises(InputError, match="no such file or folder"):
        import_published("sailor", [tmp_path / "nowhere"], ImportOptions(model="net"))
    with pytest.raises(InputError, match="sailor takes one folder, but 2 were given"):
        import_published("sailor", [tmp_path, tmp_path], ImportOptions(model="net"))
    with pytest.raises(InputError, match="cannot read .*layer_times.json"):
        import_published("sailor", [tmp_path], ImportOptions(model="net"))
