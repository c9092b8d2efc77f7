"""Profiles that hold measurements at several precisions: chosen in planning, priced in simulation, and by jobs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import hetpipe
from hetpipe import InputError, PartitionError, PlanOptions, make_plan
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job, ProfileSection
from hetpipe.documents.number_types import Precision
from hetpipe.documents.plan import Plan
from hetpipe.documents.precisions import parse_precision, turns
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.torch_named import TorchNamed
from hetpipe.exchange.export import export
from hetpipe.planning import registry
from hetpipe.planning.planner import note_of_precisions
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.show.report import plan_table
from hetpipe.training import session
from hetpipe.training.session import Request, Setting, _emulation, _try_plan
from tests.support.commands import Command
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
            "device_type": kind,
            "precision": precision,
            "microbatch_sizes": [1, 2],
            "forward_seconds": [[t * b] * 4 for b in (1, 2)],
            "backward_seconds": [[2 * t * b] * 4 for b in (1, 2)],
            "optimizer_seconds": [0.0] * 4,
        }
        | ({"saved_bytes_per_sample": [saved[precision]] * 4} if saved else {})
        for kind, times in speed.items()
        for precision, t in times.items()
    ]
    return Profile.parse(document, "the test's profile")


def test_which_one_has_to_be_said() -> None:
    with pytest.raises(InputError, match="'a' at fp32, fp16. Choose with --precision, for example --precision a=fp32, or a"):
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
    with pytest.raises(InputError, match="no measurement of device type 'cpu' at fp16. Measured: fp32, bf16"):
        Job.read(file, ["plan.file=null", "train.precision=fp16", "train.dtype=float32"]).check_files()
    with pytest.raises(InputError, match="unknown key 'precision': write 'train: {precision: {a100: bf16, t4: fp16}}': dev"):
        Job.read(file, ["plan.precision=bf16"])
    with pytest.raises(InputError, match="precision is 'bf16', which needs parameters in float32, but dtype, .*float6"):
        Job.read(file, ["train.precision=bf16", "train.dtype=float64"])
    with pytest.raises(InputError, match="precision is fp32, fp16 or bf16, .* or auto, got 'fp8'"):
        Job.read(file, ["train.precision=fp8", "train.dtype=float32"])
    for said in ("auto", "bf16", "{cpu: fp32}", "null"):
        job = Job.read(file, [f"train.precision={said}", "train.dtype=float32"])
        assert job.check_files() is not None, "the plan of a file says none"
    folder.write("plan.json", folder.read("plan.json") | {"precision": {"cpu": "fp32"}})
    job = Job.read(file)
    cluster, plan = job.check_files(), Plan.load(tmp_path / "plan.json")
    assert cluster is not None
    assert _emulation(cluster, Profile.load(tmp_path / "profile.json"), plan, "n0/1") is not None


def test_a_job_whose_plan_leaves_a_type_unused(tmp_path: Path) -> None:
    """It was refused with the words that a precision is to be chosen for that type, which the plan cannot say."""
    folder = Folder(tmp_path)
    file = folder.ready((3,), [{"cuts": [6], "sizes": [4, 4, 4]}])
    cluster = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    cluster["device_types"]["slow"] = cluster["device_types"]["cpu"]
    cluster["nodes"].append({"name": "n1", "devices": {"slow": 1}})
    folder.write("cluster.yaml", cluster)
    document = folder.read("profile.json")
    document["measurements"] = [
        one | {"device_type": kind, "precision": precision}
        for one in document["measurements"]
        for kind in ("cpu", "slow")
        for precision in ("fp32", "bf16")
    ]
    folder.write("profile.json", document)
    folder.write("plan.json", folder.read("plan.json") | {"precision": {"cpu": "bf16"}})
    for strange in ({"cpuu": "bf16"}, {"cpu": "bf16", "cpuu": "bf16"}):
        folder.write("strange.json", folder.read("plan.json") | {"precision": strange})
        with pytest.raises(InputError, match="its precision names the unknown device type 'cpuu'; did"):
            Job.read(file, ["plan.file=" + str(tmp_path / "strange.json")]).check_files()
    for said in ("null", "auto", "bf16"):
        assert Job.read(file, ["train.dtype=float32", f"train.precision={said}"]).check_files() is not None


def new_plan(own: Profile, cluster: Cluster, said: Any, layers: nn.Module) -> Plan:
    """The plan of a job that trains these layers, on devices that were found."""
    world, model = SimpleNamespace(is_main=True, first=lambda x: x), SimpleNamespace(layers=layers)
    setting = Setting(world=world, cluster=cluster, model=model, found=True)  # type: ignore[arg-type]
    options = PlanOptions().changed({"precision": said, "partitioner": "even"})
    request = Request(global_batch=8, options=options, profiler=ProfileSection(), optimizer=TorchNamed(name="SGD"))
    return session.new_plan(setting, own, request)


@pytest.mark.parametrize("said", [None, {"a": "fp16"}])
def test_types_of_which_a_job_says_nothing_compute_in_fp32(said: Any) -> None:
    """Jobs by a profile of several precisions were told to choose one, as `hetpipe plan` asks."""
    optimizer, sizes = TorchNamed(name="SGD"), ProfileSection()
    options = PlanOptions().changed({"precision": said, "partitioner": "even"})
    found = _try_plan(profile(), CLUSTER, Request(global_batch=8, options=options, profiler=sizes, optimizer=optimizer))
    assert isinstance(found, Plan)
    assert found.precision == {"a": "fp32", "b": "fp32", **(said or {})}


@pytest.mark.parametrize(
    ("said", "fast", "found"),
    [
        ("auto", 4.0, {"cpu-n0": "bf16", "cpu-n1": "bf16"}),
        ("auto", 0.5, {"cpu-n0": "fp32", "cpu-n1": "fp32"}),
        ({"cpu-n1": "bf16"}, 4.0, {"cpu-n0": "fp32", "cpu-n1": "bf16"}),
    ],
)
def test_hosts_that_are_planned_as_one_type_compute_as_planned(said: Any, fast: float, found: dict[str, str]) -> None:
    """The plan named the one type only, so that all other hosts trained in float32; and a host could not be named."""
    times: dict[Precision, float] = {"fp32": 2.0, "bf16": 2.0 / fast}
    own = profile(speed={"cpu-n0": times, "cpu-n1": times})
    cluster = make_cluster([{"cpu-n0": 1}, {"cpu-n1": 1}], memory=10_000)
    assert new_plan(own, cluster, said, nn.Linear(1, 1)).precision == found


def test_auto_is_half_precision_where_frozen_parameters_are_held_in_it() -> None:
    """A type that is faster in fp32 was planned for that, and the plan refused, as its parameters would have to be float32."""
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).bfloat16().requires_grad_(False))
    assert new_plan(profile(), CLUSTER, "auto", layers).precision == {"a": "fp16", "b": "bf16"}
    assert new_plan(profile(), CLUSTER, "auto", layers.float()).precision == {"a": "fp16", "b": "fp32"}


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


SAVED = {"fp32": 400, "fp16": 100, "bf16": 100}  # bytes that a layer saves, of a sample
TOLD = "no plan fits at the fastest precisions; this one computes in fp16 on 'a' in place of fp32"
PASCAL: dict[str, dict[Precision, float]] = {"a": {"fp32": 2.0, "fp16": 2.1}, "b": {"fp32": 3.0, "fp16": 6.0}}


class TestShortOfMemory:
    """Where no plan fits at the fastest precisions. `auto` said that nothing fits."""

    @pytest.mark.parametrize(
        ("memory", "found"),
        [
            (10_000, {"a": "fp32", "b": "fp32"}),
            ({"a": 1_600, "b": 10_000}, {"a": "fp16", "b": "fp32"}),
            ({"a": 1_600, "b": 1_600}, {"a": "fp16", "b": "fp16"}),
        ],
    )
    def test_types_change_one_after_the_other(self, memory: Any, found: dict[str, str]) -> None:
        cluster, own = make_cluster([{"a": 1, "b": 1}], memory=memory), profile(SAVED, PASCAL)
        plan = make_plan(own, cluster, 4, precision="auto", partitioner="even", allow_recompute=False, memory_reserve=0.0)
        assert plan.precision == found
        told = note_of_precisions(plan, own, cluster, PlanOptions(precision="auto"))
        if found == {"a": "fp32", "b": "fp32"}:
            assert told is None
        else:
            assert str(told).startswith(TOLD)
        assert note_of_precisions(plan, own, cluster, PlanOptions().changed({"precision": found})) is None

    def test_nothing_fits_at_any(self) -> None:
        tiny = {name: kind.model_copy(update={"memory": 300}) for name, kind in CLUSTER.device_types.items()}
        with pytest.raises(PartitionError, match="are missing") as caught:
            make_plan(profile(SAVED, PASCAL), CLUSTER.model_copy(update={"device_types": tiny}), 4, precision="auto")
        assert caught.value.missing_bytes is not None

    def test_a_price_or_a_deadline_changes_none(self) -> None:
        asked: list[object] = []

        class Dear:
            name = "dear"

            def __call__(self, problem: Any) -> Any:
                asked.append(problem.profile.precisions("a"))
                raise PartitionError("too dear")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "partitioner", lambda _: Dear())
            with pytest.raises(PartitionError, match="too dear"):
                make_plan(profile(SAVED, PASCAL), CLUSTER, 4, precision="auto")
        assert asked == [("fp32",)]

    def test_what_may_take_fewer_bytes(self) -> None:
        """fp32 where few samples leave less than copies of weights in fp16 take, and not where fp16 takes less anyway."""
        fast: dict[str, dict[Precision, float]] = {"a": {"fp32": 4.0, "fp16": 1.0, "bf16": 1.0}, "b": {"fp32": 2.0, "fp16": 1.0}}
        own = profile(SAVED, fast)
        chosen = turns("auto", own, CLUSTER)
        assert chosen == [{"a": "bf16", "b": "fp16"}]
        copies = {"cast_bytes": (1000,) * 4}
        casting = [m if m.precision == "fp32" else m.model_copy(update=copies) for m in own.measurements]
        chosen = turns("auto", own.model_copy(update={"measurements": tuple(casting)}), CLUSTER)
        assert chosen == [{"a": "bf16", "b": "fp16"}, {"a": "bf16", "b": "fp32"}, {"a": "fp32", "b": "fp32"}]

    def test_the_command_says_so(self, run: Command, tmp_path: Path) -> None:
        profile(SAVED, PASCAL).save(tmp_path / "profile.json")
        make_cluster([{"a": 1, "b": 1}], memory={"a": 1_600, "b": 10_000}).save(tmp_path / "cluster.yaml")
        files = ("--profile", tmp_path / "profile.json", "--cluster", tmp_path / "cluster.yaml", "--global-batch", 4)
        ended = run("plan", *files, "--precision", "auto", "--partitioner", "even", "--no-recompute", "--json")
        assert json.loads(ended.out)["precision"] == {"a": "fp16", "b": "fp32"}, ended.err
        assert f"note: {TOLD}, which takes fewer bytes" in ended.err


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
    with pytest.raises(InputError, match="'a' at bf16. Measured: fp32, fp16. Choose a .* 'hetpipe profile --precision a=bf16'"):
        make_plan(profile(), CLUSTER, 8, precision="bf16")
    with pytest.raises(InputError, match="unknown device type 'c'"):
        make_plan(profile(), CLUSTER, 8, precision={"c": "fp16"})
    with pytest.raises(InputError, match="at fp32, fp16, bf16. Choose"):
        make_plan(profile(), CLUSTER, 8, precision={"a": "fp16"})
    with pytest.raises(InputError, match="precision is fp32, fp16 or bf16, .* or auto, got 'fp8'"):
        PlanOptions().changed({"precision": {"a": "fp8"}})
    with pytest.raises(InputError, match=r"Measured: a precision that is not said"):
        make_plan(make_profile({"a": [1.0], "b": [1.0]}), CLUSTER, 2, precision="fp16")
    plain = make_profile({"a": [1.0], "b": [1.0]})
    nothing = make_plan(plain, CLUSTER, 2, precision="auto")
    assert nothing.precision is None
    told = str(note_of_precisions(nothing, plain, CLUSTER, PlanOptions(precision="auto")))
    assert "does not say at which precision it was measured, so 'auto' chooses none; 'hetpipe profile --precision auto'" in told


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
    with pytest.raises(InputError, match="'a=fp16,auto': expected each device type once, as in 'T4=fp16"):
        parse_precision("a=fp16,auto")


def test_wrap_refuses_precisions_that_nobody_can_tell() -> None:
    plan = make_plan(profile(), CLUSTER, 8, precision="auto", partitioner="even")
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for wrong, told in (
        ("auto", r"known once it is measured: hetpipe.auto\(…, precision='auto'\) does that"),
        ({"a": "fp16", "b": "fp32"}, "by their types, which only a cluster tells: give hetpipe.wrap the cluster"),
        ({"a": "fp16"}, "only a cluster tells: give hetpipe.wrap the cluster, or one precision for all devices, such as 'bf16'"),
        (None, "by their types, which only a cluster tells"),
    ):
        with pytest.raises(InputError, match=told):
            hetpipe.wrap(model, plan, torch.zeros(8, 2), nn.functional.mse_loss, precision=wrong)  # type: ignore[arg-type]
    machine = make_cluster([{"a": 1}], memory=10_000)
    alone = make_plan(profile(), machine, 8, precision="fp16", partitioner="even")
    strange = alone.model_copy(update={"precision": {"c": "bf16"}})
    with pytest.raises(InputError, match="does not fit.*\n.*its precision names the unknown device type 'c'; known: a"):
        hetpipe.wrap(model, strange, torch.zeros(8, 2), nn.functional.mse_loss, cluster=machine)
    with pytest.raises(InputError, match="the plan computes in fp16 on 'any', .*, but parameters are float64: train them in fl"):
        hetpipe.wrap(model.double(), alone, torch.zeros(8, 2).double(), nn.functional.mse_loss)
