"""Samples of other lengths from step to step: what is measured of them, and how an emulated device is paced by it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from hetpipe.documents.job import ProfileSection
from hetpipe.documents.profiles.lengths import LengthFactor
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.layers.device import Emulation
from hetpipe.layers.model import Loss, Model, ShapedBatch, cross_entropy
from hetpipe.measuring import confirm, profiler
from hetpipe.measuring.cache import cache_path
from hetpipe.measuring.layer_run import LayerRun
from hetpipe.measuring.profiler import measure_device, profile_model
from hetpipe.predict.timeline import Timeline
from hetpipe.training.results.table import train_table
from hetpipe.training.runlog import WARMUP_STEPS, TrainResult
from tests.support.blocks import LENGTH
from tests.support.nets import batch, build
from tests.support.ranks import cluster_of

SHARES = {4: 0.5, 2: 0.25}  # of shorter samples; the others have LENGTH


def model(shares: dict[int, float]) -> Model:
    inputs, targets = batch("tied", 3, 0)
    shorter = tuple(ShapedBatch(inputs[:, :n], targets[:, :n], share) for n, share in shares.items())  # type: ignore[call-overload]
    return Model(
        name="tied",
        layers=build("tied"),
        inputs=inputs,
        targets=targets,
        shorter=shorter,
        loss=Loss(function=cross_entropy, weight="tokens"),
    )


def by_length(run: LayerRun, *_: Any) -> list[tuple[float, float]]:
    """A forward takes the square of a length, a backward twice as long."""
    rows, length = run.inputs[0].shape[:2]
    return [(rows * length**2 / 1e3, 2 * rows * length**2 / 1e3)] * 3


def test_seconds_are_means_over_all_steps_and_bytes_those_of_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "time_layer", by_length)
    monkeypatch.setattr(profiler, "stretch_of", lambda _: 1.0)
    profile = profile_model(model(SHARES), device_type="cpu", microbatch_sizes=[1, 2])
    mean = 0.25 * LENGTH**2 + 0.5 * 4**2 + 0.25 * 2**2
    (measured,) = profile.measurements
    assert measured.forward.tolist() == [pytest.approx([rows * mean / 1e3] * 10) for rows in (1, 2)]
    assert measured.backward.tolist() == [pytest.approx([2 * rows * mean / 1e3] * 10) for rows in (1, 2)]
    assert profile.lengths is not None
    assert [x.numbers for x in profile.lengths] == [2, 4, LENGTH]
    assert [x.factor for x in profile.lengths] == pytest.approx([n**2 / mean for n in (2, 4, LENGTH)])
    alike = profile_model(model({}), device_type="cpu", microbatch_sizes=[1, 2])
    assert alike.lengths is None
    assert alike.layers == profile.layers
    assert alike.measurements[0].forward[0].tolist() == pytest.approx([LENGTH**2 / 1e3] * 10)


def test_what_an_emulated_device_runs_is_no_longer_than_what_it_is_paced_by(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[int]()

    def timed(run: LayerRun, *rest: Any) -> list[tuple[float, float]]:
        seen.add(run.inputs[0].shape[1])
        return by_length(run, *rest)

    monkeypatch.setattr(profiler, "time_layer", timed)
    rows = ((1.0,) * 10,)
    host = Measurement(
        device_type="host", microbatch_sizes=(1,), forward_seconds=rows, backward_seconds=rows, optimizer_seconds=(0.0,) * 10
    )
    paced = Emulation(slowdown=2.0, host=host, memory_bytes=1 << 30)
    measure_device(model(SHARES), "p40", torch.device("cpu"), [1], torch.optim.SGD, emulation=paced)
    assert seen == {2}


def test_a_glance_looks_at_the_same_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "time_layer", by_length)
    monkeypatch.setattr(confirm, "time_layer", by_length)
    for module in (profiler, confirm):
        monkeypatch.setattr(module, "stretch_of", lambda _: 1.0)
    profile = profile_model(model(SHARES), device_type="cpu", microbatch_sizes=[1, 2])
    seen = confirm.glance(model(SHARES), profile.measurements[0], torch.device("cpu"))
    assert seen.median == pytest.approx(seen.then)


def test_an_emulated_step_lasts_as_its_length_does() -> None:
    rows = ((1.0, 2.0),)
    host = Measurement(
        device_type="host", microbatch_sizes=(1,), forward_seconds=rows, backward_seconds=rows, optimizer_seconds=(0.5, 0.5)
    )
    lengths = [LengthFactor(numbers=2, factor=0.5), LengthFactor(numbers=6, factor=2.5)]
    paced = Emulation(slowdown=3.0, host=host, memory_bytes=1 << 30, lengths=lengths)
    assert paced.seconds("F", 0, 2, 1) == 9.0
    assert [paced.seconds("F", 0, 2, 1, numbers=n) for n in (1, 2, 4, 6, 9)] == [4.5, 4.5, 13.5, 22.5, 22.5]
    assert paced.seconds("optimizer", 0, 2, 1, numbers=2) == 3.0


def test_a_profile_of_other_lengths_is_another() -> None:
    paths = {cache_path(model(shares), cluster_of(1), ProfileSection(), "AdamW") for shares in ({}, SHARES, {4: 0.5})}
    assert len(paths) == 3


def test_measured_and_predicted_seconds_are_of_the_same_steps() -> None:
    """Steps of 4 numbers take 1 s, and one of them that something held up 9 s; one of 8 numbers takes 4 s. Predicted are 2 s in
    the mean of an epoch, in which lengths come as often as not: here three of four steps are short."""
    seconds, numbers = [9.0] * WARMUP_STEPS + [1.0, 1.0, 9.0, 4.0], [8] * WARMUP_STEPS + [4, 4, 4, 8]
    lengths = (LengthFactor(numbers=4, factor=0.5), LengthFactor(numbers=8, factor=1.5))
    predicted = Timeline(spans=(), step_seconds=2.0, pipeline_seconds=2.0, sync_seconds=0.0, optimizer_seconds=0.0)
    found = TrainResult(plan=None, step_seconds=seconds, step_numbers=numbers, lengths=lengths, predicted=predicted)
    assert found.usual_step_seconds == (3 * 1.0 + 4.0) / 4
    assert found.predicted_step_seconds == 2.0 * (3 * 0.5 + 1.5) / 4
    assert found.summary()["predicted_step_seconds"] == found.predicted_step_seconds
    said = io.StringIO()
    Console(file=said, width=100).print(train_table(found))
    assert "1.75 s (mean of 4, of 2 lengths)" in said.getvalue()
    assert "1.50 s (of the same lengths, measured +16.7%)" in said.getvalue()
    alike = TrainResult(plan=None, step_seconds=seconds, predicted=predicted)
    assert (alike.usual_step_seconds, alike.predicted_step_seconds) == (2.5, 2.0)
    assert TrainResult(plan=None).usual_step_seconds == 0.0
