"""The importer of Metis's profiles, on small files of their layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.files.messages import InputError
from tests.support.published import write


@pytest.fixture
def metis(tmp_path: Path) -> Path:
    return write_metis(tmp_path)


def write_metis(tmp_path: Path) -> Path:
    """Two types; A100 also at degree 2 and at batch 2."""
    folder = tmp_path / "profile"
    folder.mkdir()
    mib = 2**20
    for kind, degree, size, ms in (("A100", 1, 1, 3.0), ("A100", 1, 2, 5.4), ("A100", 2, 1, 1.8), ("T4", 1, 1, 30.0)):
        memory = [4 * 2.0 / degree + size * 6.0] * 3
        document = {
            "model": {"model_name": "GPT", "parameters": {"parameters_per_layer_bytes": [2 * mib] * 3}},
            "execution_time": {"layer_compute_total_ms": [ms] * 3, "optimizer_time_ms": 6.0, "total_time_ms": 99.0},
            "execution_memory": {"layer_memory_total_mb": memory},
        }
        write(folder / f"DeviceType.{kind}_tp{degree}_bs{size}.json", document)
    write(folder / "notes.json", {})
    return folder


METIS: dict[str, Any] = {"hidden_size": 8, "sequence_length": 16}


def test_metis(metis: Path) -> None:
    profile, cluster = import_published("metis", [metis], ImportOptions(model="gpt", **METIS))
    assert cluster is None
    mib = 2**20
    assert [(m.device_type, m.tensor_parallel, m.microbatch_sizes) for m in profile.measurements] == [
        ("A100", 1, (1, 2)),
        ("A100", 2, (1,)),
        ("T4", 1, (1,)),
    ]
    forward, backward = profile.measurement("A100").times(2)
    assert forward == pytest.approx([0.0018] * 3)
    assert backward == pytest.approx([0.0036] * 3)
    assert profile.measurement("A100").optimizer_seconds == pytest.approx((0.002,) * 3)
    assert [layer.saved_bytes_per_sample for layer in profile.layers] == [6 * mib] * 3
    assert profile.measurement("A100", 2).parameter_bytes == (mib,) * 3
    assert profile.measurement("A100", 2).saved_bytes_per_sample == (6 * mib,) * 3
    assert [layer.output_bytes_per_sample for layer in profile.layers] == [512, 512, 4]


def test_metis_cluster(metis: Path) -> None:
    clusterfile, hostfile = metis.parent / "clusterfile.json", metis.parent / "hostfile"
    example = {"instance_type": "A100", "inter_bandwidth": 10, "intra_bandwidth": 46, "memory": 80}
    guide = {"instance_type": "T4", "inter_bandwidth": 312500000.0, "intra_bandwidth": 5312500000.0, "memory": 15}
    write(clusterfile, {"IP1": example, "IP2": guide})
    hostfile.write_text("IP1 slots=4\nIP2 8\nIP1 slots=2\n")
    _, cluster = import_published("metis", [metis, clusterfile, hostfile], ImportOptions(model="gpt", **METIS))
    assert cluster is not None
    assert [node.devices for node in cluster.nodes] == [{"A100": 4}, {"T4": 8}, {"A100": 2}]
    assert cluster.link_between("n0", "n0").bandwidth == 46e9
    assert cluster.link_between("n1", "n1").bandwidth == 5312500000.0
    assert cluster.link_between("n0", "n2").bandwidth == 10e9
    assert cluster.link_between("n0", "n1").bandwidth == 312500000.0
    assert cluster.type_of("n1/0").memory == 15 * 10**9
    hostfile.write_text("IP3 slots=4\n")
    with pytest.raises(InputError, match="an object under 'IP3'; known: IP1, IP2"):
        import_published("metis", [metis, clusterfile, hostfile], ImportOptions(model="gpt", **METIS))
    hostfile.write_text("IP1 many\n")
    with pytest.raises(InputError, match="cannot read 'IP1 many'"):
        import_published("metis", [metis, clusterfile, hostfile], ImportOptions(model="gpt", **METIS))


def test_metis_files_that_are_wrong(metis: Path) -> None:
    path = metis / "DeviceType.T4_tp1_bs1.json"
    document = json.loads(path.read_text())
    document["execution_memory"]["layer_memory_total_mb"].pop()
    write(path, document)
    with pytest.raises(InputError, match="T4_tp1_bs1.json: layer_memory_total_mb: 2 numbers for 3 layers"):
        import_published("metis", [metis], ImportOptions(model="gpt", **METIS))
    path.write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        import_published("metis", [metis], ImportOptions(model="gpt", **METIS))
    with pytest.raises(InputError, match="has no file DeviceType.NAME"):
        import_published("metis", [metis.parent], ImportOptions(model="gpt", **METIS))
    with pytest.raises(
        InputError, match="metis takes a folder alone, or a folder, a clusterfile and a hostfile, but 2 paths were given"
    ):
        import_published("metis", [metis, path], ImportOptions(model="gpt", **METIS))
