"""FastSpeed's checkpoint files, damaged or of something else."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.fastspeed.module import load_optimizer, read_checkpoint
from hetpipe.files.messages import InputError
from tests.support import fastspeed_parts as parts


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    net, path = parts.Net(), tmp_path / "Net.pth"
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.zeros(2, 6)).sum().backward()
    optimizer.step()
    state = {"epoch": 4, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path)
    whole = path.read_bytes()
    for content in (b"", b"PK", b"\x80\x02", b"not a zip", whole[:100], whole[:-200], whole[200:]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"cannot read the checkpoint {path}: it is damaged, or it holds more than tensors"):
            read_checkpoint(str(path))
    for zipped in (True, False):
        torch.save(state | {"epoch": Runs(tmp_path / "seen")}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(InputError, match=r"such files could run code, so they are not read"):
            read_checkpoint(str(path))
        path.write_bytes(pickle.dumps(Runs(tmp_path / "seen")))
        with pytest.raises(InputError, match=r"such files could run code, so they are not read"):
            read_checkpoint(str(path))
    assert not (tmp_path / "seen").exists()
    for changes, message in (
        ({"epoch": -1}, "epoch: -1 is no number of epochs"),
        ({"epoch": 2.5}, "epoch: 2.5 is no number of epochs"),
        ({"epoch": 10**30}, "epoch: 1000000000000000000000000000000 is no number of epochs"),
        ({"model": [1]}, "model: it is no mapping of names to tensors"),
        ({"model": {"a": 1}}, "model: it is no mapping of names to tensors"),
        ({"optimizer": {}}, "optimizer: it is no mapping with 'state' and 'param_groups'"),
    ):
        torch.save(state | changes, path)
        with pytest.raises(InputError) as told:
            read_checkpoint(str(path))
        assert str(told.value) == f"{path}: 1 fault(s) in this checkpoint of FastSpeed\n  {message}"


def test_the_state_of_another_optimizer_is_named() -> None:
    net = parts.Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.zeros(2, 6)).sum().backward()
    optimizer.step()
    change: Callable[[Any], object]
    for change, message in (
        (lambda s: s.update(param_groups=[]), "it is not the state of this model's Adam: loaded state dict has a different"),
        (lambda s: s["param_groups"][0].pop("params"), "it is not the state of this model's Adam: 'params'"),
        (lambda s: s["param_groups"][0].update(lr="x"), "  optimizer.param_groups.0.lr: 'x' is no number"),
        (lambda s: s["param_groups"][0].update(betas=(0.9, float("nan"))), "optimizer.param_groups.0.betas"),
        (lambda s: s["state"][0].pop("exp_avg"), "  optimizer.state.0: ['step', 'exp_avg_sq'], the parameter has "),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(7)), "  optimizer.state.1: {'exp_avg': (7,)}, the parameter has "),
    ):
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        with pytest.raises(InputError) as told:
            load_optimizer(torch.optim.Adam(net.parameters()), {"optimizer": state}, "x.pth")
        assert message in str(told.value)
    load_optimizer(torch.optim.Adam(net.parameters()), {"optimizer": optimizer.state_dict()}, "x.pth")
