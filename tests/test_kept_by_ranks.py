"""What ranks keep of a run that loses one of them becomes a checkpoint, if it is all of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from hetpipe.checkpoints.checkpoint import list_checkpoints, load, read_state
from hetpipe.checkpoints.kept import keep, salvage
from hetpipe.processes.world import alone
from hetpipe.runtime.plan_engine import PlanEngine
from tests.support.jobs import STATE

Shape = list[tuple[int, int, int]]  # (rank, its first layer, the one after its last)


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))


def stepped(layers: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def kept_by(folder: Path, step: int, rank: int, lo: int, hi: int, **state: Any) -> None:
    layers = whole()
    stage = nn.Sequential()
    for name, layer in [*layers.named_children()][lo:hi]:
        stage.add_module(name, layer)
    engine = SimpleNamespace(stage=stage, world=SimpleNamespace(rank=rank), layer_range=(lo, hi), layers=layers)
    assert keep(str(folder), step, cast(PlanEngine, engine), stepped(stage), STATE | state)


@pytest.mark.parametrize(
    ("parts", "files"),
    [
        pytest.param([(0, 0, 3), (2, 3, 6)], [1, 3], id="of two ranks"),
        pytest.param([(0, 0, 3), (1, 0, 4), (2, 2, 6), (5, 5, 6)], [2, 3], id="no more than is needed, of layers cut otherwise"),
        pytest.param([(3, 0, 6)], [4], id="of one"),
    ],
)
def test_all_layers_make_a_checkpoint(tmp_path: Path, parts: Shape, files: list[int]) -> None:
    for part in parts:
        kept_by(tmp_path, 7, *part)
    assert salvage(str(tmp_path)) == 7
    (found,) = list_checkpoints(tmp_path)
    assert found.name == "step-00000007"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000007"]
    names = [f"shard-{n:05d}-model-00001-of-00001.safetensors" for n in files]
    assert sorted(path.name for path in found.iterdir()) == [*names, "trainer.json"]
    assert read_state(found).step == 7
    layers, truth = whole(), whole()
    expected = stepped(truth)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    load(found, layers, optimizer, alone(), whole=layers)
    assert all(torch.equal(a, b) for a, b in zip(layers.parameters(), truth.parameters(), strict=True))
    for own, true in zip(layers.parameters(), truth.parameters(), strict=True):
        assert torch.equal(optimizer.state[own]["exp_avg"], expected.state[true]["exp_avg"])
    assert salvage(str(tmp_path)) is None


@pytest.mark.parametrize("parts", [[(0, 0, 3)], [(0, 0, 2), (1, 3, 6)], [(1, 3, 6)]])
def test_what_is_not_all_is_removed(tmp_path: Path, parts: Shape) -> None:
    for part in parts:
        kept_by(tmp_path, 7, *part)
    assert salvage(str(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


def test_the_latest_step_counts_of_which_all_is_there_and_none_that_is_older_than_a_checkpoint(tmp_path: Path) -> None:
    """Some ranks were a step further."""
    kept_by(tmp_path, 8, 0, 0, 3)
    for rank, lo in enumerate((0, 3)):
        kept_by(tmp_path, 7, rank, lo, lo + 3)
    assert salvage(str(tmp_path)) == 7
    kept_by(tmp_path, 6, 0, 0, 6)
    kept_by(tmp_path, 7, 0, 0, 6)
    assert salvage(str(tmp_path)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


@pytest.mark.parametrize("fault", ["cut", "no note", "half a note"])
def test_what_was_not_written_to_its_end_does_not_count(tmp_path: Path, fault: str) -> None:
    kept_by(tmp_path, 7, 0, 0, 6)
    place = tmp_path / "step-00000007.kept"
    part, note = next(place.glob("*.safetensors")), next(place.glob("*.json"))
    if fault == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    elif fault == "no note":
        note.unlink()
    else:
        note.write_text(note.read_text()[:50])
    assert salvage(str(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


def test_the_place_in_a_stream_is_that_of_a_rank_that_reads_it(tmp_path: Path) -> None:
    mark = {"records": 5, "digest": "0" * 32}
    kept_by(tmp_path, 7, 0, 0, 3, stream=None)
    kept_by(tmp_path, 7, 1, 0, 2, stream=mark)
    kept_by(tmp_path, 7, 2, 3, 6, stream=None)
    assert salvage(str(tmp_path)) == 7
    assert '"records": 5' in (tmp_path / "step-00000007" / "trainer.json").read_text()


def test_parameters_that_are_no_numbers_are_not_kept(tmp_path: Path) -> None:
    stage = whole()
    with torch.no_grad():
        next(stage.parameters()).fill_(torch.nan)
    engine = SimpleNamespace(stage=stage, world=SimpleNamespace(rank=0), layer_range=(0, 6), layers=stage)
    assert not keep(str(tmp_path), 7, cast(PlanEngine, engine), stepped(whole()), STATE)
    assert list(tmp_path.iterdir()) == []
