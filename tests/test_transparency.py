"""The promise: training by any plan, with any back end, is training on one device. float64, five optimizer steps, 1e-10."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from hetpipe.files.messages import InputError
from hetpipe.layers.model import as_tuple
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.runtime.backends import check_backend
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Backend
from tests.support.nets import batch, build, copied
from tests.support.ranks import cluster_of, run_ranks
from tests.support.transparency import Case, Trained, largest_difference, train_cases, train_on_one_device

THREE = {"cuts": [4, 3, 3], "sizes": [4] * 6}  # 24 samples over three devices
TWO = {"cuts": [6, 4], "sizes": [4, 4]}  # beside 8 over two
ONE = {"cuts": [10], "sizes": [3, 3, 2]}  # or 8 on one
BOTH = (THREE, TWO)
UNEVEN = ({"cuts": [4, 3, 3], "sizes": [5, 4, 3, 2]}, {"cuts": [6, 4], "sizes": [2, 3, 5, 4, 1]})

CASES = {
    "plans": [
        Case(name="[4,3,3] x 24 beside [6,4] x 8", plan=BOTH),
        Case(name="three stages beside one rank", plan=(THREE, ONE)),
        Case(name="replicas of 3, 2 and 1 stages", plan=({"cuts": [2, 3, 5], "sizes": [4, 4, 1]}, TWO, ONE)),
        Case(name="one pipeline", plan=({"cuts": [1, 8, 1], "sizes": [2, 2, 2, 2]},)),
        Case(name="one rank", plan=(ONE,)),
        Case(
            name="devices out of order",
            plan=({**THREE, "devices": ["n2/0", "n0/2", "n1/0"]}, {**TWO, "devices": ["n1/1", "n0/0"]}),
        ),
        Case(name="gpipe", plan=BOTH, schedule="gpipe"),
        Case(name="depths 5,3,1", plan=({**THREE, "warmup": [5, 3, 1]}, TWO)),
        Case(name="depths 5,3,1 beside one rank", plan=({**THREE, "warmup": [5, 3, 1]}, ONE)),
        Case(name="fewer micro-batches than stages", plan=({"cuts": [4, 3, 3], "sizes": [5, 1]}, {"cuts": [6, 4], "sizes": [2]})),
        Case(name="unequal micro-batches", plan=UNEVEN),
        Case(name="unequal micro-batches, gpipe", plan=UNEVEN, schedule="gpipe"),
        Case(name="recompute", plan=({**THREE, "recompute": True}, TWO)),
        Case(
            name="recompute everywhere, depths 5,3,1",
            plan=({**THREE, "recompute": True, "warmup": [5, 3, 1]}, {**ONE, "recompute": True}),
        ),
        Case(name="offload", plan=({**THREE, "offload": True}, TWO)),
        Case(
            name="offload everywhere, depths 5,3,1",
            plan=({**THREE, "offload": True, "warmup": [5, 3, 1]}, {**ONE, "offload": True}),
        ),
        Case(name="offload, gpipe", plan=({**THREE, "offload": True}, {**TWO, "offload": True}), schedule="gpipe"),
    ],
    "optimizers": [
        Case(name="AdamW", plan=BOTH, optimizer="AdamW"),
        Case(name="clipped", plan=BOTH, clip=0.05),
        Case(name="AdamW, clipped, three replicas", plan=(THREE, TWO, ONE), optimizer="AdamW", clip=0.05),
        Case(name="a limit above the norm", plan=BOTH, clip=1e6),
        Case(name="zero_grad by the user", plan=BOTH, zero_grad=True),
    ],
    "batches": [
        Case(
            name="a replica without samples",
            plan=BOTH,
            optimizer="AdamW",
            clip=0.05,
            shares=((24, 8), (24, 8), (20, 0), (24, 8), (24, 8)),
        ),
        Case(name="only the small replica has samples", plan=BOTH, shares=((24, 8), (0, 3), (24, 8))),
        Case(name="a batch cut short", plan=UNEVEN, shares=((14, 15), (10, 6), (13, 1), (14, 15), (1, 0))),
        Case(
            name="a batch cut short, gpipe, three replicas",
            plan=(THREE, TWO, ONE),
            schedule="gpipe",
            shares=((24, 8, 8), (11, 0, 3)),
        ),
    ],
    "tokens": [
        Case(name="tied", net="tied", plan=BOTH),
        Case(name="tied beside one rank", net="tied", plan=(THREE, ONE)),
        Case(name="tied, clipped, AdamW", net="tied", plan=(THREE, ONE), clip=0.05, optimizer="AdamW"),
        Case(
            name="tied, three replicas, cut short",
            net="tied",
            plan=(THREE, TWO, ONE),
            clip=0.05,
            shares=((24, 8, 8), (9, 8, 3), (24, 0, 8)),
        ),
        Case(name="tied, all targets of a replica ignored", net="tied", plan=(THREE, {"cuts": [6, 4], "sizes": [3]})),
        Case(name="tied, unequal micro-batches, recompute", net="tied", plan=tuple({**row, "recompute": True} for row in UNEVEN)),
        Case(
            name="class weights, three replicas, cut short",
            net="tied",
            class_weights=True,
            plan=(THREE, TWO, ONE),
            clip=0.05,
            shares=((24, 8, 8), (9, 8, 3), (24, 0, 8)),
            evaluate=(13, 0, 5),
        ),
        Case(name="class weights, unequal micro-batches, AdamW", net="tied", class_weights=True, plan=UNEVEN, optimizer="AdamW"),
        Case(
            name="class weights, micro-batches without weight",
            net="tied",
            class_weights=True,
            plan=({"cuts": [4, 3, 3], "sizes": [1] * 12}, {"cuts": [10], "sizes": [1, 2, 1]}),
            shares=((12, 4), (1, 0), (9, 3)),
        ),
    ],
    "boundaries": [
        Case(name="tuples", net="tuples", plan=BOTH),
        Case(name="tuples, unequal micro-batches", net="tuples", plan=UNEVEN, optimizer="AdamW"),
        Case(name="tuples, recompute", net="tuples", plan=({**THREE, "recompute": True}, ONE)),
        Case(name="unused output", net="unused output", plan=BOTH),
        Case(name="unused output, unequal micro-batches, AdamW", net="unused output", plan=UNEVEN, optimizer="AdamW"),
        Case(name="output used in some micro-batches", net="sometimes used output", plan=UNEVEN, reference_in_microbatches=True),
        Case(
            name="not contiguous",
            net="transposed",
            plan=({"cuts": [3, 4, 3], "sizes": [4] * 3}, {"cuts": [5, 5], "sizes": [3, 2]}),
        ),
        Case(name="not contiguous, gpipe", net="transposed", plan=({"cuts": [1, 2, 7], "sizes": [1, 2]}, ONE), schedule="gpipe"),
        Case(name="in place", net="in place", plan=({"cuts": [4, 3, 3], "sizes": [4, 4]}, TWO)),
        Case(
            name="in place, recompute", net="declared in place", plan=({**THREE, "recompute": True}, {**TWO, "recompute": True})
        ),
        Case(
            name="stages without parameters",
            net="identities",
            plan=({"cuts": [4, 3, 3], "sizes": [4, 4]}, {"cuts": [1, 9], "sizes": [2]}),
        ),
    ],
    "pairs": [
        Case(name="pairs", net="pairs", plan=BOTH),
        Case(
            name="pairs, unequal micro-batches, recompute", net="pairs", plan=tuple({**row, "recompute": True} for row in UNEVEN)
        ),
        Case(
            name="pairs, three replicas, cut short, clipped",
            net="pairs",
            plan=(THREE, TWO, ONE),
            optimizer="AdamW",
            clip=0.01,
            shares=((24, 8, 8), (9, 8, 3), (24, 0, 8)),
            evaluate=(13, 0, 5),
        ),
        Case(name="pairs, LoRA, emulated", net="pairs, LoRA", plan=(THREE, ONE), emulated=True),
    ],
    "parameters": [
        Case(name="first stage frozen", net="first stage frozen", plan=BOTH, optimizer="AdamW", clip=0.05),
        Case(name="first stage frozen, beside one rank", net="first stage frozen", plan=(THREE, ONE), emulated=True, clip=0.05),
        Case(
            name="first two stages frozen",
            net="first two stages frozen",
            plan=(THREE, TWO, ONE),
            optimizer="AdamW",
            clip=0.05,
            shares=((24, 8, 8), (11, 0, 3)),
        ),
        Case(
            name="first two stages frozen, recompute, depths 5,3,1",
            net="first two stages frozen",
            evaluate=(13, 5),
            plan=({**THREE, "recompute": True, "warmup": [5, 3, 1]}, ONE),
        ),
        Case(name="first stage and a part frozen, unequal", net="first stage and a part frozen", plan=(*UNEVEN, ONE), clip=0.05),
        Case(name="first stage and a part frozen, gpipe", net="first stage and a part frozen", schedule="gpipe", plan=BOTH),
        Case(name="layer frozen", net="layer frozen", plan=BOTH, optimizer="AdamW"),
        Case(name="middle stage frozen", net="middle stage frozen", plan=(THREE, ONE)),
        Case(name="last stage frozen", net="last stage frozen", plan=BOTH),
        Case(name="unused parameter", net="unused parameter", plan=BOTH, optimizer="AdamW", clip=0.05),
        Case(
            name="unused parameter, a replica without samples",
            net="unused parameter",
            plan=BOTH,
            optimizer="AdamW",
            shares=((24, 8), (5, 0)),
        ),
        Case(name="few bits of its own", net="few bits of its own", plan=(THREE, TWO, ONE), optimizer="AdamW", clip=0.05),
        Case(
            name="few bits of its own, emulated, recompute",
            net="few bits of its own",
            emulated=True,
            plan=({**THREE, "recompute": True}, ONE),
        ),
        Case(name="shared modules", net="shared modules", plan=BOTH),
        Case(name="shared modules, clipped", net="shared modules", plan=(THREE, TWO, ONE), optimizer="AdamW", clip=0.05),
    ],
    "adapters": [
        Case(name="LoRA", net="LoRA", plan=BOTH, optimizer="AdamW", clip=0.05),
        Case(name="LoRA beside one rank, recompute", net="LoRA", plan=({**THREE, "recompute": True}, ONE)),
        Case(name="LoRA in the upper half", net="LoRA in the upper half", plan=(THREE, TWO, ONE), optimizer="AdamW"),
        Case(name="LoRA in the lower half", net="LoRA in the lower half", plan=(THREE, ONE)),
        Case(name="DoRA and norms", net="DoRA and norms", plan=(THREE, ONE), optimizer="AdamW", clip=0.05),
        Case(name="tied, LoRA, embedding and head train", net="tied, LoRA", plan=(THREE, ONE), optimizer="AdamW", clip=0.05),
        Case(name="nf4, rsLoRA", net="nf4, rsLoRA", plan=(THREE, ONE), optimizer="AdamW"),
        Case(name="nf4, rsLoRA, recompute, three replicas", net="nf4, rsLoRA", plan=({**THREE, "recompute": True}, TWO, ONE)),
        Case(name="int8, DoRA", net="int8, DoRA", plan=(THREE, ONE), clip=0.05, evaluate=(7, 3)),
        Case(name="emulated, nf4, rsLoRA", net="nf4, rsLoRA", plan=(THREE, ONE), emulated=True),
    ],
    "emulated": [
        Case(name="emulated", plan=BOTH, emulated=True, clip=0.05),
        Case(name="emulated, evaluate between steps", plan=UNEVEN, emulated=True, evaluate=(7, 11)),
        Case(name="emulated, recompute", net="tied", plan=({**THREE, "recompute": True}, ONE), emulated=True),
        Case(name="emulated, offload", net="tied", plan=({**THREE, "offload": True}, ONE), emulated=True),
        Case(name="emulated, offload, tuples", net="tuples", plan=({**THREE, "offload": True}, ONE), emulated=True),
        Case(name="emulated, offload, in place", net="in place", plan=({**THREE, "offload": True}, TWO), emulated=True),
        Case(name="emulated, unused output", net="unused output", plan=UNEVEN, emulated=True),
        Case(name="emulated, in place", net="in place", plan=(THREE, TWO), emulated=True),
    ],
    "lengths": [
        Case(name="lengths", net="tied", plan=BOTH, lengths=(6, 2, 5, 6, 1)),
        Case(
            name="lengths, recompute, AdamW, evaluate",
            net="tied",
            plan=({**THREE, "recompute": True}, ONE),
            optimizer="AdamW",
            lengths=(3, 6, 2),
            clip=0.05,
            evaluate=(13, 5),
        ),
        Case(
            name="lengths, three replicas, cut short",
            net="tied",
            plan=(THREE, TWO, ONE),
            lengths=(2, 6, 4, 3),
            shares=((24, 8, 8), (9, 8, 3), (24, 0, 8)),
            evaluate=(13, 0, 5),
        ),
        Case(
            name="lengths, unequal micro-batches, class weights, gpipe",
            net="tied",
            plan=UNEVEN,
            class_weights=True,
            lengths=(5, 6, 3),
            schedule="gpipe",
        ),
        Case(name="lengths, emulated", net="tied", plan=BOTH, emulated=True, lengths=(6, 2, 5), evaluate=(7, 11)),
        Case(name="lengths of pictures", net="pictures", plan=({**THREE, "sizes": [4, 4]}, ONE), lengths=(7, 5, 8)),
    ],
    "evaluation": [
        Case(name="evaluate between steps", plan=BOTH, evaluate=(37, 12)),
        Case(name="evaluate tokens, one replica without samples", net="tied", plan=BOTH, evaluate=(13, 0), clip=0.05),
        Case(name="evaluate tuples, unequal micro-batches", net="tuples", plan=UNEVEN, evaluate=(7, 11)),
        Case(name="evaluate dropout and BatchNorm", net="dropout and BatchNorm", plan=BOTH, evaluate=(24, 9), steps=0),
    ],
}
ALL = [(family, case) for family, cases in CASES.items() for case in cases]


LIBRARIES: tuple[Backend, ...] = ("fairscale", "torchgpipe")


def applies(case: Case) -> bool:
    """Whether the libraries can run the case: one process a replica, on one node, all forwards first."""
    return not case.emulated and not any(row.keys() & {"warmup", "devices", "offload"} for row in case.plan)


def cases_of_libraries() -> list[Case]:
    """The cases that they run; those that differ from another only in being gpipe, once."""
    same = {str(case).removesuffix(",_gpipe") for _, case in ALL if case.schedule == "gpipe"}
    wanted = [case for _, case in ALL if applies(case) and str(case) not in same | {"gpipe"}]
    return [dataclasses.replace(case, schedule="gpipe") for case in wanted]


ALL_OF_LIBRARIES = [(backend, case) for case in cases_of_libraries() for backend in LIBRARIES]


Ran = list[list[Trained | None]] | RankFailure


@functools.cache
def run_family(family: str) -> Ran:
    """Per case, what each of six ranks holds: one spawn a family. A failure is kept, so that it is not waited for again."""
    return _run(CASES[family], "torch", cluster_of(3, 2, 1))


@functools.cache
def run_library(backend: Backend) -> dict[Case, list[Trained | None]] | RankFailure:
    """What each of three processes, one a replica, holds after each case: one spawn a back end."""
    cases = [case for b, case in ALL_OF_LIBRARIES if b == backend]
    ran = _run(cases, backend, cluster_of(1, 1, 1))
    return ran if isinstance(ran, RankFailure) else dict(zip(cases, ran, strict=True))


def _run(cases: list[Case], backend: Backend, cluster: Cluster) -> Ran:
    try:
        by_rank = run_ranks(train_cases, cluster, cases, backend)
    except RankFailure as failure:
        return failure
    return [list(row) for row in zip(*by_rank, strict=True)]


@functools.cache
def truth_of(case: Case) -> Trained:
    return train_on_one_device(case)


def results_of(family: str, case: Case) -> list[Trained]:
    ran = run_family(family)
    if isinstance(ran, RankFailure):
        raise ran
    found = [r for r in ran[CASES[family].index(case)] if r is not None]
    assert len(found) == len(case.make_plan().device_ids)
    return found


def check_against_one_device(results: list[Trained], truth: Trained) -> None:
    assert largest_difference(results, truth) < 1e-10
    for result in results:
        assert result.losses == results[0].losses, "the ranks return different losses"
        assert result.losses == pytest.approx(truth.losses, rel=0, abs=1e-10)
        assert result.norms == results[0].norms, "the norm has different bits on different ranks"
        assert result.norms == pytest.approx(truth.norms, rel=1e-12)
        assert result.without_gradient == truth.without_gradient & set(result.state)


@pytest.mark.parametrize(("family", "case"), ALL, ids=[str(case) for _, case in ALL])
def test_training_by_a_plan_is_training_on_one_device(family: str, case: Case) -> None:
    check_against_one_device(results_of(family, case), truth_of(case))


@pytest.mark.parametrize(("backend", "case"), ALL_OF_LIBRARIES, ids=str)
def test_training_with_a_library_is_training_on_one_device(backend: Backend, case: Case) -> None:
    ran, truth = run_library(backend), truth_of(case)
    if isinstance(ran, RankFailure):
        raise ran
    results = [r for r in ran[case] if r is not None]
    assert len(results) == len(case.plan)
    check_against_one_device(results, truth)
    assert all(set(result.state) == set(truth.state) for result in results), "names are those of the whole model"
    check_evaluations(results, truth)


NOT_FOR_LIBRARIES = [case for _, case in ALL if not case.emulated and (not applies(case) or case.schedule == "1f1b")]


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("case", NOT_FOR_LIBRARIES, ids=str)
def test_what_a_library_cannot_run_is_refused(backend: Backend, case: Case) -> None:
    """As the case stands: with 1F1B or other depths, or with a replica on several nodes."""
    plan = case.make_plan()
    with pytest.raises(InputError) as caught:
        check_backend(backend, plan)
    message = str(caught.value)
    assert message.startswith(f"the back end '{backend}' cannot run this plan; plan with --backend {backend}, or")
    for r, replica in enumerate(plan.replicas):
        m, depths = len(replica.microbatch_sizes), list(replica.depths(plan.schedule))
        early = f"replica {r} has warm-up depths {depths} for {m} micro-batches, and this back end runs gpipe only"
        assert (early in message) == (min(depths) < m)
        assert (f"replica {r} lies on the nodes" in message) == ("devices" in case.plan[r])
        assert (f"replica {r} offloads activations to the host in" in message) == case.plan[r].get("offload", False)


@pytest.mark.parametrize("case", CASES["emulated"], ids=str)
def test_all_memory_of_a_step_is_given_back(case: Case) -> None:
    for result in results_of("emulated", case):
        assert min(result.memory) > 0
        assert result.memory == [result.memory[0]] * case.steps


@pytest.mark.parametrize(("family", "case"), [(f, c) for f, c in ALL if c.steps], ids=[str(c) for _, c in ALL if c.steps])
def test_the_case_is_one(family: str, case: Case) -> None:
    """Every number that can move has moved by much more than the tolerance, and clipping has clipped."""
    truth, before = truth_of(case), build(case.net, case.dtype)
    trained = {name for name, p in before.named_parameters(remove_duplicate=False) if p.requires_grad} - truth.without_gradient
    still = {
        name
        for name, value in before.state_dict().items()
        if float((copied(value).double() - truth.state[name].double()).abs().max()) < 1e-4
    }
    assert not trained & still
    if case.clip is not None:
        bites = [norm > 2 * case.clip for norm in truth.norms]
        assert bites == [case.name != "a limit above the norm"] * case.steps


def test_a_whole_micro_batch_of_the_tokens_is_ignored() -> None:
    (labels,) = as_tuple(batch("tied", 32, 0)[1])
    assert (labels[4:8] == -100).all()
    assert 0 < int((labels == -100).sum()) < labels.numel() - 50


@pytest.mark.parametrize(("family", "case"), [(f, c) for f, c in ALL if c.evaluate], ids=[str(c) for _, c in ALL if c.evaluate])
def test_evaluation_is_that_of_one_device(family: str, case: Case) -> None:
    truth = truth_of(case)
    assert len(truth.evaluations) == max(1, case.steps)
    check_evaluations(results_of(family, case), truth)


def check_evaluations(results: list[Trained], truth: Trained) -> None:
    for result in results:
        for found, wanted in zip(result.evaluations, truth.evaluations, strict=True):
            assert found.weight == pytest.approx(wanted.weight, rel=1e-12)
            assert found.counted == wanted.counted
            assert found.loss == pytest.approx(wanted.loss, abs=1e-10)
            assert found.metric == (None if wanted.metric is None else pytest.approx(wanted.metric, abs=1e-12))


def test_evaluation_leaves_batch_norm_alone() -> None:
    case = CASES["evaluation"][-1]
    before = build(case.net).state_dict()
    assert any("running_mean" in name for name in before)
    for result in results_of("evaluation", case):
        assert all(torch.equal(value, before[name]) for name, value in result.state.items())


def test_the_comparison_can_fail() -> None:
    """One weight of the one device nudged by 1e-6, or a replica's mean taken for the whole batch's, is seen."""
    case = CASES["plans"][0]
    nudged = build(case.net)
    with torch.no_grad():
        nudged.get_parameter("5.linear.weight")[0, 0] += 1e-6
    results = results_of("plans", case)
    assert largest_difference(results, train_on_one_device(case, layers=nudged)) > 1e-8
    smaller = Case(name="the share of the first replica only", plan=(THREE,))
    assert largest_difference(results, train_on_one_device(smaller)) > 1e-3
    with pytest.raises(AssertionError, match="a replica lacks layers"):
        largest_difference(results[1:], truth_of(case))
