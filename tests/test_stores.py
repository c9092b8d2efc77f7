"""A store of checkpoints is one file: runs save and resume with another one, and whatever the store is, what is half-written is
never taken, and what has changed is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hetpipe
from hetpipe.building.content import Content
from hetpipe.building.data import EpochSampler
from hetpipe.building.feed import Feed, Reading
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.best import Best, Measured
from hetpipe.checkpoints.checkpoint import PART, CheckpointError, begin, complete
from hetpipe.checkpoints.resume import RunState, Saved
from hetpipe.checkpoints.state_tensors import state_keys
from hetpipe.checkpoints.stores.store import Stored
from hetpipe.documents.job import CheckpointSection, Job
from hetpipe.documents.sections.evaluate import EvaluateSection
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.model import mse
from hetpipe.processes import whereabouts
from hetpipe.processes.world import World, alone
from hetpipe.runtime.plan_engine import PlanEngine
from tests.support.memory_store import STATE, MemoryStore, on_threads
from tests.support.nets import batch, build
from tests.support.ranks import make_plan
from tests.test_checkpoint import net, steps
from tests.test_resume import ADAM, JOB

PARTS = ((0, 1), (1, 3), (3, 4))  # layers of `net` on three ranks
SECOND = PART.format(2)


@pytest.fixture(autouse=True)
def _resumes_from_nothing() -> Iterator[None]:
    before = whereabouts.resume()
    yield
    whereabouts.resumes_from(before)


def trained(count: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    whole = net()
    optimizer = ADAM(whole.parameters())
    steps(whole, optimizer, count)
    return whole, optimizer


def stage_of(whole: nn.Sequential, lo: int, hi: int) -> nn.Module:
    """These layers under their names in the whole."""
    stage = nn.Module()
    for name, layer in list(whole.named_children())[lo:hi]:
        stage.add_module(name, layer)
    return stage


def saved_by_three(store: MemoryStore, step: int) -> list[str]:
    """Each rank has a stage of one model; what each says of the checkpoint."""
    whole, optimizer = trained(step)

    def save(world: World) -> str:
        try:
            return str(begin(store, step, stage_of(whole, *PARTS[world.rank]), optimizer, {}, world).finish(keep=2))
        except CheckpointError as error:
            return str(error)

    return on_threads(3, save)


def engine_of(model: nn.Sequential) -> PlanEngine:
    return hetpipe.wrap(model, make_plan([{"cuts": [10], "sizes": [4, 4]}]), batch("blocks", 8, 0)[0], mse)


def test_a_loop_of_ones_own_goes_on_bit_for_bit() -> None:
    store, (inputs, targets), runs = MemoryStore(), batch("blocks", 8, 0), []
    for _ in range(2):
        engine = engine_of(build("blocks"))
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        first = hetpipe.load_checkpoint(engine, optimizer, store, scheduler)
        losses = []
        for step in range(first, 4):
            losses.append(engine.step(inputs, targets))
            optimizer.step()
            scheduler.step()
            if step == 1:
                saved = hetpipe.save_checkpoint(engine, optimizer, store, 2, scheduler)
                assert str(saved) == "memory:step-00000002"
        runs.append((first, losses, engine.whole_state_dict()))
    (begun, all_losses, truth), (resumed, last_losses, found) = runs
    assert (begun, resumed, all_losses[2:]) == (0, 2, last_losses)
    assert truth is not None
    assert found is not None
    assert all(torch.equal(value, found[name]) for name, value in truth.items())


def test_a_jobs_run_takes_the_store_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    job, store, engine = Job.parse(JOB, "the test's"), MemoryStore(), engine_of(build("blocks"))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    section = CheckpointSection(folder="nowhere")
    feeds = [Feed([], EpochSampler(50, 12, seed=0), lambda _: None, Reading(convert=lambda x: x)) for _ in range(3)]
    runs = [
        Saved(
            job=job,
            section=section,
            store=store,
            content=Content(samples=50),
            run=RunState(
                train=job.train,
                engine=engine,
                optimizer=optimizer,
                scheduler=scheduler,
                feed=feed,
                best=Best(EvaluateSection(), Measured(metric="loss", samples=0)),
            ),
        )
        for feed in feeds
    ]
    assert runs[0].restore(7) is None
    engine.step(*batch("blocks", 8, 0))
    optimizer.step()
    scheduler.step()
    with feeds[0].open(1, lambda: "samples") as batches:
        next(batches)
    assert runs[0].save(1, 0.5) is None, "it is under way"
    assert runs[0].complete() == (1, store.stored("step-00000001"))
    state = runs[1].restore(7)
    assert state is not None
    assert (state.step, state.loss) == (1, 0.5)
    assert feeds[1].state_dict() == feeds[0].state_dict() != feeds[2].state_dict()
    assert "resuming from memory:step-00000001; to start anew, name another checkpoint.folder" in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_ranks_save_their_stages_and_one_process_goes_on(tmp_path: Path) -> None:
    store = MemoryStore()
    assert [saved_by_three(store, step) for step in (1, 2, 3)][-1] == ["memory:step-00000003"] * 3
    assert store.names() == ["step-00000002", "step-00000003"]
    assert store.stored("step-00000003").parts() == [*map(PART.format, (1, 2, 3))]
    (whole, optimizer), again = trained(3), net(seed=9)
    other = ADAM(again.parameters())
    checkpoint.load(complete(store)[-1], again, other, alone(), whole=again, keeps=state_keys(ADAM))
    steps(whole, optimizer, 2)
    steps(again, other, 2)
    truth = whole.state_dict()
    assert all(torch.equal(value, truth[name]) for name, value in again.state_dict().items())
    plain = net(seed=9)
    assert hetpipe.load_weights(plain, store) == 3
    written = load_file(export_weights(None, complete(store)[-1], tmp_path / "out") / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in plain.state_dict().items())


def test_what_is_half_written_is_never_taken() -> None:
    """Killed before its state was written; and one rank that cannot write, which all are told."""
    store = MemoryStore()
    saved_by_three(store, 2)
    parts = store.held["step-00000002"]
    store.held["step-00000004"] = {name: content for name, content in parts.items() if name != STATE}
    assert store.names() == ["step-00000002", "step-00000004"]
    assert [found.name for found in complete(store)] == ["step-00000002"]
    assert hetpipe.load_weights(net(seed=9), store) == 2

    store.full = {SECOND}
    (said,) = set(saved_by_three(store, 5))
    assert said.startswith("cannot write the checkpoint memory:step-00000005: it needs ")
    assert said.endswith(", and 0 B are free there; rank 1: OSError: [Errno 28] No space left in memory")
    assert "step-00000005" not in store.held
    store.full = set()
    saved_by_three(store, 4)  # over what was left
    assert [found.name for found in complete(store)] == ["step-00000002", "step-00000004"]


def refused(found: Stored) -> str:
    with pytest.raises(InputError) as caught:
        checkpoint.load(found, net(seed=9), None, alone())
    return str(caught.value)


def test_what_is_not_as_it_was_written_is_told_and_not_read() -> None:
    store = MemoryStore()
    saved_by_three(store, 2)
    (found,), parts = complete(store), store.held["step-00000002"]
    whole = dict(parts)
    told = "checkpoint memory:step-00000002 is not as it was written; remove it to resume from the one before:\n  "
    parts[SECOND] = whole[SECOND][:-1] + b"?"
    assert refused(found).startswith(f"{told}{SECOND} has other content: its digest is ")
    parts[SECOND] = whole[SECOND][:-1]
    size = len(whole[SECOND])
    assert refused(found) == f"{told}{SECOND} has {size - 1} bytes, and {size} were written"
    del parts[SECOND]
    assert refused(found) == f"{told}{SECOND} cannot be read: No such part"
    parts |= {SECOND: whole[SECOND], "other": b""}
    assert refused(found) == f"{told}other was not written with the checkpoint"
    parts[STATE] = whole[STATE].replace(b'"step": 2', b'"step": 3')
    assert refused(found).startswith("memory:step-00000002/state is not as it was written: its digest is ")
