"""A run as a row of legs: from plan to plan in one process group, what a run knows goes by name."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hetpipe.building.build import build_model
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.standby import Standby
from hetpipe.spec.job import Job
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile
from hetpipe.training.legs import Carried, hand_over, leg
from hetpipe.training.loop import Loop
from hetpipe.training.session import open_session
from hetpipe.training.start import run_everywhere
from tests.support.jobs import Folder, train
from tests.support.ranks import World, cluster_of, run_ranks
from tests.support.runs import trained
from tests.test_stopping import tensors_of

ENDS = (3, 5, 8)  # the steps after which a leg ends, in the midst of an epoch
TIED: dict[str, Any] = {"target": "tests.support.user_parts:tied"}
TWO_OF_THREE = [{"cuts": [3, 3], "sizes": [6, 6], "devices": ["n1/0", "n0/1"]}]


def three_legs(job: Job, plans: list[Plan], profile: Profile) -> dict[str, Any]:
    """The last leg saves; what this rank saw."""
    session = open_session(job)
    done, carried, losses, groups = 0, None, list[float](), [_groups()]
    for plan, end in zip(plans, ENDS, strict=True):
        part = {"train": job.train.model_copy(update={"steps": end})} | ({"checkpoint": None} if end != ENDS[-1] else {})
        session = replace(session, model=build_model(job, session.data.train, session.data.names))
        with leg(session, plan, profile) as engine:
            loop = Loop(job.model_copy(update=part), session, engine) if engine is not None else None
            if end != ENDS[0]:
                done = hand_over(carried, loop.state if loop is not None else None, session.world)
            carried = None
            if loop is not None:
                loop.done = done
                losses += loop.run().losses
                carried = Carried.of(loop.state)
            groups.append(_groups())
        groups.append(_groups())
    return {"rank": session.world.rank, "losses": losses, "groups": groups}


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def program(job: Job, plans: list[Plan], profile: Profile) -> Any:
    found = three_legs(job, plans, profile)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return every


def test_three_legs_under_two_plans_end_where_three_runs_with_checkpoints_end(tmp_path: Path) -> None:
    """Two replicas on three devices; one on two of them, while the first rank waits; and the first plan again. Bit for bit:
    parameters, the optimizer's state, the schedule, the place in the data. No process group is left of a leg."""
    folder = Folder(tmp_path)
    saving = {"folder": str(tmp_path / "saved"), "every_steps": 100}
    job = train(steps=ENDS[-1], scheduler={"name": "StepLR", "step_size": 2, "gamma": 0.5}, evaluate_samples=0)
    file = folder.ready(model=TIED, train=job, checkpoint=saving)
    one, two = Plan.load(tmp_path / "plan.json"), Plan.load(folder.plan(TWO_OF_THREE, name="other.json", model=TIED["target"]))
    losses = []
    for name, end in zip(("plan", "other", "plan"), ENDS, strict=True):
        losses += trained(file, f"plan.file={tmp_path / name}.json", f"train.steps={end}", "log=null").losses
    own = Job.read(file, [f"checkpoint.folder={tmp_path / 'legs'}", "log=null"])
    found = run_everywhere(own, program, [one, two, one], Profile.load(tmp_path / "profile.json"))
    assert found[1]["losses"] == losses
    assert [len(each["losses"]) for each in found] == [6, 8, 8]
    for before, *during_and_after in (each["groups"] for each in found):
        assert during_and_after[1::2] == [before] * 3
        assert min(during_and_after[::2]) > before
    ours, theirs = (list_checkpoints(tmp_path / name)[-1] for name in ("legs", "saved"))
    assert (tensors := tensors_of(ours)).keys() == (truth := tensors_of(theirs)).keys() != set()
    assert all(tensor.equal(truth[key]) for key, tensor in tensors.items())
    states = [json.loads((saved / "trainer.json").read_text()) for saved in (ours, theirs)]
    for state in states:
        del state["files"], state["digest"]
    assert states[0] == states[1]


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
