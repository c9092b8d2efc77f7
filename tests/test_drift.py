"""Whether devices are as fast as before: series of what was measured, drawn and made, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hetpipe.documents.plan import Plan
from hetpipe.documents.profiles.lengths import LengthFactor
from hetpipe.processes.world import alone
from hetpipe.runtime.recorder import Recorder
from hetpipe.training.directing.drift import Drift, Drifts
from tests.support.ranks import make_plan

Series = NDArray[np.float64]
PLAN = make_plan([{"cuts": [4, 3, 3], "sizes": [4, 4]}])  # n0/0, n0/1, n0/2
SECONDS = {"n0/0": 0.5, "n0/1": 1.0, "n0/2": 2.0}  # that are predicted
DAWN = 120  # steps that nothing disturbs
SCATTERS: dict[str, Callable[[np.random.Generator, int], Series]] = {
    "by a tenth": lambda draw, n: 1 + 0.1 * draw.standard_normal(n),
    "by a fifth": lambda draw, n: np.maximum(1 + 0.2 * draw.standard_normal(n), 0.1),
    "by up to a fifth": lambda draw, n: draw.uniform(0.8, 1.2, n),
    "upwards": lambda draw, n: 1 + draw.exponential(0.1, n),
}


class Engine:
    """One process drives all devices; what they measure in each step is given as times of what is predicted."""

    def __init__(self, plan: Plan, ratios: Mapping[str, Series]) -> None:
        self.plan, self.world, self.seats, self.ratios = plan, alone(), plan.seats(), ratios
        self.step, self.numbers = 0, 10

    def computed(self) -> dict[str, Callable[[], float | None]]:
        seconds = {device: SECONDS[device] * float(series[self.step - 1]) for device, series in self.ratios.items()}
        return {device: partial(seconds.get, device) for device in seconds}


def told(ratios: Mapping[str, Series], *, lengths: Sequence[LengthFactor] = (), numbers: Sequence[int] = ()) -> list[Drift]:
    engine: Any = Engine(PLAN, ratios)
    drifts, found, steps = Drifts(engine, SECONDS, lengths), list[Drift](), len(ratios["n0/0"])
    for engine.step in range(1, steps + 1):
        engine.numbers = numbers[engine.step - 1] if numbers else 10
        drifts.stepped(whole=True)
        drift = drifts.look(engine.step, steps - engine.step)
        found += [drift] if drift is not None else []
    return found


def usual(steps: int, seed: int, scatter: str = "by a tenth") -> dict[str, Series]:
    draw = np.random.default_rng(seed)
    return {device: SCATTERS[scatter](draw, steps) for device in PLAN.device_ids}


def changes(found: Sequence[Drift]) -> list[Drift]:
    """Without what is told of the profile."""
    return [drift for drift in found if drift.changed]


@pytest.mark.parametrize("scatter", SCATTERS)
@pytest.mark.parametrize("seed", range(6))
def test_a_device_that_becomes_twice_as_slow_is_told_within_20_steps_and_so_is_its_return(scatter: str, seed: int) -> None:
    """Which one, and by what factor; the others are as fast as they were."""
    device, begin = PLAN.device_ids[seed % 3], DAWN + 7 * seed
    ratios = usual(begin + 60, seed, scatter)
    ratios[device][begin : begin + 40] *= 2
    slow, fast = changes(told(ratios))
    assert (slow.changed, fast.changed) == ((device,), (device,))
    assert slow.step - begin <= 20
    assert fast.step - begin - 40 <= 20
    others = [factor for name, factor in slow.factors.items() if name != device]
    assert slow.factors[device] == pytest.approx(2, abs=0.4)
    assert others == pytest.approx([1, 1], abs=0.2)
    assert fast.factors[device] == pytest.approx(1, abs=0.25)
    assert slow.measured_seconds(device) == pytest.approx(2 * SECONDS[device], rel=0.25)
    assert (slow.predicted_seconds, slow.left) == (SECONDS, begin + 60 - slow.step)


@pytest.mark.parametrize("scatter", SCATTERS)
def test_nothing_is_told_of_devices_that_are_as_fast_as_ever_but_for_spikes_of_some_steps(scatter: str) -> None:
    draw = np.random.default_rng(5)
    for seed in range(3):
        ratios = usual(2000, seed, scatter)
        for device in PLAN.device_ids:
            for at in range(50, 1950, 60):
                ratios[device][at : at + int(draw.integers(1, 7))] *= draw.uniform(2, 30)
        assert changes(told(ratios)) == []


def test_a_third_slower_is_told_when_the_median_of_many_steps_shows_it() -> None:
    for seed in range(4):
        ratios = usual(DAWN + 150, seed)
        ratios["n0/1"][DAWN:] *= 1.3
        (drift,) = changes(told(ratios))
        assert drift.changed == ("n0/1",)
        assert drift.step - DAWN <= 100
        assert drift.factors["n0/1"] == pytest.approx(1.3, abs=0.2)


def test_a_device_that_gets_slower_step_by_step_is_told_each_time_that_it_is_another_fifth_slower() -> None:
    ratios = usual(800, 1)
    ratios["n0/2"] *= np.concatenate([np.ones(DAWN), np.linspace(1, 2, 400), np.full(280, 2.0)])
    found = changes(told(ratios))
    factors = [drift.factors["n0/2"] for drift in found]
    assert {drift.changed for drift in found} == {("n0/2",)}
    assert 2 <= len(found) <= 4
    assert factors == sorted(factors)
    assert factors[-1] == pytest.approx(2, rel=0.2)


def test_devices_that_become_slow_at_once_are_told_at_once() -> None:
    for seed in range(4):
        ratios = usual(DAWN + 60, seed)
        for series in ratios.values():
            series[DAWN:] *= 2
        (drift,) = changes(told(ratios))
        assert set(drift.changed) == set(PLAN.device_ids)


def test_a_profile_that_is_off_from_the_start_is_told_once_and_is_no_drift() -> None:
    ratios = {device: 1 + 0.2 * (series - 1) for device, series in usual(DAWN + 100, 3).items()}
    ratios["n0/0"] *= 1.1
    (off,) = told(ratios)
    assert (off.changed, off.from_start) == ((), True)
    assert off.off["n0/0"] == pytest.approx(1.1, abs=0.02)
    assert off.off["n0/1"] == pytest.approx(1, abs=0.02)
    assert off.measured_seconds("n0/0") == pytest.approx(0.55, rel=0.05)
    ratios["n0/0"][DAWN:] *= 2
    _, drift = told(ratios)
    assert drift.factors["n0/0"] == pytest.approx(2, rel=0.15), "beside what the profile was off"
    assert drift.measured_seconds("n0/0") == pytest.approx(1.1, rel=0.15)


def test_a_device_that_is_twice_as_slow_as_the_profile_says_from_the_start_is_told_as_that() -> None:
    ratios = usual(80, 4)
    ratios["n0/1"] *= 2
    (drift,) = told(ratios)
    assert (drift.changed, drift.from_start) == (("n0/1",), True)
    assert drift.step <= 30
    assert drift.factors["n0/1"] == pytest.approx(2, rel=0.1)
    assert drift.off["n0/1"] == 1.0


def test_steps_of_other_lengths_are_compared_with_their_own_prediction_and_partial_batches_with_none() -> None:
    lengths = (LengthFactor(numbers=10, factor=1.0), LengthFactor(numbers=20, factor=3.0))
    longer = [10 if step < 60 else 20 for step in range(120)]
    ratios = {device: np.array([1.0 if n == 10 else 3.0 for n in longer]) for device in PLAN.device_ids}
    assert told(ratios, lengths=lengths, numbers=longer) == []
    assert [drift.changed for drift in told(ratios, numbers=longer)] == [PLAN.device_ids]
    engine: Any = Engine(PLAN, ratios)
    drifts = Drifts(engine, SECONDS, ())
    for engine.step in range(1, 120):
        drifts.stepped(whole=engine.step < 61)
        assert drifts.look(engine.step, 0) is None


def test_a_gpu_is_not_waited_for() -> None:
    """What it has not come to the end of is looked at later, in its order."""
    engine: Any = Engine(PLAN, {device: np.concatenate([np.ones(60), np.full(60, 2.0)]) for device in PLAN.device_ids})
    plain, done = engine.computed, [0]

    def when_done(step: int, known: Callable[[], float | None]) -> float | None:
        return known() if done[0] >= step else None

    def late() -> dict[str, Callable[[], float | None]]:
        return {device: partial(when_done, engine.step, known) for device, known in plain().items()}

    engine.computed = late
    drifts, found = Drifts(engine, SECONDS, ()), list[int]()
    for engine.step in range(1, 121):
        done[0] = engine.step - 3
        drifts.stepped(whole=True)
        found += [engine.step] if drifts.look(engine.step, 0) is not None else []
    assert len(found) == 1
    assert 70 < found[0] <= 80


class Moment:
    """A CUDA event, as far as a recorder asks it."""

    def __init__(self, milliseconds: float, *, is_over: bool = True) -> None:
        self.milliseconds, self.is_over = milliseconds, is_over

    def query(self) -> bool:
        return self.is_over

    def elapsed_time(self, other: Moment) -> float:
        return other.milliseconds - self.milliseconds


def test_a_recorder_knows_how_long_forwards_and_backwards_took_and_waits_for_no_event() -> None:
    """Of what came behind that step it knows nothing, and of the optimizer it tells nothing."""
    recorder: Any = Recorder(torch.device("cpu"))
    last = Moment(90.0, is_over=False)
    recorder._pending = [("F", 0, Moment(10), Moment(30)), ("B", 0, Moment(50), last), ("optimizer", 0, last, Moment(95))]
    found = recorder.computed()
    recorder.begin_step()
    assert found() is None
    last.is_over = True
    assert found() == pytest.approx(0.06)
    recorder.spans = [("F", 0, 1.0, 1.5), ("B", 0, 2.0, 2.25), ("optimizer", 0, 2.5, 9.0)]
    assert recorder.computed()() == pytest.approx(0.75)
