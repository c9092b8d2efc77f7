"""Profiles that hold measurements at several precisions: chosen in planning, priced in simulation, and by jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import hetpipe
from hetpipe import InputError, PlanOptions, make_plan
from hetpipe.exchange.export import export
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.runtime.backends import check_backend
from hetpipe.show.report import plan_table
from hetpipe.spec.job import Job
from hetpipe.spec.number_types import Precision
from hetpipe.spec.options import parse_precision
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile
from hetpipe.training.session import Setting, _emulation, with_precision
from tests.support.jobs import Folder
from tests.support.strategies import UNHURRIED, make_cluster, make_profile

CLUSTER = make_cluster([{"a": 1, "b": 1}], memory=10_000)
SPEED: dict[str, dict[Precision, float]] = {"a": {"fp32": 4.0, "fp16": 1.0}, "b": {"fp32": 3.0, "fp16": 3.3, "bf16": 9.0}}


def profile(saved: dict[str, int] | None = None, speed: dict[str, dict[Precision, float]] = SPEED) -> Profile:
    """Four layers; `a` is four times as fast in fp16, `b` a little slower. Bytes that a layer saves, by precision."""
    layer = {"parameter_bytes": 100, "output_bytes_per_sample": 10, "saved_bytes_per_sample": 40}
    document = json.loads(make_profile({"a": [1.0] * 4}, sizes=(1, 2), layer=layer).to_json())
    document["measurements"] = [
        {
            "device_type": kind, "precision": precision, "microbatch_sizes": [1, 2],
            "forward_seconds": [[t * b] * 4 for b in (1, 2)], "backward_seconds": [[2 * t * b] * 4 for b in (1, 2)],
            "optimizer_seconds": [0.0] * 4,
        } | ({"saved_bytes_per_sample": [saved[precision]] * 4} if saved else {})
        for kind, times in speed.items()
        for precision, t in times.items()
    ]  # fmt: skip
    return Profile.parse(document, "the test's profile")


def test_which_one_has_to_be_said() -> None:
    with pytest.raises(InputError, match="'a' at fp32, fp16; choose with --precision, for example --precision a=fp32, or a"):
        make_plan(profile(), CLUSTER, 8)


def test_a_job_chooses_among_the_precisions_of_its_profile_or_its_plan_does(tmp_path: Path) -> None:
    """On emulated devices, too. The profile was checked before what the job says was looked at."""
    folder = Folder(tmp_path)
    file = folder.ready((2, 1), slowdown=2.0)
    document = folder.read("profile.json")
    measured = document["measurements"]
    document["measurements"] = [one | {"precision": precision} for one in measured for precision in ("fp32", "bf16")]
    folder.write("profile.json", document)
    assert Job.read(file, ["plan.file=null", "train.precision=bf16", "train.dtype=float32"]).check_files() is not None
    assert Job.read(file, ["plan.file=null"]).check_files() is not None, "which trains in float32"
    with pytest.raises(InputError, match="no measurement of device type 'cpu' at fp16; measured: fp32, bf16"):
        Job.read(file, ["plan.file=null", "train.precision=fp16", "train.dtype=float32"]).check_files()
    with pytest.raises(InputError, match=r"write 'train: \{precision: 'bf16'\}': devices train in what is planned for them"):
        Job.read(file, ["plan.precision=bf16"])
    with pytest.raises(InputError, match="precision is 'bf16', of matrix products of parameters in float32, but dtype, .*float6"):
        Job.read(file, ["train.precision=bf16", "train.dtype=float64"])
    with pytest.raises(InputError, match="precision is fp32, fp16 or bf16, .* or auto, got 'fp8'"):
        Job.read(file, ["train.precision=fp8", "train.dtype=float32"])
    folder.write("plan.json", folder.read("plan.json") | {"precision": {"cpu": "fp32"}})
    job = Job.read(file)
    cluster, plan = job.check_files(), Plan.load(tmp_path / "plan.json")
    assert cluster is not None
    assert _emulation(cluster, Profile.load(tmp_path / "profile.json"), plan, "n0/1") is not None


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("fp32", {"a": "fp32", "b": "fp32"}),
        ("fp16", {"a": "fp16", "b": "fp16"}),
        ("auto", {"a": "fp16", "b": "fp32"}),
        ({"a": "fp32", "b": "bf16"}, {"a": "fp32", "b": "bf16"}),
    ],
)
def test_plans_say_what_they_were_made_for(asked: Any, found: dict[str, str]) -> None:
    plan = make_plan(profile(), CLUSTER, 8, precision=asked, partitioner="even")
    assert plan.precision == found
    again = Plan.parse(json.loads(plan.to_json()), "itself")
    assert again == plan
    assert plan.predicted is not None
    timeline = simulate(again, profile(), CLUSTER)
    assert timeline.step_seconds == plan.predicted.step_seconds
    held = with_footprint(timeline, again, profile(), CLUSTER).memory["n0/0"]
    assert max(most for _, most in held) <= timeline.peak_bytes["n0/0"]
    console = Console(record=True, width=200)
    console.print(plan_table(plan, profile=profile(), cluster=CLUSTER))
    assert f"{found['a']} on a, {found['b']} on b" in console.export_text()
    assert any(f"a precision per device type: the plan has {found['a']} on a" in lost for lost in export(plan, "megatron").lost)


def test_a_device_of_its_own_precision_is_faster() -> None:
    steps = {
        str(asked): simulate(make_plan(profile(), CLUSTER, 16, precision=asked), profile(), CLUSTER).step_seconds
        for asked in ("fp32", "fp16", "auto")
    }
    assert steps["auto"] < steps["fp16"] < steps["fp32"]


def test_saved_bytes_are_those_of_the_precision() -> None:
    own = profile({"fp32": 40, "fp16": 20, "bf16": 20})
    peaks = {
        asked: simulate(make_plan(own, CLUSTER, 8, precision=asked, partitioner="even"), own, CLUSTER).peak_bytes["n0/0"]
        for asked in ("fp32", "fp16")
    }
    assert peaks["fp16"] < peaks["fp32"]


@pytest.mark.parametrize("memory", [1400, 1500, 1800, 2000])
def test_the_exact_search_fits_each_type_by_the_bytes_of_its_own_precision(memory: int) -> None:
    """It took those of the first type for all, so its plan did not fit, or a better one was overlooked."""
    own, cluster = profile({"fp32": 20, "fp16": 60, "bf16": 40}), make_cluster([{"a": 1, "b": 1}], memory=memory)
    found = [
        make_plan(own, cluster, 8, precision={"a": "fp16", "b": "fp32"}, partitioner=name).predicted
        for name in ("auto", "exhaustive")
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].step_seconds == pytest.approx(found[1].step_seconds, rel=1e-9)


@settings(max_examples=25, **UNHURRIED)
@given(st.data())
def test_auto_is_the_best_of_all_choices_without_transfers(data: st.DataObject) -> None:
    """On one device of each type and any times, no choice of precisions makes a shorter plan than `auto`."""
    names: list[Precision] = ["fp32", "fp16"]
    speed = {kind: {name: data.draw(st.floats(0.1, 5.0)) for name in names} for kind in ("a", "b")}
    own = profile(speed=speed)

    def step(asked: Any) -> float:
        found = make_plan(own, CLUSTER, 4, precision=asked, partitioner="exhaustive").predicted
        assert found is not None
        return found.step_seconds

    least = min(step({"a": x, "b": y}) for x in names for y in names)
    assert step("auto") == pytest.approx(least, rel=1e-9)


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="no measurement of device type 'a' at bf16; measured: fp32, fp16"):
        make_plan(profile(), CLUSTER, 8, precision="bf16")
    with pytest.raises(InputError, match="unknown device type 'c'"):
        make_plan(profile(), CLUSTER, 8, precision={"c": "fp16"})
    with pytest.raises(InputError, match="at fp32, fp16, bf16; choose"):
        make_plan(profile(), CLUSTER, 8, precision={"a": "fp16"})
    with pytest.raises(InputError, match="precision is fp32, fp16 or bf16, .* or auto, got 'fp8'"):
        PlanOptions().changed({"precision": {"a": "fp8"}})
    with pytest.raises(InputError, match=r"measured: a precision that is not said"):
        make_plan(make_profile({"a": [1.0], "b": [1.0]}), CLUSTER, 2, precision="fp16")
    plain = make_profile({"a": [1.0], "b": [1.0]})
    assert make_plan(plain, CLUSTER, 2, precision="auto").precision is None


def test_a_profile_holds_each_precision_once() -> None:
    document = json.loads(profile().to_json())
    document["measurements"].append(document["measurements"][0])
    with pytest.raises(InputError, match=r"measurement of 'a' \(tensor_parallel 1, fp32\) is given twice"):
        Profile.parse(document, "the test's profile")


def test_the_command_line() -> None:
    assert parse_precision("fp16") == "fp16"
    assert parse_precision("a=fp16, b=bf16") == {"a": "fp16", "b": "bf16"}
    with pytest.raises(InputError, match="expected each device type once"):
        parse_precision("a=fp16,a=fp32")
    with pytest.raises(InputError, match="expected each device type once"):
        parse_precision("=fp16")


def test_a_plan_says_what_is_trained_unless_a_call_says_another() -> None:
    plan = make_plan(profile(), CLUSTER, 8, precision="auto", partitioner="even")
    check_backend("torch", plan)
    setting = Setting.__new__(Setting)
    object.__setattr__(setting, "cluster", CLUSTER)
    at = PlanOptions().changed
    assert with_precision(plan, setting, PlanOptions()) == plan
    assert with_precision(plan, setting, at({"precision": "auto"})) == plan
    assert with_precision(plan, setting, at({"precision": {"a": "fp16", "b": "fp32"}})) == plan
    with pytest.raises(InputError, match="the plan computes in fp16 on 'a', but precision says bf16: leave precision out, or pl"):
        with_precision(plan, setting, at({"precision": "bf16"}))
    plain = plan.model_copy(update={"precision": None})
    assert with_precision(plain, setting, at({"precision": "auto"})).precision is None, "before anything is measured"
    assert with_precision(plain, setting, at({"precision": "auto"}), profile()).precision == {"a": "fp16", "b": "fp32"}
    assert with_precision(plain, setting, PlanOptions(), profile()).precision == {"a": "fp32", "b": "fp32"}
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for wrong, told in (
        ("auto", r"known once it is measured: hetpipe.auto\(…, precision='auto'\) does that"),
        ({"a": "fp16", "b": "fp32"}, "by their types, which only a cluster tells: give hetpipe.wrap the cluster"),
        (None, "by their types, which only a cluster tells"),
    ):
        with pytest.raises(InputError, match=told):
            hetpipe.wrap(model, plan, torch.zeros(8, 2), nn.functional.mse_loss, precision=wrong)  # type: ignore[arg-type]
    alone = make_plan(profile(), make_cluster([{"a": 1}], memory=10_000), 8, precision="fp16", partitioner="even")
    with pytest.raises(InputError, match="the plan computes in fp16 on 'any', .*, but parameters are float64: train them in fl"):
        hetpipe.wrap(model.double(), alone, torch.zeros(8, 2).double(), nn.functional.mse_loss)
