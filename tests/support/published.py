"""Small folders of published measurements in their layouts, for tests of the importers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.files.messages import InputError

FLAT = [[0.0, 0.0, 2.0], 2e9]  # 2 GB/s at any size


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), "utf-8")


def refused(folder: Path, file: str, change: Callable[[Any], Any], read: Callable[[Path], Any], message: str) -> None:
    """That a file of the folder, so changed, is refused with this message."""
    document = json.loads((folder / file).read_text())
    change(document)
    write(folder / file, document)
    with pytest.raises(InputError) as error:
        read(folder)
    assert message in str(error.value)


def sailor_sizes(degree: int) -> dict[str, dict[str, int]]:
    """Embedding, three blocks and a head; the head's logits are 50 bytes of the 90 that it leaves."""
    rows = [(800, 3, 10, 10), *[(400, 10, 10, 40)] * 3, (800, 10, 54, 90)]
    keys = ("params_bytes", "act_input_bytes", "act_output_bytes", "act_mem_bytes")
    return {
        str(i): {key: value // (degree if key == "params_bytes" else 1) for key, value in zip(keys, row, strict=True)}
        for i, row in enumerate(rows)
    }


def sailor_times(scale: float, optimizer: float = 0.24) -> dict[str, list[float]]:
    return {str(i): [scale * f, scale * 2 * f, optimizer] for i, f in enumerate((1.0, 2.0, 2.0, 2.0, 3.0))}


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
    write(tmp_path / "intra_node_bandwidths.json", {"fast": {"2": [[0.0, 0.0, 50.0], 5e10]}, "slow": {"4": FLAT}})
    write(tmp_path / "multizone_bandwidths_het.json", zones)
    return tmp_path


def from_sailor(folder: Path, **options: Any) -> tuple[Profile, Cluster]:
    memory = {"fast": 10**9, "slow": 10**8}
    given = {"model": "net", "nodes": "2xfastx2,1xslowx4", "zone": "zone", "memory": memory} | options
    found = import_published("sailor", [folder], ImportOptions(**given))
    assert found.cluster is not None
    return found.profile, found.cluster


FASOP_SIZES: dict[str, Any] = {"hidden_size": 8, "sequence_length": 16, "attention_heads": 2, "vocabulary": 100}


def write_fasop(tmp_path: Path) -> Path:
    for name, row in {"net_A100_1": [1, 2, 2, 3], "net_A100_2": [1, 1, 1, 2], "net_A10_1": [4, 5, 5, 6], "t5_A10_1": [1]}.items():
        np.save(tmp_path / f"{name}.npy", np.array(row, dtype=np.float64))
    return tmp_path


FULL = [[2.0, 1.0], [4.0, 2.0], [3.0, 5.0, 7.0], [6.0, 10.0, 14.0]]
ZORSE_SIZES: dict[str, Any] = {"sequence_length": 16, "attention_heads": 2, "vocabulary": 50}


def write_zorse(folder: Path) -> Path:
    """A model of two layers of 800 parameters, 8 wide; 450 parameters are the embedding's. Three forms of cells."""
    cells = {
        "t4": {"16": {"float16": FULL, "float32": FULL[:2]}, "32": {"float32": 7.0}},
        "p40": {"16": {"float32": [3.0, 1.5]}},
        "v100x16": {"16": {"float16": 9.0}},
        "a6000": {"32": {"float16": FULL}},
    }
    stats = {"hidden_size": 8, "num_layers": 2, "parameters_per_layer": 800, "total_parameters": 2450}
    write(folder / "model_latencies.json", {"net": cells})
    write(folder / "model_stats.json", {"net": stats})
    machines = [
        {"machine": "left", "gpus": [{"name": "t4", "memory_total_mib": 15360}, {"name": "p40", "memory_total_mib": 23040}]},
        {"machine": "right", "gpus": [{"name": "t4", "memory_total_mib": 15360}]},
    ]
    bandwidth = {
        "intranode_bandwidth": {"0": 11.0},
        "intranode_latency": {"0": 0.004},
        "internode_bandwidth": {"0": {"1": 2.0}, "1": {"0": 1.0}},
        "internode_latency": {"0": {"1": 0.1}, "1": {"0": 0.2}},
    }
    write(folder / "cluster_info.json", {"machines": machines, "bandwidth": bandwidth})
    return folder
