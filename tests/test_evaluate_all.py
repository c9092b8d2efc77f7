"""Evaluation of a loader in a loop of one's own: one number, whatever its batches, on every rank of any plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetpipe
from hetpipe.files.messages import InputError
from hetpipe.processes.world import World
from tests.support.ranks import cluster_of, make_plan, run_ranks

SAMPLES = 45
ROWS: dict[str, tuple[tuple[int, ...], Any]] = {
    "unequal replicas": ((2, 1), ({"cuts": [2, 1], "sizes": [3, 2]}, {"cuts": [3], "sizes": [2]})),
    "three in a row": ((3,), ({"cuts": [1, 1, 1], "sizes": [3, 3, 1]},)),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(4, (SAMPLES,), generator=generator)
    return torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64), labels.where(torch.arange(SAMPLES) % 5 > 0, -100)


def hits(output: Any, targets: Any) -> tuple[int, int]:
    return int((output.argmax(-1) == targets).sum()), int((targets != -100).sum())


def evaluated(world: World, plan: hetpipe.Plan) -> Any:
    inputs, labels = data()
    engine = hetpipe.wrap(net(), plan, inputs[:3], F.cross_entropy, loss_weight="tokens")
    found = [tuple(engine.evaluate_all(DataLoader(TensorDataset(inputs, labels), size), hits)) for size in (7, 4, 45, 20)]
    words = []
    for loader in ([(inputs, labels)][: world.rank], [(inputs[: 5 + world.rank], labels[: 5 + world.rank])], []):
        with pytest.raises(InputError) as refused:
            engine.evaluate_all(loader)
        words.append(str(refused.value))
    return found, words, engine.evaluate_all([(inputs, labels)]).metric


@pytest.mark.parametrize("name", list(ROWS))
def test_a_loader_of_any_batches_has_one_evaluation(name: str) -> None:
    counts, rows = ROWS[name]
    (inputs, labels), model = data(), net().eval()
    output = model(inputs)
    truth, right = F.cross_entropy(output, labels).item(), hits(output, labels)
    for found, words, without in run_ranks(evaluated, cluster_of(*counts), make_plan(rows)):
        for each in found:
            assert each == pytest.approx((truth, right[0] / right[1], 36, 36), abs=1e-12)
        assert without is None
        assert words[0].startswith("batch 1 of the loader has other numbers of samples on other ranks (rank 0: 0, rank 1: 45,")
        assert "(rank 0: 5, rank 1: 6, rank 2: 7; 0: there is none). Give every rank a loader of the same" in words[1]
        assert words[2] == "the loader gives no batches, so there is nothing to evaluate"
