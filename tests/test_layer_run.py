"""What a device that works without a pause is measured as, by devices whose clock is their own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.layers.model import LOSSES, Loss, Model
from hetpipe.measuring.clock import stretch_of
from hetpipe.measuring.confirm import differs, glance
from hetpipe.measuring.layer_run import LayerRun, busy_factor, turn_seconds
from hetpipe.measuring.overhead import Figure, device_overhead
from hetpipe.measuring.profiler import measure_device

CPU, SIZES = torch.device("cpu"), (1, 2)


class Device(nn.Module):
    """A layer that takes 3 ms each way of a device whose clocks it is: of the wall, and of a thread's processor seconds."""

    def __init__(self, seconds: float = 0.003) -> None:
        super().__init__()
        self.linear, self.now, self.processor, self.turns, self.seconds = nn.Linear(4, 4), 0.0, 0.0, 1, seconds

    def pause(self, _: float) -> None:
        self.now += 0.05

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.processor += seconds

    def look(self) -> float:
        """Reading a clock is work, too."""
        self.work(0.001)
        return self.now

    def works(self, *given: Tensor) -> None:
        for _ in range(self.turns):
            self.work(self.seconds)

    def forward(self, x: Tensor) -> Tensor:
        self.works()
        output: Tensor = self.linear(x)
        output.register_hook(self.works)
        return output


class Quota(Device):
    """A processor that may be used for 20 of every 100 ms."""

    def __init__(self, seconds: float = 0.003) -> None:
        super().__init__(seconds)
        self.used, self.period = 0.0, 0

    def work(self, seconds: float) -> None:
        while seconds > 0:
            if int(self.now * 10 + 1e-9) > self.period:
                self.used, self.period = 0.0, int(self.now * 10 + 1e-9)
            part = min(seconds, 0.02 - self.used)
            super().work(part)
            self.used, seconds = self.used + part, seconds - part
            if self.used >= 0.02 - 1e-9:
                self.now = (self.period + 1) / 10


class Cold(Device):
    """After a pause it takes twice as long: its caches are cold."""

    cold = False

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        self.cold = True

    def works(self, *given: Tensor) -> None:
        for _ in range(self.turns):
            self.work(self.seconds if self.cold else self.seconds / 2)
        self.cold = False


class Hot(Device):
    """It takes twice as long where it had no pause: it gets hot."""

    hot = True

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        self.hot = False

    def works(self, *given: Tensor) -> None:
        for _ in range(self.turns):
            self.work(2 * self.seconds if self.hot else self.seconds)
        self.hot = True


class Head(nn.Module):
    """A small layer behind a large one; after a pause it takes eight times as long, forward."""

    def __init__(self, body: Device) -> None:
        super().__init__()
        self.body, self.left = [body], body.now  # (in a list, it is no part of this layer)

    def forward(self, x: Tensor) -> Tensor:
        (body,) = self.body
        for _ in range(8 if body.now - self.left > 0.04 else 1):
            body.work(0.0001)
        self.left = body.now
        return x * 1.0


def clocks(monkeypatch: pytest.MonkeyPatch, layer: Device) -> None:
    """All clocks are the layer's."""
    both = SimpleNamespace(monotonic=layer.look, thread_time=lambda: layer.processor, sleep=layer.pause)
    monkeypatch.setattr("hetpipe.measuring.clock.time", both)
    monkeypatch.setattr("hetpipe.measuring.layer_run.time", SimpleNamespace(monotonic=lambda: layer.now))
    monkeypatch.setattr("hetpipe.layers.device.time", SimpleNamespace(perf_counter=lambda: layer.now))


def model_of(*layers: nn.Module) -> Model:
    loss = Loss(function=LOSSES["mse"])
    return Model(name="m", layers=nn.Sequential(*layers), inputs=torch.ones(2, 4), targets=torch.zeros(2, 4), loss=loss)


def measured(monkeypatch: pytest.MonkeyPatch, layer: Device, *more: nn.Module) -> tuple[Model, Measurement]:
    clocks(monkeypatch, layer)
    model = model_of(layer, *more)
    return model, measure_device(model, "cpu-n1", CPU, SIZES, torch.optim.SGD).measurement


@pytest.mark.parametrize("seconds", [0.003, 0.06], ids=["short", "long"])
def test_a_device_with_a_quota_is_planned_as_it_works_without_a_pause(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seconds: float
) -> None:
    """A short layer by itself, with pauses, never uses the quota up: hosts of 0.8 and 0.2 processors seemed equal. A long one
    does, which hid that the short ones beside it are slower than they seem."""
    layer = Quota(seconds)
    _, found = measured(monkeypatch, layer, Head(layer))
    assert found.forward_seconds[0][0] + found.backward_seconds[0][0] == pytest.approx(5 * 2 * seconds, rel=0.02)
    assert found.forward_seconds[0][1] == pytest.approx(5 * 8 * 0.0001, rel=0.02)
    assert found.forward_seconds[0] == pytest.approx(found.forward_seconds[1])
    assert "note: 'cpu-n1' takes 5.0 times as long when it works without a pause" in capfd.readouterr().err


@pytest.mark.parametrize("small", [False, True])
def test_a_device_that_gets_hot_is_planned_as_slow_as_it_then_is(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    """Also where a small last layer, whose caches are cold after a pause, is no slower without one."""
    layer = Hot()
    _, found = measured(monkeypatch, layer, *([Head(layer)] if small else []))
    assert found.forward_seconds[0][0] + found.backward_seconds[0][0] == pytest.approx(2 * 0.006)


def test_a_turn_as_long_as_a_window_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Hot(0.01)
    clocks(monkeypatch, layer)
    run = LayerRun(layer, (torch.ones(2, 4),), None)
    assert busy_factor(run, 0.2, CPU) == 1
    assert layer.now == 0
    assert busy_factor(run, 0.02, CPU) == pytest.approx(2)


@pytest.mark.parametrize(("device", "stretch", "took"), [(Device(), None, 0.2), (Quota(), 5.0, 0.2 + 3 * 0.5)])
def test_a_processor_without_a_quota_is_found_so_at_once(
    monkeypatch: pytest.MonkeyPatch, device: Device, stretch: float | None, took: float
) -> None:
    clocks(monkeypatch, device)
    assert stretch_of(CPU) == (pytest.approx(stretch, rel=0.02) if stretch else None)
    assert device.now == pytest.approx(took, rel=0.1)


def test_what_the_framework_takes_lasts_longer_under_a_quota_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.measuring.overhead.action_seconds", lambda _: Figure(0.001, 0.25))
    monkeypatch.setattr("hetpipe.measuring.overhead.host_copies", lambda _: {"host_bytes_per_second": Figure(1e9, 0.5)})
    model = model_of(nn.Linear(4, 4))
    found = device_overhead(model, "cpu-n1", CPU, 1, stretch=5.0)
    assert (found.action_seconds, found.host_bytes_per_second) == (0.005, 2e8)
    assert found.relative_spread == {"action_seconds": 0.25, "host_bytes_per_second": 0.5}


def test_a_quota_counts_where_it_stops_a_turn_beside_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What receives and copies beside the layers uses the quota, too, and may be what it stops."""
    layer = Quota()
    clocks(monkeypatch, layer)

    class Slow(LayerRun):
        def receive(self) -> None:
            layer.works()
            super().receive()

    assert busy_factor(Slow(layer, (torch.ones(2, 4),), None), 0.006, CPU) == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize("layer", [Device(), Quota(), Cold(), Hot()], ids=["plain", "quota", "cold", "hot"])
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
