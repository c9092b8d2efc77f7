"""What a device that works without a pause is measured as, by devices whose clock is their own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hetpipe.layers.model import LOSSES, Loss, Model
from hetpipe.measuring.confirm import differs, glance
from hetpipe.measuring.layer_run import LayerRun, busy_factor, turn_seconds
from hetpipe.measuring.profiler import measure_device
from hetpipe.spec.profile import Measurement

CPU, SIZES = torch.device("cpu"), (1, 2)


class Device(nn.Module):
    """A layer that takes 3 ms each way of a device whose clock it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.now, self.turns = nn.Linear(4, 4), 0.0, 1

    def pause(self, _: float) -> None:
        self.now += 0.05

    def work(self) -> None:
        self.now += 0.003

    def works(self, *given: Tensor) -> None:
        for _ in range(self.turns):
            self.work()

    def forward(self, x: Tensor) -> Tensor:
        self.works()
        output: Tensor = self.linear(x)
        output.register_hook(self.works)
        return output


class Quota(Device):
    """A processor that may be used for 20 of every 100 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.period = 0.0, 0

    def work(self, seconds: float = 0.003) -> None:
        while seconds > 0:
            if int(self.now * 10 + 1e-9) > self.period:
                self.used, self.period = 0.0, int(self.now * 10 + 1e-9)
            part = min(seconds, 0.02 - self.used)
            self.used, self.now, seconds = self.used + part, self.now + part, seconds - part
            if self.used >= 0.02 - 1e-9:
                self.now = (self.period + 1) / 10


class Cold(Device):
    """After a pause it takes twice as long: its caches are cold."""

    cold = False

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        self.cold = True

    def work(self) -> None:
        self.now += 0.003 if self.cold else 0.0015
        self.cold = False


class Head(nn.Module):
    """A small layer behind one that has a quota; after a pause it takes eight times as long, forward."""

    def __init__(self, body: Quota) -> None:
        super().__init__()
        self.body, self.left = [body], body.now  # (in a list, it is no part of this layer)

    def forward(self, x: Tensor) -> Tensor:
        (body,) = self.body
        for _ in range(8 if body.now - self.left > 0.04 else 1):
            body.work(0.0001)
        self.left = body.now
        return x * 1.0


def measured(monkeypatch: pytest.MonkeyPatch, layer: Device, *more: nn.Module) -> tuple[Model, Measurement]:
    monkeypatch.setattr("hetpipe.measuring.profiler.time", SimpleNamespace(sleep=layer.pause))
    monkeypatch.setattr("hetpipe.measuring.layer_run.time", SimpleNamespace(monotonic=lambda: layer.now, sleep=layer.pause))
    monkeypatch.setattr("hetpipe.layers.device.time", SimpleNamespace(perf_counter=lambda: layer.now))
    loss = Loss(function=LOSSES["mse"])
    model = Model(name="m", layers=nn.Sequential(layer, *more), inputs=torch.ones(2, 4), targets=torch.zeros(2, 4), loss=loss)
    return model, measure_device(model, "cpu-n1", CPU, SIZES, torch.optim.SGD).measurement


def test_a_device_with_a_quota_is_planned_as_it_works_without_a_pause(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its layers one by one, with pauses, never use the quota up: hosts of 0.8 and 0.2 processors seemed equal."""
    layer = Quota()
    _, found = measured(monkeypatch, layer)
    (one, two), (back, _) = found.forward_seconds, found.backward_seconds
    assert one[0] + back[0] == pytest.approx(0.006 * 5, rel=0.2)
    assert one == pytest.approx(two)
    assert "note: 'cpu-n1' takes 4.8 times as long when it works without a pause" in capfd.readouterr().err
    run = LayerRun(layer, (torch.ones(2, 4),), None)
    assert busy_factor(run, 0.029, CPU) == 1
    assert busy_factor(run, 0.02, CPU) > 1.15


def test_a_quota_counts_where_it_stops_a_turn_beside_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What receives and copies beside the layers uses the quota, too, and may be what it stops."""
    layer = Quota()
    monkeypatch.setattr("hetpipe.measuring.layer_run.time", SimpleNamespace(monotonic=lambda: layer.now, sleep=layer.pause))
    monkeypatch.setattr("hetpipe.layers.device.time", SimpleNamespace(perf_counter=lambda: layer.now))

    class Slow(LayerRun):
        def receive(self) -> None:
            layer.works()
            super().receive()

    assert busy_factor(Slow(layer, (torch.ones(2, 4),), None), 0.006, CPU) == pytest.approx(5, rel=0.1)


def test_a_small_last_layer_does_not_hide_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an MLP, whose caches are cold after a pause, was no slower without, and a step took twice as long as predicted."""
    layer = Quota()
    _, found = measured(monkeypatch, layer, Head(layer))
    assert found.forward_seconds[0][0] + found.backward_seconds[0][0] == pytest.approx(0.006 * 5, rel=0.2)


@pytest.mark.parametrize("layer", [Device(), Quota(), Cold()], ids=["plain", "quota", "cold"])
def test_a_device_that_is_as_it_was_is_found_so(monkeypatch: pytest.MonkeyPatch, layer: Device) -> None:
    """A look without pauses found one that is faster without them half as slow, and had it measured again at every start."""
    model, found = measured(monkeypatch, layer)
    seen = glance(model, found, CPU)
    assert not differs(seen.then, seen.least, seen.median)
    assert seen.median == pytest.approx(seen.then, rel=0.05)
    layer.turns = 2
    slower = glance(model, found, CPU)
    assert differs(slower.then, slower.least, slower.median)


class Copying(nn.Module):
    """Takes what a device takes, and works in place."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = [device]

    def forward(self, x: Tensor) -> Tensor:
        (device,) = self.device
        output: Tensor = device(x).add_(1)
        return output


def test_a_card_is_waited_for_once_for_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer whose work takes 3 ms each way on a card that takes 10 ms to be waited for, and 1 ms to copy inputs."""
    layer, waits = Device(), list[float]()

    class Watch:
        def __init__(self, _: torch.device) -> None: ...

        def measure(self, action: Callable[[], object]) -> float:
            began = layer.now
            action()
            layer.now += 0.010
            waits.append(layer.now)
            return layer.now - began

    class Run(LayerRun):
        def receive(self) -> None:
            layer.now += 0.001
            super().receive()

    monkeypatch.setattr("hetpipe.measuring.layer_run.Stopwatch", Watch)
    monkeypatch.setattr("hetpipe.measuring.layer_run.TURNS_SECONDS", 0.5)
    run = Run(Copying(layer), (torch.ones(2, 4, requires_grad=True),), None)
    forward, backward = turn_seconds(run, torch.device("cuda", 0))
    assert [forward, backward] == pytest.approx([0.003, 0.003])
    assert (len(waits), run.outputs) == (4, [])
