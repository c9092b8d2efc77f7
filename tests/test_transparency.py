"""The promise: training by any plan, with any back end, is training on one device. float64, five optimizer steps, 1e-10."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Backend
from hetpipe.files.messages import InputError
from hetpipe.layers.model import as_tuple
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.runtime.backends import check_backend
from tests.support.nets import batch, build, copied
from tests.support.ranks import cluster_of, run_ranks
from tests.support.transparency import Case, Trained, largest_difference, train_cases, train_on_one_device
from tests.support.transparency_cases import CASES, THREE

ALL = [(family, case) for family, cases in CASES.items() for case in cases]
FURTHER = "split further"  # `make test-all` runs these, too


def marked(rows: Sequence[tuple[str, Case]]) -> list[Any]:
    """Families and cases for parametrize."""
    return [pytest.param(*row, marks=pytest.mark.thorough if row[0] == FURTHER else (), id=str(row[1])) for row in rows]


LIBRARIES: tuple[Backend, ...] = ("fairscale", "torchgpipe")


def applies(case: Case) -> bool:
    """Whether the libraries can run the case: one process a replica, on one node, all forwards first."""
    return not case.emulated and not any(row.keys() & {"warmup", "devices", "offload", "widths"} for row in case.plan)


def cases_of_libraries() -> list[Case]:
    """The cases that they run; those that differ from another only in being gpipe, once."""
    same = {str(case).removesuffix(",_gpipe") for _, case in ALL if case.schedule == "gpipe"}
    wanted = [case for _, case in ALL if applies(case) and str(case) not in same | {"gpipe"}]
    return [dataclasses.replace(case, schedule="gpipe") for case in wanted]


# Each case with one library, by turns; `make test-all` runs it with the other one, too.
BY_TURNS = [(LIBRARIES[number % 2], case) for number, case in enumerate(cases_of_libraries())]
OTHERS = [(LIBRARIES[1 - number % 2], case) for number, case in enumerate(cases_of_libraries())]


Ran = list[list[Trained | None]] | RankFailure


@functools.cache
def run_family(family: str) -> Ran:
    """Per case, what each of six ranks holds, or seven: one spawn a family. A failure is kept, so that it is not waited for
    again."""
    return _run(CASES[family], "torch", cluster_of(4 if "split" in family else 3, 2, 1))


@functools.cache
def run_library(backend: Backend, *, others: bool) -> dict[Case, list[Trained | None]] | RankFailure:
    """What each of three processes, one a replica, holds after each case: two spawns a back end."""
    cases = [case for b, case in (OTHERS if others else BY_TURNS) if b == backend]
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


@pytest.mark.parametrize(("family", "case"), marked(ALL))
def test_training_by_a_plan_is_training_on_one_device(family: str, case: Case) -> None:
    check_against_one_device(results_of(family, case), truth_of(case))


@pytest.mark.parametrize(
    ("backend", "case"), [*BY_TURNS, *(pytest.param(*row, marks=pytest.mark.thorough) for row in OTHERS)], ids=str
)
def test_training_with_a_library_is_training_on_one_device(backend: Backend, case: Case) -> None:
    ran, truth = run_library(backend, others=(backend, case) in OTHERS), truth_of(case)
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


@pytest.mark.parametrize(("family", "case"), marked([(f, c) for f, c in ALL if c.steps]))
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


@pytest.mark.parametrize(("family", "case"), marked([(f, c) for f, c in ALL if c.evaluate]))
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
