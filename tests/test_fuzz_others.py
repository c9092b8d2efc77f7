"""Mutations of what other programs have left: checkpoints, folders of models and adapters, profiles (see test_fuzz.py)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from hetpipe.building.build import build_layers
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import adapter_keys, base_of
from hetpipe.documents.cluster import Link
from hetpipe.documents.job import Job
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.fastspeed.module import load_optimizer, put_weights, read_checkpoint
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.adapters.adapt import adapt
from hetpipe.layers.weights import materialise
from tests.support import fastspeed_parts as parts
from tests.support.fuzzing import MARKS, Place, fuzz_bytes, fuzz_document
from tests.support.published import FASOP_SIZES, ZORSE_SIZES, write_fasop, write_sailor, write_zorse
from tests.support.zoo import ZOO, transformers_model
from tests.test_checkpoint import ALONE, net
from tests.test_metis import METIS, write_metis

pytestmark = MARKS


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_checkpoint_of_fastspeed(tmp_path: Path, zipped: bool) -> None:
    module, file = parts.Net(), tmp_path / "Net.pth"
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.zeros(2, parts.FEATURES)).sum().backward()
    optimizer.step()
    whole = {"epoch": 4, "model": module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(whole, file, _use_new_zipfile_serialization=zipped)

    def resume() -> None:
        again, state = parts.Net(), read_checkpoint(str(file))
        put_weights(again, state, str(file))
        other = torch.optim.Adam(again.parameters())
        load_optimizer(other, state, str(file))
        for parameter in again.parameters():
            parameter.grad = torch.zeros_like(parameter)
        other.step()

    fuzz_bytes(Place(tmp_path), file, resume)


@pytest.mark.parametrize("part", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("model", ["gpt2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("llama", "bert", "t5"))])
def test_a_folder_of_transformers(tmp_path: Path, model: str, part: str) -> None:
    """All three parts of one model are mutated; of other models only the configuration, since the rest is read alike."""
    if model != "gpt2" and part != "config.json":
        pytest.skip("these parts are read alike for all models")
    folder = tmp_path / "folder"
    with warnings.catch_warnings(action="ignore"):
        transformers_model(model, ZOO[model].config).save_pretrained(folder)
    if part == "model.safetensors.index.json":
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        names = [name for name, _ in transformers_model(model, ZOO[model].config).named_parameters()]
        (folder / part).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    text = {"name": "random_classification"}
    job = {
        "format": "hetpipe.job/1",
        "model": {"name": model, "args": {"weights": str(folder)}},
        "data": text,
        "train": {"global_batch": 1, "steps": 1},
    }

    def build() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*drawn at random")
            layers = build_layers(Job.parse(job, "job"))
            if part != "config.json":
                materialise(layers)

    fuzz = fuzz_bytes if part == "model.safetensors" else fuzz_document
    fuzz(Place(tmp_path), folder / part, build)


@pytest.mark.parametrize("part", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_of_peft(tmp_path: Path, part: str) -> None:
    layers = adapt(net(), seed=1, r=2, train_also=["head"])
    extra = {"base": base_of(layers), "adapter": adapter_keys(layers)}
    saved = checkpoint.save(tmp_path / "saved", 1, layers, torch.optim.SGD(layers.parameters()), extra, ALONE, keep=1)
    folder = tmp_path / "folder" / "adapter"
    export_weights(layers, saved, folder)
    fuzz = fuzz_bytes if part == "adapter_model.safetensors" else fuzz_document
    fuzz(Place(folder), folder / part, lambda: adapt(net(), weights=str(folder)))


@pytest.mark.parametrize("part", ["layer_times", "layer_sizes", "intra_node_bandwidths", "multizone_bandwidths_het"])
def test_profiles_of_sailor(tmp_path: Path, part: str) -> None:
    write_sailor(tmp_path)
    options = ImportOptions(model="net", nodes="2xfastx2,1xslowx4", zone="zone", memory={"fast": 10**9, "slow": 10**8})
    fuzz_document(Place(tmp_path), tmp_path / f"{part}.json", lambda: import_published("sailor", [tmp_path], options))


@pytest.mark.parametrize("part", ["profile/DeviceType.T4_tp1_bs1.json", "clusterfile.json", "hostfile"])
def test_profiles_of_metis(tmp_path: Path, part: str) -> None:
    write_metis(tmp_path)
    keys = ("instance_type", "inter_bandwidth", "intra_bandwidth", "memory")
    hosts = {"h0": ("A100", 10, 300, 40), "h1": ("T4", 5, 30, 16)}
    (tmp_path / "clusterfile.json").write_text(json.dumps({h: dict(zip(keys, row, strict=True)) for h, row in hosts.items()}))
    (tmp_path / "hostfile").write_text("h0 2\nh1 slots=2\n")
    sources = [tmp_path / name for name in ("profile", "clusterfile.json", "hostfile")]
    fuzz = fuzz_document if part.endswith(".json") else fuzz_bytes
    fuzz(Place(tmp_path), tmp_path / part, lambda: import_published("metis", sources, ImportOptions(model="gpt", **METIS)))


def test_profiles_of_fasop(tmp_path: Path) -> None:
    write_fasop(tmp_path)
    links = {kind: Link(bandwidth=2e11) for kind in ("A100", "A10")}
    options = ImportOptions(model="net", nodes="1xA100x4,1xA10x2", link=Link(bandwidth=5e9), inside=links, **FASOP_SIZES)
    assert len(np.load(tmp_path / "net_A100_1.npy")) == 4
    fuzz_bytes(Place(tmp_path), tmp_path / "net_A100_1.npy", lambda: import_published("fasop", [tmp_path], options))


@pytest.mark.parametrize("part", ["model_latencies", "model_stats", "cluster_info"])
def test_profiles_of_zorse(tmp_path: Path, part: str) -> None:
    write_zorse(tmp_path)
    options = ImportOptions(model="net", **ZORSE_SIZES)
    fuzz_document(Place(tmp_path), tmp_path / f"{part}.json", lambda: import_published("zorse", [tmp_path], options))
