"""`hetpipe.auto`: measured, planned and wrapped in one call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.reference import ReferenceEngine
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.layers.model import Loss, mse, select
from hetpipe.processes.ranks.launch import start_ranks
from tests.support.nets import batch, build
from tests.support.programs import automatic


def unequal() -> Cluster:
    """One fast and two slow emulated devices."""
    return Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {
                "fast": {"memory": "1 GiB", "emulate": {"slowdown": 4}},
                "slow": {"memory": "1 GiB", "emulate": {"slowdown": 12}},
            },
            "nodes": [{"name": "box", "devices": {"fast": 1, "slow": 2}}],
        },
        "test cluster",
    )


def test_three_lines_train_as_one_device_would(tmp_path: Path) -> None:
    cluster = unequal()
    found = start_ranks(automatic, (cluster, str(tmp_path)), cluster.devices)
    assert [result["unused"] for result in found] == [  # the slow ones hold no layer
        None,
        *(f"rank {rank} is not used: the plan is faster without device box/{rank}" for rank in (1, 2)),
    ]
    model, (inputs, targets) = build("blocks"), batch("blocks", 16, 0)
    engine = ReferenceEngine(model, Loss(function=mse))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.2)
    losses = []
    for rows in (slice(16), slice(16), slice(9)):
        losses.append(engine.step(select(inputs, rows), select(targets, rows)))
        optimizer.step()
    assert {name for result in found for name in result["state"]} == set(model.state_dict())
    for result in found:
        assert result["devices"] == ("box/0", "box/1", "box/2")
        assert result["losses"] == pytest.approx(losses, abs=1e-10)
        for name, value in result["state"].items():
            assert torch.allclose(value, model.state_dict()[name], rtol=0, atol=1e-10), name
    whole, *others = [result["whole"] for result in found]
    assert others == [None, None]
    assert list(whole) == list(model.state_dict())
    assert all(torch.allclose(value, model.state_dict()[name], rtol=0, atol=1e-10) for name, value in whole.items())
    for kept in (tmp_path / ".hetpipe/profiles").iterdir():  # one for each cluster
        assert {m.device_type for m in Profile.load(kept).measurements} == {"fast", "slow"}
