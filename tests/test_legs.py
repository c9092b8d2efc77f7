"""A run as a row of legs: from plan to plan in one process group, what a run knows goes by name."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.standby import Standby
from hetpipe.processes.world import World as RealWorld
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.directing.drift import Drift
from hetpipe.training.observers.records import StepRecord
from hetpipe.training.start import run_everywhere
from hetpipe.training.trainer import Trainer
from tests.support.jobs import Folder, train
from tests.support.ranks import World, cluster_of, run_ranks
from tests.support.runs import trained
from tests.support.writes import write_slowly
from tests.test_stopping import tensors_of

ENDS = (3, 5, 8)  # the steps after which a leg ends, in the midst of an epoch
TIED: dict[str, Any] = {"target": "tests.support.user_parts:tied"}
TWO_OF_THREE = [{"cuts": [3, 3], "sizes": [6, 6], "devices": ["n1/0", "n0/1"]}]


class ThreeLegs:
    """Each plan to its step; what this rank saw: its process groups before each leg, and in each step."""

    def __init__(self, plans: list[Plan]) -> None:
        self.legs, self.groups, self.events = list(zip(plans, ENDS, strict=True)), list[int](), list[Event]()
        self.during = list[int]()

    def next_leg(self, event: Event, world: RealWorld, profile: Profile) -> Leg | None:
        self.events.append(event)
        self.groups.append(_groups())
        return next((Leg(plan, until) for plan, until in self.legs if until > event.step), None)

    def watch(self, record: StepRecord) -> Event | None:
        self.during.append(_groups())
        return None

    def drifted(self, drift: Drift, world: RealWorld) -> None:
        return None


class Drifting(ThreeLegs):
    """The last rank finds its device slow in step 2, and the second plan is next."""

    def next_leg(self, event: Event, world: RealWorld, profile: Profile) -> Leg | None:
        self.events.append(event)
        one, two = (plan for plan, _ in self.legs[:2])
        return {"begin": Leg(one), "drift": Leg(two)}.get(event.why)

    def watch(self, record: StepRecord) -> Event | None:
        slow = record.step == 2 and dist.get_rank() == dist.get_world_size() - 1
        return Event("drift", record.step, self.legs[0][0], "a device is slow") if slow else None


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def program(job: Job, kind: type[ThreeLegs], plans: list[Plan]) -> Any:
    write_slowly()
    director = kind(plans)
    found = Trainer(job, director).run()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (director.groups, director.during, director.events, found and found.losses))
    return every


def test_three_legs_under_two_plans_end_where_three_runs_with_checkpoints_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two replicas on three devices; one on two of them, while the first rank waits; and the first plan again. Bit for bit:
    parameters, the optimizer's state, the schedule, the place in the data. No process group is left of a leg, and what was being
    written when it ended is complete. A rank gets only what it has not: first a layer without tensors, then those of four."""
    folder = Folder(tmp_path)
    saving = {"folder": str(tmp_path / "saved"), "every_steps": 100}
    job = train(steps=ENDS[-1], scheduler={"name": "StepLR", "step_size": 2, "gamma": 0.5}, evaluate_samples=0)
    file = folder.ready(model=TIED, train=job, checkpoint=saving)
    one, two = Plan.load(tmp_path / "plan.json"), Plan.load(folder.plan(TWO_OF_THREE, name="other.json", model=TIED["target"]))
    losses = []
    for name, end in zip(("plan", "other", "plan"), ENDS, strict=True):
        losses += trained(file, f"plan.file={tmp_path / name}.json", f"train.steps={end}", "log=null").losses
    own = Job.read(file, [f"checkpoint={{folder: {tmp_path / 'legs'}, every_steps: 2, keep: 9}}", "log=null"])
    capfd.readouterr()
    found = run_everywhere(own, program, ThreeLegs, [one, two, one])
    assert re.findall(r"^moved (\d+) layers?,", capfd.readouterr().err, re.M) == ["0", "4"]
    assert [path.name for path in sorted((tmp_path / "legs").glob("step-*"))] == [f"step-0000000{step}" for step in (2, 4, 6, 8)]
    assert [told for _, _, _, told in found if told is not None] == [losses]
    assert [len(during) for _, during, _, _ in found] == [6, 8, 8]
    for groups, during, events, _ in found:
        assert groups == groups[:1] * 4, "before, and after each leg"
        assert min(during) > groups[0]
        assert [(event.why, event.step) for event in events] == [("begin", 0), *(("end", end) for end in ENDS)]
    ours, theirs = (list_checkpoints(tmp_path / name)[-1] for name in ("legs", "saved"))
    assert (tensors := tensors_of(ours)).keys() == (truth := tensors_of(theirs)).keys() != set()
    assert all(tensor.equal(truth[key]) for key, tensor in tensors.items())
    states = [json.loads((saved / "trainer.json").read_text()) for saved in (ours, theirs)]
    for state in states:
        del state["files"], state["digest"]
    assert states[0] == states[1]


def test_a_leg_ends_where_one_rank_says_so_and_a_resumed_run_begins_at_its_step(tmp_path: Path) -> None:
    """What the last rank sees in step 2 ends the leg after step 3 on all. The run under both plans has the losses of the run
    under one, and one that is resumed asks its director at the checkpoint's step. The schedule ends where the leg does, which is
    for a run to say, and not for a leg."""
    folder = Folder(tmp_path)
    job = train(steps=5, scheduler={"name": "CosineAnnealingLR", "T_max": 3}, evaluate_samples=0)
    file = folder.ready(model=TIED, train=job, checkpoint={"folder": str(tmp_path / "saved"), "every_steps": 100})
    one, two = Plan.load(tmp_path / "plan.json"), Plan.load(folder.plan(TWO_OF_THREE, name="other.json", model=TIED["target"]))
    truth = trained(file, f"checkpoint.folder={tmp_path / 'truth'}", "log=null").losses
    own = Job.read(file, ["log=null"])
    found = run_everywhere(own, program, Drifting, [one, two, one])
    for _, _, events, _ in found:
        assert [(event.why, event.step) for event in events] == [("begin", 0), ("drift", 3), ("end", 5)]
        assert events[1].told == "a device is slow"
        assert [event.plan.replicas for event in events] == [one.replicas, one.replicas, two.replicas]
    assert next(told for _, _, _, told in found if told is not None) == pytest.approx(truth, rel=1e-12)
    longer = Job.read(file, ["log=null", "train.steps=8"])
    for _, _, events, _ in run_everywhere(longer, program, ThreeLegs, [one, two, one]):
        assert [(event.why, event.step) for event in events] == [("begin", 5), ("end", 8)]


class Signalled(Standby):
    """While it waits, this rank is asked to stop."""

    def _pass_word(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        super()._pass_word()


def standing_by(world: World) -> list[str]:
    """Ranks 0 and 1 are used, and 2 is not."""
    told = list[str]()
    standby = Standby.create(world, [0, 1])
    assert standby is not None
    (Signalled(**vars(standby)) if world.rank == 2 else standby).over()
    standby.close()
    told.append("over")
    assert Standby.create(world, [0, 1, 2]) is None
    again = Standby.create(world, [0, 1])
    assert again is not None
    world.barrier()
    if world.rank == 0:
        raise ValueError(f"{world.gather(told)}")
    if world.rank == 1:
        world.gather(told)
        world.barrier()  # of a step that never ends
    world.gather(told)
    again.over()
    return told


def test_a_rank_that_waits_leaves_signals_to_those_that_train_and_ends_with_them() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(standing_by, cluster_of(3))
    assert "ValueError: [['over'], ['over'], ['over']]" in str(caught.value)
