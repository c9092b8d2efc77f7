"""Runs that move layers when devices become slower: for which cluster they plan, whether it pays, and that nothing else
changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bench.drift.slowed import Slower
from hetpipe.building.build import build_data, build_model
from hetpipe.building.content import Content
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.log import REPORT_FILE
from hetpipe.files.formats import read_yaml
from hetpipe.files.messages import InputError
from hetpipe.predict.simulator import computing_seconds, simulate
from hetpipe.processes.world import alone
from hetpipe.training.directing.drift import Drift
from hetpipe.training.directing.rebalance import RESTART_SECONDS, Rebalance
from hetpipe.training.directing.seen import Seen
from hetpipe.training.moving.moves import in_place, move_bytes, move_seconds, moves, stay
from hetpipe.training.session import Request, Session, new_plan
from hetpipe.training.start import run_everywhere
from hetpipe.training.trainer import Trainer
from tests.support.drifting import said_to_be
from tests.support.jobs import POINTS, Folder, train
from tests.support.ranks import cluster_of, make_plan
from tests.support.runs import reference

SECONDS = 0.05  # of each layer, action and sample, as the profile says


def folder_of(path: Path, *counts: int, rebalance: str = "auto", **sections: Any) -> Path:
    """A job for so many emulated devices on each node, without a plan file; its file. Devices are paced by next to no time,
    whatever the profile says that they take."""
    folder = Folder(path)
    file = folder.job(plan=None, rebalance=rebalance, **sections)
    folder.cluster(*counts, slowdown=1.0)
    folder.profile(file, seconds=SECONDS)
    profile = Profile.load(path / "profile.json")
    assert profile.host is not None
    profile.model_copy(update={"host": profile.host.slower(1e-6)}).save(path / "profile.json")
    return file


def session_of(file: Path) -> tuple[Session, Profile, Plan]:
    """In this process, with the plan that it begins with."""
    job = Job.read(file)
    cluster, data = job.read_cluster(), build_data(job)
    assert cluster is not None
    assert job.profile is not None
    model = build_model(job, data)
    session = Session(job=job, world=alone(), cluster=cluster, model=model, data=data, content=Content.model_construct())
    profile = Profile.load(job.profile)
    return session, profile, new_plan(session, profile, Request.by(job))


def drift_of(
    session: Session, profile: Profile, plan: Plan, factors: dict[str, float], *, step: int = 50, left: int = 1000
) -> Drift:
    """These devices have changed by these factors, the others are as they were."""
    every = dict.fromkeys(plan.device_ids, 1.0)
    predicted = computing_seconds(plan, profile, session.cluster)
    return Drift(step, left, plan, every | factors, every, predicted, tuple(factors))


# ---- the cluster as it is seen ----


def test_a_slow_device_is_of_a_type_of_its_own_that_differs_in_seconds_only(tmp_path: Path) -> None:
    """Those behind it in its node are of another one, as fast as before: a node lists a type once."""
    session, profile, _ = session_of(folder_of(tmp_path, 4, 2))
    seen = Seen.by({"n0/1": 2.0, "n1/1": 2.05}, session.cluster, profile)
    slow, (kind,) = "cpu ×2.02", session.cluster.device_types
    assert [device.type for device in seen.cluster.devices] == [kind, slow, "cpu (2)", "cpu (2)", kind, slow]
    assert [device.id for device in seen.cluster.devices] == [device.id for device in session.cluster.devices]
    assert set(seen.cluster.device_types) == {kind, slow, "cpu (2)"} == {m.device_type for m in seen.profile.measurements}
    assert len({str(found) for found in seen.cluster.device_types.values()}) == 1
    plain, slower = (seen.profile.measurement(name) for name in ("cpu (2)", slow))
    assert slower.forward / plain.forward == pytest.approx(2.0248, rel=1e-3)
    assert plain == profile.measurement(kind).model_copy(update={"device_type": "cpu (2)"})
    assert Seen.by({}, session.cluster, profile) == (session.cluster, profile)


def test_plans_keep_their_precisions_by_the_types_that_there_are() -> None:
    cluster = cluster_of(2)
    profile = Profile.model_construct(measurements=(), overheads=())
    seen = Seen.by({"n0/1": 3.0}, cluster, profile)
    plan = make_plan([{"cuts": [1, 1], "sizes": [1]}]).model_copy(update={"precision": {"cpu": "bf16"}})
    assert seen.named(plan, cluster).precision == {"cpu": "bf16", "cpu ×3": "bf16"}


def test_what_devices_compute_in_a_step_is_what_a_simulated_step_shows(tmp_path: Path) -> None:
    """The same forwards and backwards, without the optimizer."""
    session, profile, _ = session_of(folder_of(tmp_path, 2, 1))
    plan = Plan.load(Folder(tmp_path).plan())
    found, shown = computing_seconds(plan, profile, session.cluster), dict[str, float]()
    for span in simulate(plan, profile, session.cluster).spans:
        if span.kind in ("F", "B"):
            shown[span.device] = shown.get(span.device, 0.0) + span.end - span.start
    assert found == pytest.approx(shown)
    assert len(found) == 3


# ---- what moves ----

THREE = make_plan([{"cuts": [4, 2], "sizes": [4]}, {"cuts": [6], "sizes": [4]}])  # n0/0, n0/1; n1/0
LATER = {"cuts": [2, 4], "sizes": [4]}


def test_a_device_gets_what_it_has_not_from_the_nearest_that_has_it() -> None:
    cluster = cluster_of(3, 1)
    other = make_plan(
        [{"cuts": [2, 4], "sizes": [4], "devices": ["n0/0", "n0/1"]}, {"cuts": [6], "sizes": [4], "devices": ["n0/2"]}]
    )
    found = moves(THREE, other, cluster)
    assert [(move.layer, move.device, move.source) for move in found[:2]] == [(2, "n0/1", "n0/0"), (3, "n0/1", "n0/0")]
    assert [move.source for move in found[2:]] == ["n0/0"] * 4 + ["n0/1"] * 2, "and not from n1/0"
    assert list(stay(THREE, other, "n0/0")) == [0, 1]
    assert list(stay(THREE, other, "n1/0")) == []
    split = make_plan([{"cuts": [6], "sizes": [8], "widths": [2]}])
    assert list(stay(THREE, split, "n0/0")) == [], "a shard is another tensor"
    assert moves(THREE, THREE, cluster) == []


def test_seconds_of_a_move_are_those_of_the_device_that_sends_and_gets_most(tmp_path: Path) -> None:
    _, profile, _ = session_of(folder_of(tmp_path, 2, 1))
    cluster, layer = cluster_of(3, 1), profile.layers[2]
    size = round(layer.parameter_bytes + 2 * layer.trained)  # AdamW's
    other = make_plan(
        [{"cuts": [2, 4], "sizes": [4], "devices": ["n0/0", "n0/1"]}, {"cuts": [6], "sizes": [4], "devices": ["n1/0"]}]
    )
    found = moves(THREE, other, cluster)
    assert move_bytes(found, profile) == 2 * size
    assert move_seconds(found, profile, cluster) == pytest.approx(2 * (1e-5 + size / 1e9))


def test_devices_of_a_kind_change_places_so_that_less_moves() -> None:
    cluster = cluster_of(3, 1)
    turned = make_plan(
        [{"cuts": [6], "sizes": [4], "devices": ["n0/1"]}, {"cuts": [3, 3], "sizes": [4], "devices": ["n1/0", "n0/0"]}]
    )
    found = in_place(THREE, turned, cluster)
    assert [stage.devices for replica in found.replicas for stage in replica.stages] == [("n0/0",), ("n1/0",), ("n0/1",)]
    assert len(moves(THREE, found, cluster)) == 3 < len(moves(THREE, turned, cluster))


# ---- whether it pays ----


def test_a_run_moves_layers_if_the_steps_that_are_left_repay_it(tmp_path: Path) -> None:
    session, profile, plan = session_of(folder_of(tmp_path, 2, 1))
    factors = {"n0/1": 3.0}
    record = Rebalance(session, profile).drifted(drift_of(session, profile, plan, factors), alone())
    assert record is not None
    assert record.moves
    assert record.factors == factors
    assert record.step_seconds is not None
    assert record.fresh_step_seconds is not None
    gain = record.step_seconds - record.fresh_step_seconds
    assert gain > 0.03 * record.step_seconds
    assert "n0/1 (cpu, replica" in record.told
    assert "computes 3.00 times as long as before" in record.told
    assert "for which the run moves" in record.told
    few = int(RESTART_SECONDS / gain)
    for left, pays in ((few, False), (few + 2, True)):
        rebalance = Rebalance(session, profile)
        record = rebalance.drifted(drift_of(session, profile, plan, factors, left=left), alone())
        assert record is not None
        assert (record.moves, rebalance.following is not None) == (pays, pays)
        assert ("would not repay" in record.told) == (not pays)


def test_a_run_that_may_not_move_layers_says_what_it_would_gain(tmp_path: Path) -> None:
    session, profile, plan = session_of(folder_of(tmp_path, 2, 1, rebalance="off"))
    rebalance = Rebalance(session, profile)
    record = rebalance.drifted(drift_of(session, profile, plan, {"n0/1": 3.0}), alone())
    assert record is not None
    assert not record.moves
    assert rebalance.following is None
    assert "With rebalance: auto the run would move" in record.told
    assert "'hetpipe profile' measures" in record.told


def test_where_all_devices_are_slow_alike_no_other_plan_is_faster(tmp_path: Path) -> None:
    session, profile, plan = session_of(folder_of(tmp_path, 2, 1))
    record = Rebalance(session, profile).drifted(drift_of(session, profile, plan, dict.fromkeys(plan.device_ids, 2.0)), alone())
    assert record is not None
    assert not record.moves
    assert record.fresh_step_seconds is None
    assert record.told.startswith(f"all {len(plan.device_ids)} devices of the plan have changed at once, as where other work")
    assert "no other plan would be faster" in record.told


def test_a_plan_is_changed_back_when_the_change_before_is_repaid(tmp_path: Path) -> None:
    """And no sooner: it is weighed again in that step."""
    session, profile, plan = session_of(folder_of(tmp_path, 2, 1))
    rebalance, world = Rebalance(session, profile), alone()
    first = rebalance.drifted(drift_of(session, profile, plan, {"n0/1": 3.0}), world)
    leg = rebalance.go_on(world)
    assert first is not None
    assert leg.seen is not None
    assert leg.plan.fingerprint != plan.fingerprint
    slow = simulate(leg.seen.named(leg.plan, session.cluster), leg.seen.profile, leg.seen.cluster)
    assert slow.step_seconds == first.fresh_step_seconds
    known = drift_of(session, profile, leg.plan, {"n0/1": 1 / 3}, step=51)
    record = rebalance.drifted(known, world)
    assert record is not None
    assert not record.moves
    assert record.again is not None
    assert record.again > 51
    assert "is as fast again as it was" in record.told
    assert f"is not repaid before step {record.again}" in record.told
    again = rebalance.drifted(replace_step(known, record.again), world)
    assert again is not None
    assert again.moves
    assert again.factors == {}
    back = rebalance.go_on(world)
    assert back.plan.fingerprint == in_place(leg.plan, plan, session.cluster).fingerprint
    assert rebalance.factors == {}


def replace_step(drift: Drift, step: int) -> Drift:
    """What is known when it is looked at again: nothing has changed since."""
    return drift._replace(step=step, changed=())


def test_layers_stay_where_one_process_drives_a_replica() -> None:
    wrong = {
        "format": "hetpipe.job/1",
        "model": {"name": "mlp"},
        "data": {"name": "text"},
        "train": {"global_batch": 4, "steps": 2},
    }
    with pytest.raises(InputError, match="rebalance: auto needs a process for each device, and with plan.backend torchgpipe"):
        Job.parse({**wrong, "rebalance": "auto", "plan": {"backend": "torchgpipe"}}, "a job")
    settings = {**wrong, "rebalance": read_yaml("off", "a value")}
    assert Job.parse(settings, "a job").rebalance == "off"


# ---- runs ----


def drifting(job: Job, changes: list[Slower]) -> Any:
    """Losses, and the plans of the first leg and of the last one."""
    begun = list[Plan]()
    with said_to_be(job, changes):

        def planned(session: Session, plan: Plan, profile: Profile) -> bool:
            begun.append(plan)
            return True

        found = Trainer(job).run(planned=planned)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found and (found.losses, begun[0], found.plan))
    return next(told for told in every if told is not None)


def test_a_run_whose_device_becomes_slow_and_fast_again_trains_what_one_device_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Layers move, with the optimizer's state. A run that resumes behind that begins with the plan of the begin, finds the device
    slow from the start, moves layers again, and back when it is fast again."""
    saving, job = {"folder": str(tmp_path / "saved"), "every_steps": 10}, train(steps=100, evaluate_samples=0)
    file = folder_of(tmp_path, 2, 1, train=job, checkpoint=saving, data={**POINTS, "args": {**POINTS["args"], "samples": 48}})
    slow = [Slower("n0/1", 3.0, 24, 69)]
    first, begun, moved = run_everywhere(Job.read(file, ["train.steps=40"]), drifting, slow)
    (note,) = re.findall(r"note: n0/1 \(cpu, replica .*", told := capfd.readouterr().err)
    assert "computes 3.00 times as long as before" in note
    assert told.count("\nmoved ") == 1
    assert moved.replicas != begun.replicas
    assert "cpu ×3" in (tmp_path / "log" / REPORT_FILE).read_text()
    losses, again, last = run_everywhere(Job.read(file), drifting, slow)
    one, two = re.findall(r"note: n0/1 \(cpu, replica .*", told := capfd.readouterr().err)
    assert "computes 3.00 times as long as the profile says, from the start" in one
    assert "is as fast again as it was" in two
    assert told.count("\nmoved ") == 2
    assert again.replicas == last.replicas == begun.replicas
    assert first + losses == pytest.approx(reference(file).losses, rel=1e-10)
    drifts = [line["drift"] for line in Folder(tmp_path).lines("log/metrics.jsonl") if "drift" in line]
    assert [(drift["factors"], drift["moves"]) for drift in drifts] == [({"n0/1": pytest.approx(x)}, True) for x in (3, 3, 1)]
