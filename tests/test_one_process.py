"""The back ends fairscale and torchgpipe: one process a replica. That they train as one device does is in
`test_transparency.py`; here are their limits, and what surrounds them."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hetpipe
from bench.reference import ReferenceEngine, train_reference
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Backend, Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, Model, mse
from hetpipe.layers.split import refuse_skips
from hetpipe.measuring.profiler import measure_device
from hetpipe.planning.planner import make_plan as plan_for
from hetpipe.predict.cost import Costs
from hetpipe.predict.simulator import simulate
from hetpipe.predict.sums import sync_segments
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.runtime.backends import check_backend, processes
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import train_everywhere, train_rank
from tests.support.blocks import WIDTH
from tests.support.jobs import Folder, train
from tests.support.nets import batch, build
from tests.support.pipes import SKIPPED, batch_norm_net, deferred, net_with_a_skip, one_process, skipping_net, wrapped
from tests.support.ranks import cluster_of, make_plan, run_ranks
from tests.support.strategies import make_cluster, make_profile
from tests.test_torchrun import under_torchrun

LIBRARIES: tuple[Backend, ...] = ("fairscale", "torchgpipe")
both = pytest.mark.parametrize("backend", LIBRARIES)


def on_one_node(*rows: dict[str, Any]) -> Plan:
    """A plan whose replicas all lie on n0, which has its devices in their order."""
    at, placed = 0, []
    for row in rows:
        placed.append({**row, "devices": [f"n0/{at + s}" for s in range(len(row["cuts"]))]})
        at += len(row["cuts"])
    return make_plan(placed, schedule="gpipe")


# ---- what one process does ----


@functools.cache
def asked(backend: Backend) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(one_process, cluster_of(1), backend)[0]
    return found


@both
def test_skip_connections_pass_over_and_within_stages(backend: Backend) -> None:
    found = asked(backend)["skips"]
    assert abs(found["loss"]) < 1e-12
    assert abs(found["evaluation"]) < 1e-12
    assert found["worst"] < 1e-12
    assert found["least gradient"] > 1e-6


@both
def test_skip_connections_that_cannot_run_are_refused(backend: Backend) -> None:
    assert "replica 0 stage 0 is recomputed, but its layer '0' is @skippable" in asked(backend)["recomputed skip"]
    assert "allow_recompute: false" in asked(backend)["recomputed skip"]
    lonely = asked(backend)["lonely skip"]
    assert lonely.startswith(f"{backend}: the model's skip connections do not fit together")
    assert "no module declared 'far' as poppable but stashed" in lonely


@both
def test_skip_connections_of_another_back_end_are_refused(backend: Backend) -> None:
    other = "torchgpipe" if backend == "fairscale" else "fairscale"
    told = asked(backend)["foreign skip"]
    assert told == (
        f"layer '0' is @skippable by {other}, and the back end '{backend}' passes tensors from layer to layer only; use the back "
        f"end '{other}', or carry the tensor instead: let the layers between take and return it beside their own, as a tuple"
    )
    with pytest.raises(InputError, match=f"is @skippable by {backend}, and the back end 'torch' passes"):
        refuse_skips(skipping_net(backend), "torch")
    x = torch.zeros(2, WIDTH, dtype=torch.float64)
    model = Model(name="skips", layers=skipping_net(backend), inputs=x, targets=x, loss=Loss(function=mse))
    with pytest.raises(InputError, match="layer '0' is @skippable, so it cannot be measured without the other end"):
        measure_device(model, "cpu", torch.device("cpu"), [1], torch.optim.SGD)


@both
def test_the_callers_autocast_holds_in_every_stage(backend: Backend) -> None:
    """Also when a stage is recomputed: gradients are those of one device under autocast, micro-batch by micro-batch."""
    found = asked(backend)["autocast"]
    assert found["before"] == [{torch.float32}] * 4
    assert found["types"] == [{torch.bfloat16}] * 4
    assert found["moved"] > 1e-6
    assert found["worst"] < 1e-6


@both
def test_recomputed_dropout_is_the_same_dropout(backend: Backend) -> None:
    assert asked(backend)["dropout"] == {"loss": 0.0, "worst": pytest.approx(0.0, abs=1e-15)}


@both
def test_a_tied_parameter_is_copied_and_its_copies_stay_equal(backend: Backend) -> None:
    found = asked(backend)["copies"]
    assert (found["equal"], found["apart"], found["same object"]) == (True, True, True)
    assert "the replicas of tied 0.weight (ranks [0]) hold different parameters" in found["message"]


@both
def test_every_action_is_timed(backend: Backend) -> None:
    spans = asked(backend)["spans"]
    places = [("n0/0", 0, 0), ("n0/1", 0, 1), ("n0/2", 0, 2)]
    wanted = {(*place, kind, i) for place in places for kind in "FB" for i in range(2)}
    assert sorted(span[:5] for span in spans) == sorted(wanted)
    at = {(s, kind, i): (start, end) for _, _, s, kind, i, start, end in spans}
    assert all(0 <= start <= end for start, end in at.values())
    for i in range(2):
        for s in range(2):
            assert at[s, "F", i][1] <= at[s + 1, "F", i][0]
            assert at[s + 1, "B", i][0] <= at[s, "B", i][0]
    assert max(end for (_, kind, _), (_, end) in at.items() if kind == "F") <= min(
        start for (_, kind, _), (start, _) in at.items() if kind == "B"
    )


@both
def test_messages_name_the_replica_and_the_action(backend: Backend) -> None:
    assert asked(backend)["name"] == f"rank 0, replica 0 ({backend}), device n0/0, n0/1, n0/2"
    assert asked(backend)["doing"] == "1F0 of step 1"


# ---- BatchNorm ----


@both
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_deferred_statistics_are_those_of_the_whole_batch(backend: Backend, recompute: bool) -> None:
    """Also in steps with fewer micro-batches than planned, and in a replica without samples; recomputing counts nothing twice."""
    truth = batch_norm_net()
    for step, size in enumerate((13, 7, 3)):
        truth[:2](batch("blocks", size, step)[0])
    first, second = run_ranks(deferred, cluster_of(1, 1), backend, recompute)
    for name, value in truth.state_dict().items():
        if name.startswith("1.running"):
            assert torch.allclose(first[name], value, rtol=0, atol=1e-10), name
    for number in (1, 5):
        assert first[f"{number}.num_batches_tracked"] == 3
    assert all(torch.equal(value, second[name]) for name, value in first.items()), "replicas differ"
    assert float(first["5.running_mean"].abs().max()) > 1e-3


# ---- one's own loop, and hetpipe train ----


@both
def test_wrap_with_one_process_a_replica(backend: Backend) -> None:
    plan = on_one_node({"cuts": [4, 3, 3], "sizes": [4, 3, 1]}, {"cuts": [6, 4], "sizes": [4]})
    found = start_ranks(wrapped, (plan, backend), processes(backend, plan, cluster_of(5)))
    model = build("blocks")
    engine = ReferenceEngine(model, Loss(function=mse))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(3):
        losses.append(engine.step(*batch("blocks", 12, step)))
        optimizer.step()
    assert [result["replica"] for result in found] == [0, 1]
    for result in found:
        assert result["losses"] == pytest.approx(losses, abs=1e-10)
        for name, value in model.state_dict().items():
            assert torch.allclose(result["state"][name], value, rtol=0, atol=1e-10), name


@both
def test_a_plain_process_drives_several_devices(backend: Backend) -> None:
    """Without any launcher. The libraries' own warnings are those that pyproject.toml names."""
    plan = on_one_node({"cuts": [4, 3, 3], "sizes": [4, 3]})
    inputs, targets = batch("blocks", 7, 0)
    model, alone = build("blocks"), build("blocks")
    engine = hetpipe.wrap(model, plan, inputs, mse, backend=backend)
    try:
        truth = ReferenceEngine(alone, Loss(function=mse))
        assert engine.step(inputs, targets) == pytest.approx(truth.step(inputs, targets), abs=1e-12)
        wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, wanted[name], rtol=0, atol=1e-12), name
    finally:
        engine.close()
        torch.distributed.destroy_process_group()


def test_wrap_says_how_many_processes_it_wants() -> None:
    plan = on_one_node({"cuts": [4, 6], "sizes": [4]}, {"cuts": [10], "sizes": [4]})
    (short,) = start_ranks(wrapped, (plan, "torchgpipe"), cluster_of(1).devices)
    assert "node 'n0' has 2 replicas and 1 processes, start its agent with --nproc-per-node=2" in short["message"]
    found = start_ranks(wrapped, (plan, "torchgpipe"), cluster_of(3).devices)
    assert found[2]["message"].endswith("start one process per replica of it")
    assert len(found[0]["losses"]) == len(found[1]["losses"]) == 3


def test_a_checkpoint_goes_on_under_another_back_end(tmp_path: Path) -> None:
    """Two steps with torch, two with fairscale, one with torchgpipe, the rest with torch again, by other plans: the losses of one
    device."""
    folder = Folder(tmp_path)
    file = folder.ready(checkpoint={"folder": str(tmp_path / "saved")}, train=train(steps=6))
    folder.plan(schedule="gpipe")
    rows = ({"cuts": [2, 4], "sizes": [4, 4]}, {"cuts": [6], "sizes": [2, 2]})
    other = folder.plan(rows, name="other.json", schedule="gpipe")
    folder.write("other.json", {**folder.read(other.name), "backend": "torchgpipe"})
    wanted = train_reference(Job.read(file, ["checkpoint="]))
    losses: list[float] = []
    parts = (("torch", 2, "plan"), ("fairscale", 4, "other"), ("torchgpipe", 5, "plan"), ("torch", 6, "other"))
    for backend, steps, plan in parts:
        settings = [f"plan.backend={backend}", f"train.steps={steps}", f"plan.file={tmp_path}/{plan}.json"]
        result = train_everywhere(Job.read(file, settings), train_rank)
        assert isinstance(result, TrainResult)
        assert result.first_step == len(losses)
        losses += result.losses
        assert result.plan is not None
        assert result.plan.backend == backend, "whatever the plan was made for"
        assert result.measured is not None
        assert {span.device for span in result.measured.spans} == {"n0/0", "n0/1", "n1/0"}
        assert {span.kind for span in result.measured.spans} == {"F", "B", "optimizer"}
    assert losses == pytest.approx(wanted.losses, abs=1e-10)


@pytest.mark.thorough
@pytest.mark.slow
def test_torchrun_with_one_process_a_node(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    file = folder.ready(train=train(steps=3))
    folder.plan(schedule="gpipe")
    first, second = under_torchrun(folder, [1, 1], "train", "job.yaml", "--json", "--set", "plan.backend=torchgpipe")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert json.loads(first.out)["losses"] == pytest.approx(train_reference(Job.read(file)).losses, abs=1e-10)


def test_train_measures_plans_and_then_starts_one_process_a_replica(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    file = folder.ready((2, 1))
    job = Job.read(file, ["plan.file=", "plan.backend=fairscale", "train.steps=2"])
    result = train_everywhere(job, train_rank)
    assert result.plan.backend == "fairscale"
    assert result.losses == pytest.approx(train_reference(job).losses, abs=1e-10)


@both
def test_train_refuses_before_any_process_starts(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.training.start.start_ranks", lambda *_: pytest.fail("processes were started"))
    folder = Folder(tmp_path)
    job = Job.read(folder.ready(), [f"plan.backend={backend}"])  # a 1F1B plan
    with pytest.raises(InputError, match=r"replica 0 has warm-up depths \[2, 1\] for 3 micro-batches"):
        train_everywhere(job, train_rank)
    job = Job.read(folder.ready(slowdown=4.0), [f"plan.backend={backend}", "plan.file="])
    with pytest.raises(InputError, match="are emulated"):
        train_everywhere(job, train_rank)


def test_batch_norm_deferred_is_for_these_back_ends(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    model = {"target": "tests.support.pipes:batch_norm_net", "batch_norm": "deferred"}
    data = {"name": "random_classification", "args": {"samples": 50, "inputs": WIDTH, "classes": WIDTH, "test_samples": 20}}
    rows = ({"cuts": [3, 5], "sizes": [3, 3, 2]}, {"cuts": [8], "sizes": [2, 2]})
    file = folder.job(model=model, data=data, train=train(steps=2))
    folder.cluster(2, 1)
    folder.plan(rows, schedule="gpipe", model="tests.support.pipes:batch_norm_net")
    with pytest.raises(InputError, match="deferred needs the fairscale or torchgpipe back end"):
        folder.profile(file)
    job = Job.read(file, ["plan.backend=torchgpipe", "profiler.repeats=1", f"profiler.cache={tmp_path}", "profile="])
    result = train_everywhere(job, train_rank)
    assert len(result.losses) == 2
    assert all(math.isfinite(loss) for loss in result.losses)


# ---- the price ----


def test_sums_wait_for_the_whole_replica_and_for_each_other() -> None:
    """Two replicas on two nodes, three layers of 1 s forward and 2 s backward, cut 2 + 1: at m = 1 the last stage ends its
    backward 4 s before the first. torch sums its layer meanwhile, and layer 1 while layer 0 runs backward; one process sums both
    segments after that, in turn."""
    cluster = make_cluster([{"a": 2}, {"a": 2}])
    profile = make_profile({"a": [1.0, 1.0, 1.0]}, layer={"parameter_bytes": 10**9})
    row = {"cuts": [2, 1], "sizes": [1]}
    plan = make_plan([row, row], schedule="gpipe", model=profile.model)
    costs = Costs(profile, cluster)
    torch_s, libraries = simulate(plan, profile, cluster), [plan.model_copy(update={"backend": x}) for x in LIBRARIES]
    for other in libraries:
        one, two = [costs.all_reduce_seconds(s.owners, s.size_bytes) for s in sync_segments(other, costs)]
        assert one == pytest.approx(two / 2, rel=1e-3)
        found = simulate(other, profile, cluster)
        assert found.pipeline_seconds == torch_s.pipeline_seconds
        assert found.sync_seconds == pytest.approx(one + two)
        assert torch_s.sync_seconds == pytest.approx(one)


@both
def test_a_plan_says_for_which_back_end_it_was_priced(backend: Backend) -> None:
    cluster = make_cluster([{"a": 2}, {"a": 1}])
    profile = make_profile({"a": [1.0, 1.0, 1.0]}, layer={"parameter_bytes": 10**6})
    plan = plan_for(profile, cluster, 4, backend=backend)
    check_backend(backend, plan)
    assert plan.backend == backend
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == simulate(plan, profile, cluster).step_seconds
    assert plan.predicted.lower_bound_seconds is not None
    assert plan.predicted.lower_bound_seconds <= plan.predicted.step_seconds
    assert plan.fingerprint == plan.model_copy(update={"backend": "torch"}).fingerprint


@pytest.mark.parametrize("kind", SKIPPED)
@pytest.mark.parametrize("backend", LIBRARIES)
def test_what_skips_layers_need_have_no_gradient(backend: Backend, kind: str) -> None:
    """An AssertionError without words, in the libraries' portals."""
    (x, y), truth = batch("blocks", 6, 0), net_with_a_skip(None, kind)
    expected = mse(truth(x), y)
    expected.backward()
    found = dict(zip((n.replace("module.", "") for n, _ in truth.named_parameters()), truth.parameters(), strict=True))
    try:
        for cuts in ([2, 1, 2], [1, 1, 1, 1, 1], [2, 3], [5]):
            plan = make_plan([{"cuts": cuts, "sizes": [3, 2, 1]}], schedule="gpipe")
            engine = hetpipe.wrap(net_with_a_skip(backend, kind), plan, x, mse, backend=backend)
            assert engine.step(x, y) == pytest.approx(float(expected.detach()), abs=1e-12)
            assert engine.evaluate(x, y).loss == pytest.approx(float(expected.detach()), abs=1e-12)
            for name, p in engine.named_parameters():
                wanted = found[name.replace("module.", "")].grad
                assert p.grad is not None
                assert wanted is not None
                assert torch.allclose(p.grad, wanted, rtol=0, atol=1e-12), (cuts, name)
            engine.close()
    finally:
        torch.distributed.destroy_process_group()
