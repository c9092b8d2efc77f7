"""The recipes of configs/: each job is read with its cluster, its small one is built, and what its comments ask is answered."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hetpipe.building.build import build_data, build_model, check_training
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from tests.support.commands import ROOT, Command

RECIPES = ROOT / "configs" / "recipes"
SMALL = sorted(RECIPES.glob("*-laptop.yaml"))
LARGE = [file.with_name(file.name.replace("-laptop", "")) for file in SMALL]
PAGE = "".join((ROOT / "docs" / "how-to" / name).read_text("utf-8") for name in ("adapters.md", "pictures.md"))


def test_each_has_a_cluster_or_is_a_job_and_stands_on_the_page() -> None:
    jobs = {*SMALL, *LARGE}
    assert len(LARGE) == 7
    for file in RECIPES.glob("*.yaml"):
        if file in jobs:
            assert f"configs/recipes/{file.name}" in PAGE
        else:
            assert Cluster.load(file).device_count > 1


ASKED = [pytest.param(f, marks=pytest.mark.thorough if Job.read(f).model.name == "diffusion" else ()) for f in LARGE]


@pytest.mark.parametrize("file", ASKED, ids=lambda file: file.stem)
def test_a_recipe_fits_its_cards_by_the_estimate_that_it_names(file: Path, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = Job.read(file)
    assert job.read_cluster() is not None
    assert f"configs/recipes/{file.name}" in file.read_text()
    found = re.search(r"hetpipe (what-if .*)", file.read_text())
    assert found is not None
    ended = run(*shlex.split(found[1]), "--time-limit", "0.5")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("file", SMALL, ids=lambda file: file.stem)
def test_its_small_brother_trains_the_same_way(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job, large = Job.read(file), Job.read(file.with_name(file.name.replace("-laptop", "")))
    job.check_files()
    check_training(job)
    assert (job.adapter is None) == (large.adapter is None)
    model = build_model(job, build_data(job))
    counts = [value for key, value in job.model.args.items() if key in ("num_hidden_layers", "num_layers", "num_single_layers")]
    assert len(model.layers) == sum(counts) + 2
    trained = sum(p.numel() for p in model.layers.parameters() if p.requires_grad)
    assert (trained == sum(p.numel() for p in model.layers.parameters())) == (job.adapter is None)
