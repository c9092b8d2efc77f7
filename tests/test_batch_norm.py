"""BatchNorm and its kin need a choice wherever a model is trained: in a job (`test_build.py`), in `wrap`, and in `auto`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetpipe
from hetpipe.documents.job import BatchNorm
from hetpipe.documents.plan import Backend
from hetpipe.files.messages import InputError
from hetpipe.layers.batch_norm import check_batch_norm, normalises_batches
from hetpipe.layers.model import cross_entropy
from tests.support.ranks import make_plan

PLAN = make_plan([{"cuts": [3], "sizes": [2, 2, 2]}], schedule="gpipe")
CHOOSE = (
    "to accept that, write 'batch_norm: per_microbatch' in the job's model section, or batch_norm=\"per_microbatch\" in "
    "hetpipe.wrap and hetpipe.auto"
)
NEEDS = (
    "the model has BatchNorm (first: '1'), which normalises every micro-batch by its own statistics, so gradients differ from "
    f"those of one device with the whole batch; {CHOOSE}"
)


class Running(nn.Module):
    """A norm of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(3))


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one, and its end."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def net(*norms: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *(norms or (nn.BatchNorm1d(4),)), nn.Linear(4, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("module", "in_training", "in_evaluation"),
    [
        (nn.BatchNorm2d(3), True, False),
        (nn.LazyBatchNorm1d(), True, False),
        (nn.SyncBatchNorm(3), True, False),
        (nn.BatchNorm1d(3, track_running_stats=False), True, True),  # normalises by the batch in either mode
        (nn.InstanceNorm1d(3), False, False),
        (nn.InstanceNorm1d(3, track_running_stats=True), True, False),
        (Running(), True, False),
        (nn.GroupNorm(1, 3), False, False),
        (nn.LayerNorm(3), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_what_couples_the_samples_of_a_batch(module: nn.Module, in_training: bool, in_evaluation: bool) -> None:
    assert normalises_batches(module.train()) is in_training
    assert normalises_batches(module.eval()) is in_evaluation


def refused(layers: nn.Sequential, choice: Any, **more: bool) -> str:
    with pytest.raises(InputError) as caught:
        check_batch_norm(layers, choice, **more)
    return str(caught.value)


def test_messages() -> None:
    assert refused(net(), None) == NEEDS
    assert refused(net(nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True))), None) == (
        "the model has running statistics (first: those of '1.0', InstanceNorm1d), which count every micro-batch as a batch, so "
        f"they differ from those of one device with the whole batch; {CHOOSE}"
    )
    for choice in (None, "per_microbatch"):
        assert refused(net(nn.SyncBatchNorm(4)), choice).startswith("layer '1' is a SyncBatchNorm, which waits for all ranks in ")
    assert "deferred needs the fairscale or torchgpipe back end" in refused(net(), "deferred")
    assert refused(net(Running()), "deferred", whole_replicas=True) == (
        "batch_norm: deferred gathers the statistics of BatchNorm, and '1' is a Running: choose per_microbatch"
    )
    assert "unknown batch_norm 'defered'; did you mean 'deferred'?" in refused(net(), "defered")
    check_batch_norm(net(), "deferred", whole_replicas=True)
    check_batch_norm(net(Running()), "per_microbatch")
    check_batch_norm(net().eval(), None)
    check_batch_norm(net(nn.SyncBatchNorm(4).eval()), None)


@pytest.mark.parametrize("backend", ["torch", "torchgpipe"])
def test_wrap_wants_a_choice(alone: None, backend: Backend) -> None:
    """It trained to a loss of 1.28 where one device has 1.36, without a word."""
    inputs, targets = data()

    def wrapped(choice: BatchNorm | None, model: nn.Sequential) -> Any:
        return hetpipe.wrap(model, PLAN, inputs, cross_entropy, batch_norm=choice, backend=backend)

    with pytest.raises(InputError) as caught:
        wrapped(None, net())
    assert str(caught.value) == NEEDS
    model = net()
    parts = [float(cross_entropy(model(x), y).detach()) for x, y in zip(inputs.split(2), targets.split(2), strict=True)]
    engine = wrapped("per_microbatch", net())
    assert engine.step(inputs, targets) == pytest.approx(sum(parts) / 3, rel=1e-6)
    engine.close()
    thawed = net().eval()
    truth = float(cross_entropy(thawed(inputs), targets).detach())
    engine = wrapped(None, thawed)
    assert engine.step(inputs, targets) == pytest.approx(truth, rel=1e-6)
    thawed.train()
    with pytest.raises(InputError, match=r"^replica 0: the model has BatchNorm \(first: '1'\)"):
        engine.step(inputs, targets)
    assert engine.evaluate(inputs, targets).loss > 0
    engine.close()


def test_auto_wants_a_choice(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.chdir(tmp_path)
    deferred = "batch_norm: deferred needs the fairscale or torchgpipe back end; with torch choose per_microbatch"
    for choice, said in ((None, NEEDS), ("deferred", deferred)):
        with pytest.raises(InputError) as caught:
            hetpipe.auto(net(), data(), cross_entropy, global_batch=6, batch_norm=choice)  # type: ignore[arg-type]
        assert str(caught.value) == said
    assert list(tmp_path.iterdir()) == []
