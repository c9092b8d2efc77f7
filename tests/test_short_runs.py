"""Runs in which a device has too little memory: a step is repeated by another plan, or the run ends and says which plan fits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch.distributed as dist
import yaml

from bench.reference import Truth
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.documents.job import Job
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.predict.cost import Costs
from hetpipe.predict.simulator import peak_bytes
from hetpipe.processes.stopping import RunError
from hetpipe.runtime.checks.shortage import Shortage
from hetpipe.runtime.stages.engine import TorchEngine
from hetpipe.training.directing import by_job
from hetpipe.training.directing.by_job import ByJob
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.directing.memory import most_bytes
from hetpipe.training.start import _profile_rank, run_everywhere, train_everywhere
from tests.support.jobs import Folder, train
from tests.support.ranks import make_plan
from tests.support.runs import alone, reference
from tests.support.short_runs import EVALUATION, LAYERS, STATE, Course, pipe_run, short_runs
from tests.support.shortages import Short
from tests.support.strategies import make_cluster, make_profile

FOUR: list[dict[str, Any]] = [{"cuts": [6], "sizes": [1, 1, 1], "devices": [f"n0/{at}"]} for at in range(4)]
TWO_OF_FOUR: list[dict[str, Any]] = [{"cuts": [3, 3], "sizes": [6, 6], "devices": ["n0/3", "n0/1"]}]
THREE_OF_FOUR: list[dict[str, Any]] = [{"cuts": [2, 2, 2], "sizes": [4, 4, 4], "devices": ["n0/0", "n0/1", "n0/2"]}]


class Ran(NamedTuple):
    """What all ranks saw of each run, and the truth."""

    courses: dict[str, list[Course]]
    truth: Truth
    cluster: Path


class Job4(NamedTuple):
    """A job on four devices that this machine plays, which plans for itself, with its 50 samples once in five steps."""

    path: Path
    file: Path

    @classmethod
    def ready(cls, path: Path, **sections: Any) -> Job4:
        section = train(steps=5, scheduler={"name": "StepLR", "step_size": 2, "gamma": 0.5}, evaluate_samples=20)
        more = {"plan": None, "train": section, "log": None, **sections}
        return cls(path, Folder(path).ready((4,), FOUR, slowdown=1.0, memory="200 KiB", **more))

    def plan(self, name: str, rows: list[dict[str, Any]], model: str = "mlp") -> Plan:
        return Plan.load(Folder(self.path).plan(rows, name=name, model=model))

    def saving(self, name: str) -> str:
        return f"checkpoint={json.dumps({'folder': str(self.path / name), 'every_steps': 2})}"

    def run(self, cases: dict[str, tuple[list[str], list[Short], list[Plan]]]) -> Ran:
        """Runs with these settings, in which ranks lack memory, and which go on by these plans or by their own."""
        job = Job.read(self.file)
        given = [(Job.read(self.file, settings), lacks, plans) for settings, lacks, plans in cases.values()]
        found = run_everywhere(job, short_runs, given)
        courses = {name: [own[at] for own in found] for at, name in enumerate(cases)}
        return Ran(courses, reference(self.file), self.path / "cluster.yaml")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    job = Job4.ready(tmp_path_factory.mktemp("short"))
    two, own = job.plan("two.json", TWO_OF_FOUR), [f"plan.file={job.path / 'plan.json'}"]
    three = [f"plan.file={job.path / 'three.json'}"]
    job.plan("three.json", THREE_OF_FOUR)

    return job.run(
        {
            "again": ([], [Short(rank=1, what="F1", step=2, leg=0), Short(rank=0, what="B0", step=2, leg=1)], []),
            "own plan": ([*own, job.saving("own")], [Short(rank=2, what="B0", step=1)], []),
            "others": (three, [Short(rank=1, what="B1", step=1), Short(rank=3, what="F0", step=3)], [two, two]),
            "optimizer": ([job.saving("saved")], [Short(rank=1, what="optimizer", step=2)], []),
        }
    )


def ends_as_ever(ran: Ran, name: str, *events: tuple[str, int]) -> list[Course]:
    """The run has trained each sample once, and ends with the numbers of one device; all ranks saw these events."""
    courses = ran.courses[name]
    for course in courses:
        assert [(event.why, event.step) for event in course.events] == [("begin", 0), *events, ("end", 5)], course.error
        assert [event.told for event in course.events] == [event.told for event in courses[0].events]
        assert len({*course.groups}) == 1, "no process group is left of a leg"
    found = next(course for course in courses if course.losses is not None)
    assert found.losses == pytest.approx(ran.truth.losses, rel=1e-10)
    assert ran.truth.evaluation is not None
    assert found.evaluation == pytest.approx(ran.truth.evaluation.loss, rel=1e-10)
    assert found.samples == 50
    return courses


def ended(ran: Ran, name: str) -> tuple[str, str]:
    """How the run ended, as all ranks say, and the kind of error."""
    words = {(course.error, course.kind) for course in ran.courses[name]}
    assert len(words) == 1
    return words.pop()


def test_a_run_goes_on_by_plans_of_other_devices(ran: Ran) -> None:
    """The last stage of three has no memory in its second step, and later one of two, while others stand by."""
    courses = ends_as_ever(ran, "others", ("memory", 1), ("memory", 3))
    assert courses[3].events[1].told.startswith("out of memory on rank 1, replica 0 stage 1, device n0/1, in 1B1 of step 2: ")
    assert courses[2].events[2].told.startswith("out of memory on rank 3, replica 0 stage 0, device n0/3, in 0F0 of step 4: ")


def test_a_run_whose_optimizer_has_no_memory_goes_on_from_the_newest_checkpoint_by_another_plan(ran: Ran) -> None:
    """It has stepped on the others."""
    courses = ends_as_ever(ran, "optimizer", ("memory", 2))
    first, then = courses[0].plans
    assert then.replicas != first.replicas
    said = next(line for line in courses[0].said if line.startswith("out of memory"))
    assert said.startswith("out of memory on rank 1, replica 1 stage 0, device n0/1, in optimizer of step 3: MemoryError. From ")
    assert "). The run goes on from step 3 by a new plan: cpu (n0/0" in said


def test_a_step_is_repeated_by_a_new_plan_and_a_second_time_ends_the_run(ran: Ran) -> None:
    said = [line for line in ran.courses["again"][0].said if line.startswith("out of memory")]
    told = (
        "out of memory on rank 1, replica 1 stage 0, device n0/1, in 0F1 of step 3: MemoryError. From here on plans use at most "
        f"145175 bytes of a 'cpu' (later runs do if {ran.cluster} says device_types: {{cpu: {{memory: 145175}}}}). Step 3 is "
        "repeated by a new plan: cpu (n0/0 and n0/2) each run layers 0–2 of 6, cpu (n0/1 and n0/3) each run layers 3–5 of 6: 6 "
        "of 12 samples of a step, in 6 micro-batches of 1"
    )
    assert said == [told]
    words, kind = ended(ran, "again")
    assert kind == "RunError"
    assert words.startswith("out of memory on rank 0, replica 0 stage 0, device n0/0, in 0B0 of step 3: MemoryError. From here ")
    assert "This is the second time in step 3 that a 'cpu' has too little memory, so the run ends. By the new limit " in words
    assert "this plan fits: cpu (n0/0) runs layers 0–1 of 6, cpu (n0/1) runs layers 2–3 of 6, cpu (n0/2) runs layer" in words
    assert words.endswith("activations in the memory of hosts (host_memory of a node in the cluster file)")


def test_a_plan_of_ones_own_is_not_changed_and_the_steps_before_are_saved(ran: Ran) -> None:
    words, kind = ended(ran, "own plan")
    assert kind == "RunError"
    assert f"{ran.cluster.parent / 'plan.json'} is not changed. If plan.file is left out, this plan fits: cpu (n0/0 and " in words
    assert [found.name for found in list_checkpoints(ran.cluster.parent / "own")] == ["step-00000001"]


@pytest.mark.thorough
def test_there_may_be_no_memory_for_the_layers_or_the_state_of_another_plan(tmp_path: Path) -> None:
    """Of two types, so that the step is repeated once more; and of one, where a run ends. What no rank has any more comes from
    the newest checkpoint, or the begin."""
    job = Job4.ready(tmp_path)
    cluster = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    cluster["device_types"] |= {"other": cluster["device_types"]["cpu"]}
    cluster["nodes"][0]["devices"] = {"cpu": 2, "other": 2}
    Folder(tmp_path).write("cluster.yaml", cluster)
    Folder(tmp_path).profile(job.file, types=("cpu", "other"))
    forward = Short(rank=0, what="F0", step=2, leg=0)
    ran = job.run(
        {
            "layers": ([job.saving("layers")], [forward, Short(rank=2, what=LAYERS, leg=1)], []),
            "state": ([job.saving("state")], [forward, Short(rank=3, what=STATE, leg=1)], []),
            "unsaved": ([], [forward, Short(rank=2, what=STATE, leg=1)], []),
            "first": ([], [Short(rank=1, what=LAYERS, leg=0)], []),
            "first step": ([], [Short(rank=1, what="F0", step=0)], []),
            "twice": ([job.saving("twice")], [forward, Short(rank=1, what=STATE, leg=1)], []),
            "an optimizer, first": ([], [Short(rank=1, what="optimizer", step=0)], []),
            "an optimizer, last": ([], [Short(rank=1, what="optimizer", step=4)], []),
            "evaluation": ([], [Short(rank=2, what=EVALUATION)], []),
        }
    )
    for name, doing in (("layers", "loading its layers"), ("state", "taking over the state of the run")):
        courses = ends_as_ever(ran, name, ("memory", 2), ("memory", 2))
        assert f", in {doing}: MemoryError. From here on plans use at most " in courses[0].events[2].told
    ends_as_ever(ran, "unsaved", ("memory", 2), ("memory", 0))
    ends_as_ever(ran, "first", ("memory", 0))
    ends_as_ever(ran, "first step", ("memory", 0))
    assert "This is the second time in step 3 that a 'cpu' has too little memory" in ended(ran, "twice")[0]
    ends_as_ever(ran, "an optimizer, first", ("memory", 0))
    ends_as_ever(ran, "an optimizer, last", ("memory", 0))
    words, kind = ended(ran, "evaluation")
    assert kind == "RunError"
    assert words.startswith(
        "the evaluation after step 5: out of memory on rank 2, replica 2 stage 0, device n0/2, in 0F0 of step 5"
    )


def _lacks(*_: Any) -> Any:
    raise MemoryError


def test_a_limit_is_kept_with_the_cached_profile_until_it_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device, in this process. It has no memory for the second step of its first run."""
    job, cache = Job4.ready(tmp_path), tmp_path / "kept"
    Folder(tmp_path).cluster(1, slowdown=1.0, memory="400 KiB")
    settings = ["profile=null", f"profiler={json.dumps({'cache': str(cache), 'microbatch_sizes': [1, 4], 'repeats': 1})}"]
    train_stages, steps = TorchEngine._train, iter(range(20))

    def lacking(engine: TorchEngine, *given: Any) -> Any:
        if next(steps) == 1:
            return engine.memory.attempt(_lacks, list)
        return train_stages(engine, *given)

    monkeypatch.setattr(TorchEngine, "_train", lacking)
    first = alone(job.file, *settings)
    (cached,) = cache.iterdir()
    limits = Profile.load(cached).memory_limits
    assert limits.keys() == {"cpu"}
    assert first.losses == pytest.approx(reference(job.file).losses, rel=1e-10)
    again = alone(job.file, *settings)
    for found in (first, again):
        assert found.plan is not None
        assert found.plan.predicted is not None
        assert max(found.plan.predicted.peak_bytes.values()) <= limits["cpu"]
    try:
        fresh = _profile_rank(Job.read(job.file, settings))
    finally:
        dist.destroy_process_group()
    assert fresh is not None
    assert fresh.memory_limits == Profile.load(cached).memory_limits == {}


def directed(monkeypatch: pytest.MonkeyPatch, *, processes: bool = True) -> tuple[ByJob, Plan]:
    """A director without a run, and a plan of its cluster, which it makes each time."""
    cluster, plan = make_cluster([{"cpu": 2}]), make_plan([{"cuts": [2, 4], "sizes": [2, 2]}])
    monkeypatch.setattr(by_job, "seat", lambda *_: None if processes else refuse("one process drives each replica"))
    session: Any = SimpleNamespace(job=SimpleNamespace(plan=SimpleNamespace(file=None)), cluster=cluster)
    director = ByJob(session)
    vars(director)["_rebalance"] = SimpleNamespace(plan_again=lambda *_: Leg(plan))
    return director, plan


def refuse(words: str) -> None:
    raise InputError(words)


def short_event(plan: Plan, step: int) -> Event:
    shortage = Shortage(device=plan.device_ids[0], where="here", doing="0F0", words="MemoryError")
    return Event("memory", step, plan, "out of memory", (shortage,))


def test_a_run_is_planned_again_three_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    (director, plan), world = directed(monkeypatch), cast(Any, SimpleNamespace(is_main=False))
    for step in (1, 4, 9):
        assert director.next_leg(short_event(plan, step), world, cast(Any, None)) == Leg(plan)
    with pytest.raises(
        RunError, match=r"^out of memory\. This is the 4th time in this run that a 'cpu' has too little memory, so "
    ):
        director.next_leg(short_event(plan, 10), world, cast(Any, None))


def test_a_plan_of_more_processes_than_there_are_is_for_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    (director, plan), world = directed(monkeypatch, processes=False), cast(Any, None)
    told = r"This plan fits, once the run is started again: cpu \(n0/0\) runs layers 0–1 .* \(one process drives each replica\)$"
    with pytest.raises(RunError, match=told):
        director.next_leg(short_event(plan, 1), world, cast(Any, None))


@pytest.mark.thorough
def test_statistics_of_a_step_that_is_repeated_count_once(tmp_path: Path) -> None:
    """By the same plan, with and without a shortage."""
    net = "tests.support.user_parts:with_batch_norm_of_8"
    job = Job4.ready(tmp_path, model={"target": net, "batch_norm": "per_microbatch"})
    first: dict[str, Any] = {"cuts": [3, 3], "sizes": [3, 3], "devices": ["n0/0", "n0/1"]}
    plan = job.plan("two.json", [first, {"cuts": [6], "sizes": [3, 3], "devices": ["n0/3"]}], net)
    own = [f"plan.file={tmp_path / 'two.json'}"]
    lacks = [Short(rank=1, what="F1", step=2), Short(rank=0, what="B0", step=4)]
    courses = job.run({"as ever": (own, [], []), "short": (own, lacks, [plan, plan])}).courses
    ever, short = (next(c for c in courses[name] if c.losses is not None) for name in ("as ever", "short"))
    assert [event.why for event in courses["short"][0].events] == ["begin", "memory", "memory", "end"]
    assert short.losses == pytest.approx(ever.losses, rel=1e-12)
    assert short.evaluation == pytest.approx(ever.evaluation, rel=1e-12)


@pytest.mark.thorough
def test_a_split_stage_goes_on_as_a_whole_one_and_back(tmp_path: Path) -> None:
    """Both devices of the stage have no memory, one after the other."""
    job = Job4.ready(tmp_path, model={"name": "mlp", "args": {"layers": 2, "inputs": 8, "width": 16, "outputs": 4}})
    profiler = {"tensor_parallel": [2], "microbatch_sizes": [1, 4], "repeats": 1, "cache": str(tmp_path / "kept")}
    own = ["profile=null", f"profiler={json.dumps(profiler)}", f"plan.file={tmp_path / 'split.json'}"]
    split = job.plan("split.json", [{"cuts": [2, 2], "sizes": [4, 4, 4], "widths": [2, 1]}])
    whole = job.plan("whole.json", [{"cuts": [2, 2], "sizes": [4, 4, 4], "devices": ["n0/3", "n0/1"]}])
    lacks = [Short(rank=1, what="F1", step=1, leg=0), Short(rank=3, what="B1", step=2, leg=1)]
    lacks.append(Short(rank=0, what="B2", step=3, leg=2))
    ran = job.run({"split": (own, lacks, [whole, split, whole])})
    ends_as_ever(ran, "split", ("memory", 1), ("memory", 2), ("memory", 3))


@pytest.mark.thorough
def test_processes_that_drive_a_replica_go_on_by_a_plan_of_as_many_or_fewer(tmp_path: Path) -> None:
    job = Job4.ready(tmp_path, plan={"backend": "fairscale"})
    Folder(tmp_path).cluster(4, memory="200 KiB")
    found, said = train_everywhere(Job.read(job.file), pipe_run)
    assert any(line.startswith("out of memory on rank 0, replica 0 (fairscale), device n0/0, in ") for line in said)
    assert [len(replica.stages) for replica in found.plan.replicas] == [2, 2]
    truth = reference(job.file)
    assert truth.evaluation is not None
    assert found.losses == pytest.approx(truth.losses, rel=1e-10)
    assert found.evaluation.loss == pytest.approx(truth.evaluation.loss, rel=1e-10)


def test_a_limit_is_what_the_device_had_or_less_than_what_was_predicted() -> None:
    layer = {"parameter_bytes": 1000, "saved_bytes_per_sample": 100, "output_bytes_per_sample": 10}
    cluster, profile = make_cluster([{"cpu": 2}]), make_profile({"cpu": [1.0] * 6}, layer=layer)
    plan = make_plan([{"cuts": [2, 4], "sizes": [2, 2]}])
    device = plan.device_ids[0]
    planned = peak_bytes(plan, Costs(profile, cluster))[device]
    for reserve, there, found in (
        (0.0, None, 0.95 * planned),
        (0.0, planned - 10, planned - 10),
        (0.0, planned + 10, 0.95 * planned),
        (0.2, None, 0.95 * planned / 0.8),
        (0.2, planned - 80, (planned - 80) / 0.8),
    ):
        session: Any = SimpleNamespace(
            cluster=cluster, job=SimpleNamespace(planning=PlanOptions(memory_reserve=reserve, precision=None))
        )
        short = Shortage(device=device, where="here", doing="0F0", words="", bytes_there=there)
        limit = most_bytes(session, profile, plan, short)
        assert limit == int(found)
        assert limit * (1 - reserve) < planned
