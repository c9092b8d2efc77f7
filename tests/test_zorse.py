"""The importer of Zorse's measurements, on small files of their layout, and on the published ones where present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.exchange.importers.zorse import LINE_SIZES, read_cell
from hetpipe.files.messages import InputError
from tests.support.external import external
from tests.support.published import FULL, ZORSE_SIZES, refused, write, write_zorse

ZORSE, NEEDS_ZORSE = external("zorse")


@pytest.fixture
def zorse(tmp_path: Path) -> Path:
    return write_zorse(tmp_path)


def imported(folder: Path, **options: Any) -> tuple[Profile, Cluster]:
    found = import_published("zorse", [folder], ImportOptions(**({"model": "net"} | ZORSE_SIZES | options)))
    assert found.cluster is not None
    return found.profile, found.cluster


def test_layers_and_their_bytes(zorse: Path) -> None:
    profile, _ = imported(zorse)
    assert [layer.name for layer in profile.layers] == ["embedding", "block.0", "block.1", "head"]
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 450, 3200, 3200, 4 * 400]
    assert [layer.output_bytes_per_sample for layer in profile.layers] == [4 * 16 * 8] * 3 + [4]
    # What is saved is of the precision: the head's input, logits and probabilities in 4 bytes, or in 2.
    assert profile.layers[3].saved_bytes_per_sample == 4 * (16 * 8 + 2 * 16 * 50)
    fp16 = profile.at({"t4": "fp16"})
    assert fp16.saved_bytes(1, "t4")[3] == 2 * (16 * 8 + 2 * 16 * 50)
    assert fp16.parameter_bytes(1, "t4")[1] == 3200


def test_a_measurement_for_each_gpu_and_dtype(zorse: Path) -> None:
    profile, _ = imported(zorse)
    found = {(m.device_type, m.precision): m for m in profile.measurements}
    assert set(found) == {("t4", "fp16"), ("t4", "fp32"), ("p40", "fp32"), ("v100x16", "fp16")}
    points = found["t4", "fp16"]
    assert points.microbatch_sizes == (1, 2, 3)
    assert points.forward_seconds[1] == pytest.approx((0.0, 0.005, 0.005, 0.005 * 400 / 800))  # the head at the layer's rate
    assert points.backward_seconds[2] == pytest.approx((0.0, 0.014, 0.014, 0.007))
    assert found["t4", "fp32"].forward_seconds[3] == pytest.approx((0.0, 0.017, 0.017, 0.0085))  # 2·8 + 1


def test_lines_and_numbers_are_of_forward_and_backward() -> None:
    assert read_cell(9.0, "here").forward == pytest.approx([0.003 * b for b in LINE_SIZES])
    line = read_cell([3.0, 1.5], "here")
    assert [f + b for f, b in zip(line.forward, line.backward, strict=True)] == pytest.approx(
        [(3.0 * b + 1.5) / 1e3 for b in LINE_SIZES]
    )


@given(st.floats(0.01, 1e3), st.floats(-1e3, 1e3))
def test_no_line_has_times_below_zero(slope: float, intercept: float) -> None:
    for cell in ([slope, intercept], [[slope, intercept], [slope, 0.0]]):
        found = read_cell(cell, "here")
        assert min(*found.forward, *found.backward) > 0


def test_the_described_cluster(zorse: Path) -> None:
    _, cluster = imported(zorse)
    assert [(node.name, node.devices) for node in cluster.nodes] == [("left", {"t4": 1, "p40": 1}), ("right", {"t4": 1})]
    assert cluster.type_of("left/1").memory == 23040 * 2**20
    assert cluster.link_between("left", "left").bandwidth == 11 * 2**30
    slower = cluster.link_between("left", "right")
    assert slower.bandwidth == 2**30
    assert slower.latency == pytest.approx(2e-4)


def test_a_cluster_of_the_options(zorse: Path) -> None:
    (zorse / "cluster_info.json").unlink()
    assert import_published("zorse", [zorse], ImportOptions(model="net", **ZORSE_SIZES)).cluster is None
    _, cluster = imported(zorse, nodes="1xv100x16x1,1xt4x1", link=cluster_link())
    assert [device.type for device in cluster.devices] == ["v100x16", "t4"]
    assert [kind.memory for kind in cluster.device_types.values()] == [16 * 10**9] * 2


def cluster_link() -> Any:
    from hetpipe.documents.cluster import Link

    return Link(bandwidth=1e9)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model_latencies.json", lambda d: d["net"]["t4"]["16"].update(float16=[[1, 2], [3]]), "16 tokens, float16: expected m"),
        ("model_latencies.json", lambda d: d["net"]["t4"]["16"].update(float16=-1), "with a slope above 0; found [-1, 0.0]"),
        ("model_latencies.json", lambda d: d["net"]["t4"]["16"].update(float16="x"), "with a slope above 0; found ['x', 0.0]"),
        (
            "model_latencies.json",
            lambda d: d["net"]["t4"]["16"].update(float16=[*FULL[:3], [1.0]]),
            "3 forward times and 1 backward times",
        ),
        ("model_latencies.json", lambda d: d["net"]["t4"]["16"].update(float8=1.0), "unknown dtype"),
        ("model_latencies.json", lambda d: d["net"].update(t4=3), "t4: expected an object"),
        ("model_stats.json", lambda d: d.pop("net"), "model_stats.json has no model 'net'"),
        ("model_stats.json", lambda d: d["net"].update(num_layers=0), "num_layers: expected a number from 1 to 9998, found 0"),
        ("model_stats.json", lambda d: d["net"].update(total_parameters=1900), "has 1900 parameters, but 2 layers of 800 and"),
        ("cluster_info.json", lambda d: d.update(machines=[]), "expected a list of machines, found []"),
        ("cluster_info.json", lambda d: d["machines"][0].update(gpus=[{}]), "expected a gpu with a name, found None"),
        ("cluster_info.json", lambda d: d["bandwidth"]["internode_bandwidth"]["1"].clear(), "internode_bandwidth, 1 to 0: exp"),
        ("cluster_info.json", lambda d: d["machines"][1].update(machine="left"), "node name 'left' is given 2 times"),
    ],
)
def test_files_that_are_wrong(zorse: Path, file: str, change: Any, message: str) -> None:
    refused(zorse, file, change, imported, message)


def test_sizes_of_another_implementation(zorse: Path) -> None:
    document = json.loads((zorse / "model_stats.json").read_text())
    write(zorse / "model_stats.json", {"deepspeednet": document["net"]})
    assert len(imported(zorse)[0].layers) == 4


def test_what_was_not_measured(zorse: Path) -> None:
    with pytest.raises(InputError, match="not measured with --sequence-length 64, but with 16, 32"):
        imported(zorse, sequence_length=64)
    with pytest.raises(InputError, match="Give --sequence-length, --attention-heads, --vocabulary, too"):
        import_published("zorse", [zorse], ImportOptions(model="net"))


@NEEDS_ZORSE
@pytest.mark.parametrize("model", ["deepspeedllama_7b", "deepspeedbert_large", "deepspeedgpt_2.7b", "deepspeedvit_g"])
def test_the_published_files(model: str) -> None:
    vocabulary = 10 if "vit" in model else 49152
    options = ImportOptions(model=model, sequence_length=512, attention_heads=16, vocabulary=vocabulary)
    found = import_published("zorse", [ZORSE], options)
    stats = json.loads((ZORSE / "model_stats.json").read_text())[model]
    assert sum(layer.parameter_bytes for layer in found.profile.layers) == 4 * stats["total_parameters"]
    assert found.cluster is not None
    assert found.profile == Profile.parse(json.loads(found.profile.to_json()), "itself")


@NEEDS_ZORSE
def test_every_published_cell_is_read() -> None:
    cells = json.loads((ZORSE / "model_latencies.json").read_text())
    for model, gpus in cells.items():
        for gpu, lengths in gpus.items():
            for length, dtypes in lengths.items():
                for dtype, cell in dtypes.items():
                    found = read_cell(cell, f"{model} {gpu} {length} {dtype}")
                    assert min(*found.forward, *found.backward) > 0
