"""What is said where nothing fits, against the oracle: that nothing fits for certain, and that each change that a message names
is enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from bench.planner.draws import wide
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.chain import Chain
from hetpipe.partitioners.even import Even
from hetpipe.partitioners.exact.best_first import ExactSearch
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.partitioners.memory_fit.obstacle import Obstacle, explain, fits, refuse, with_spares
from hetpipe.partitioners.memory_fit.packing import Packer, samples_of
from hetpipe.partitioners.memory_fit.shortage import with_more_memory
from hetpipe.partitioners.search.planner import Planner
from hetpipe.planning.partition import Partitioner, PartitionError, Problem
from hetpipe.planning.registry import rules
from tests.support.plans import checked
from tests.support.strategies import UNHURRIED, make_cluster, make_problem, make_profile, problems


def planned(problem: Problem, partitioner: Partitioner) -> bool:
    """Whether there is a plan."""
    try:
        partitioner(problem)
    except PartitionError as error:
        if error.out_of_time:
            raise
        return False
    return True


def scaled(problem: Problem, part: float) -> Problem:
    """So much of the memory."""
    document = problem.cluster.model_dump()
    for kind in document["device_types"].values():
        kind["memory"] = int(kind["memory"] * part)
    return replace(problem, cluster=Cluster.parse(document, "the scaled cluster"))


def least_memory(problem: Problem, most: float, one_pipeline: bool = False, *, whole: bool = False) -> float:
    """How much of the memory is about the least in which the batch is packed, up to so much of it."""
    low, high = 0.0, most
    for _ in range(14):
        middle = (low + high) / 2
        held = samples_of(Packer(scaled(problem, middle)).packing(one_pipeline, whole))
        low, high = (low, middle) if held >= problem.global_batch else (middle, high)
    return high


def at_the_edge(problem: Problem, data: st.DataObject, *, one_pipeline: bool = False) -> Problem:
    """The same with memory about as tight as can be, a little more or less, so that each change may be enough; and with
    inputs, which the first stage receives for all samples of the step."""
    profile = problem.profile.model_dump() | {"input_bytes_per_sample": data.draw(st.sampled_from([0, 300, 1500]))}
    problem = replace(problem, profile=Profile.parse(profile, "the profile"))
    least = least_memory(problem, 64.0, one_pipeline)
    return scaled(problem, least * data.draw(st.sampled_from([0.7, 0.85, 0.95, 0.99, 1.0, 1.02])))


def changes(problem: Problem, message: str, close: float = 0.0) -> Iterator[tuple[str, Problem, Problem | None]]:
    """Each change that a message names: the problem with it, and with one less of it; of bytes, a part less."""
    found = re.search(r"give (each .* more memory)", message)
    more = {kind: int(part) for kind, part in re.findall(r"each '(\w+)' (\d+) bytes", found[1] if found else "")}
    moved = len(more) > 1 and message.startswith(
        ("uneven-data-parallel", "memory-layers", "even-pipelines", "cephalo", "zorse")
    )  # the plans depend on memory
    for kind, part in more.items():
        less = None if moved else with_more_memory(problem, more | {kind: part - 1 - int(close * part)})
        yield "memory", with_more_memory(problem, more), less
    for batch in map(int, re.findall(r"use a global batch of (\d+)", message)):
        bigger = replace(problem, global_batch=batch + 1) if batch + 1 < problem.global_batch else None
        yield "batch", replace(problem, global_batch=batch), bigger
    for number, kind in re.findall(r"add (\d+) '(\w+)'", message):
        fewer = with_spares(problem, kind, int(number) - 1) if int(number) > 1 else None
        yield "devices", with_spares(problem, kind, int(number)), fewer
    if "allow recompute" in message:
        yield "recompute", replace(problem, allow_recompute=True), None
    if "set the memory reserve" in message:
        yield "reserve", replace(problem, memory_reserve=0.0), None
    if "allow the schedule 1f1b" in message:
        yield "schedule", replace(problem, schedule="auto"), None


class TestCertain:
    @settings(max_examples=30, **UNHURRIED)
    @given(st.data())
    def test_nothing_fits_where_that_is_said_and_a_plan_where_one_was_packed(self, data: st.DataObject) -> None:
        problem = at_the_edge(data.draw(problems(most_devices=3, most_layers=4, most_batch=5)), data)
        certain, packed, found = Obstacle(problem, False).certain(), fits(problem), planned(problem, Exhaustive())
        event(f"certain: {certain}, packed: {packed}, found: {found}")
        assert not (certain and found)
        assert not packed or found

    @pytest.mark.parametrize("seed", [303, 323, 329, 334, 357])
    def test_the_search_has_a_plan_where_one_was_packed(self, seed: int) -> None:
        """Without the exact search, which only few devices have. The search for quick pipelines finds none for these."""
        problem = replace(wide(seed), deadline_seconds_per_step=None, max_price_per_hour=None)
        problem = scaled(problem, least_memory(problem, 4.0, whole=True))
        assert fits(problem)
        with Planner(problem) as planner:
            plan = planner.run()
        assert plan is not None
        checked(problem, plan)

    @settings(max_examples=20, **UNHURRIED)
    @given(st.data())
    def test_one_pipeline(self, data: st.DataObject) -> None:
        problem = at_the_edge(data.draw(problems(most_devices=4, most_layers=5)), data, one_pipeline=True)
        obstacle, found = Obstacle(problem, True), planned(problem, Chain())
        certain, packed = obstacle.certain(), obstacle.enough(problem)
        event(f"certain: {certain}, packed: {packed}, found: {found}")
        assert not (certain and found)
        assert not packed or found

    @settings(max_examples=20, **UNHURRIED)
    @given(problems(most_devices=3, most_layers=4, most_batch=5), st.sampled_from([0.2, 0.5, 0.9, 1.5]))
    def test_under_a_price(self, problem: Problem, price: float) -> None:
        problem = replace(problem, max_price_per_hour=price)
        certain, found = Obstacle(problem, False).certain(), planned(problem, Exhaustive())
        event(f"certain: {certain}, found: {found}")
        assert not (certain and found)

    def test_pipelines_side_by_side_share_what_is_held_for_the_whole_step(self) -> None:
        """The whole model on one device takes 400 + 100 a sample: 3 samples in each of 2."""
        profile = make_profile({"a": [1.0]}, layer={"parameter_bytes": 100}).model_dump()
        profile["input_bytes_per_sample"] = 100
        problem = make_problem(make_cluster([{"a": 2}], memory=700), Profile.parse(profile, "profile"), 9)
        for one, samples in ((False, [3, 3]), (True, [3])):
            assert [x.samples for x in Packer(problem).packing(one)] == samples
            assert Obstacle(problem, one).certain()
        assert not Obstacle(replace(problem, global_batch=6), False).certain()
        assert Obstacle(replace(problem, global_batch=6), True).certain()

    def test_a_layer_that_fits_only_with_another(self) -> None:
        """The second layer alone has buffers for what it receives; with the first, which does not train, it has none."""
        layer = {"parameter_bytes": 100, "saved_bytes_per_sample": 50, "output_bytes_per_sample": 100}
        profile = make_profile({"a": [1.0, 1.0]}, layer=layer, layers=[{"trained_bytes": 0}, {}])
        problem = make_problem(make_cluster([{"a": 1}] * 2, memory=650), profile, 2)
        assert Packer(problem).peak(0, 1, 1, 1)[1, 2] > 650
        assert not Obstacle(problem, False).certain()
        assert fits(problem)
        assert planned(problem, Auto())


class TestSmallestChange:
    @settings(max_examples=12, **UNHURRIED)
    @given(st.data())
    def test_each_change_is_enough_and_no_less_was_found_to_be(self, data: st.DataObject) -> None:
        one = data.draw(st.booleans())
        problem = at_the_edge(data.draw(problems(most_devices=3, most_layers=4)), data, one_pipeline=one)
        partitioner = Chain() if one else Auto()
        assume(not Obstacle(problem, one).enough(problem) and not planned(problem, partitioner))
        message = str(explain(problem, one_pipeline=one))
        assert re.search(r"layer \d \('layer\.\d'\)", message)
        assert re.search(r"\d+ bytes .*missing.* '[abc]'|on a '[abc]'.* \d+ bytes .*missing", message)
        found = list(changes(problem, message, close=0.002))
        assert "memory" in [name for name, _, _ in found]
        for name, enough, less in found:
            event(name)
            assert planned(enough, partitioner), name
            assert less is None or not Obstacle(problem, one).enough(less), name

    @settings(max_examples=10, **UNHURRIED)
    @given(problems(most_devices=3, most_layers=4))
    def test_the_price(self, problem: Problem) -> None:
        assume(planned(problem, Auto()))
        with pytest.raises(PartitionError) as caught:
            Auto()(replace(problem, max_price_per_hour=0.4))
        (least,) = re.findall(r"raise --max-price-per-hour to ([\d.]+)", str(caught.value))
        assert planned(replace(problem, max_price_per_hour=float(least)), Exhaustive())
        assert not fits(replace(problem, max_price_per_hour=float(least) * 0.998))


def test_hundreds_of_devices_without_memory_are_refused_at_once() -> None:
    """400 bytes for a layer; 128 devices of two types have 350 and 300."""
    layer = {"parameter_bytes": 100, "saved_bytes_per_sample": 10}
    profile = make_profile({"a": [1.0] * 24, "b": [2.0] * 24}, layer=layer)
    cluster = make_cluster([{"a": 8}, {"b": 8}] * 8, memory={"a": 350, "b": 300})
    problem = make_problem(cluster, profile, 256)
    message = r"layer \d+ .* on a 'a', which has 350 bytes: 60 bytes .*It would fit if you give each 'a' (\d+) bytes"
    with pytest.raises(PartitionError, match=message) as caught:
        refuse(problem)
    for _, enough, less in changes(problem, str(caught.value), close=0.002):
        refuse(enough)
        assert fits(enough)
        assert less is None or not fits(less)


def test_what_is_missing_on_a_large_cluster_is_said_without_a_search_of_single_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 layers of 400 bytes, one for each device; the first holds the inputs of all samples of its pipeline, 20 bytes each."""
    layer = {"parameter_bytes": 100, "saved_bytes_per_sample": 10}
    profile = make_profile({"a": [1.0] * 24, "b": [2.0] * 24}, layer=layer)
    profile = Profile.parse(profile.model_dump() | {"input_bytes_per_sample": 20}, "the profile")
    cluster = make_cluster([{"a": 8}, {"b": 8}] * 8, memory={"a": 600, "b": 600})
    monkeypatch.setattr(ExactSearch, "run", lambda search: pytest.fail("single devices were searched"))
    problem = make_problem(cluster, profile, 256)
    with pytest.raises(PartitionError, match="45 of the 256 samples of a step are the most that were found to fit"):
        Auto()(problem)


@pytest.mark.parametrize(
    ("each", "backend", "proven"), [(390, "torch", True), (410, "torch", True), (610, "torch", True), (610, "fairscale", False)]
)
def test_what_is_not_proven_is_not_said_to_be(each: int, backend: str, proven: bool) -> None:
    """25 layers of 400 bytes, and 24 devices of eight types: none holds a layer, or each holds one. On 26 devices there would be
    room, but for pipelines that stay within a node, of which the bound does not know."""
    kinds = "abcdefgh"
    profile = make_profile({kind: [1.0] * 25 for kind in kinds}, layer={"parameter_bytes": 100})
    cluster = make_cluster([{kind: 3 + (backend != "torch")} for kind in kinds], memory=dict.fromkeys(kinds, each))
    error = explain(make_problem(cluster, profile, 4, backend=backend))
    assert ("no plan fits the memory" in str(error)) == proven
    assert ("there may be one" in str(error)) != proven


class TestBaselines:
    @settings(max_examples=30, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5), st.sampled_from(rules()))
    def test_the_memory_that_a_baseline_names(self, problem: Problem, baseline: Partitioner) -> None:
        try:
            baseline(problem)
            return
        except PartitionError as error:
            message = str(error)
        for name, enough, less in changes(problem, message):
            event(f"{type(baseline).__name__} {name}")
            assert planned(enough, baseline)
            assert less is None or not planned(less, baseline)


def test_memory_kept_in_reserve_is_told_from_what_a_device_has() -> None:
    """A layer needs 400 bytes; of 420 all but 63 may be used."""
    layer = {"parameter_bytes": 100, "saved_bytes_per_sample": 10}
    problem = make_problem(make_cluster([{"a": 1}], memory=420), make_profile({"a": [1.0]}, layer=layer), 1)
    kept = replace(problem, memory_reserve=0.15)
    with pytest.raises(PartitionError, match="on a 'a', which has 357 bytes without the memory reserve of 15%: ") as caught:
        refuse(kept)
    assert "set the memory reserve of 15% to 0" in str(caught.value)
    with pytest.raises(PartitionError, match="has 357 bytes without the memory reserve of 15%: 53 bytes are missing"):
        Even()(kept)
    refuse(problem)


def test_a_size_that_no_device_can_use_is_not_packed() -> None:
    """Type a was measured at a size of 1 only over two devices, of which no node has as many; the batch is a sample."""
    layer = {"parameter_bytes": 10, "output_bytes_per_sample": 1, "saved_bytes_per_sample": 1}
    document = make_profile({"a": [1.0, 1.0]}, sizes=(2,), layer=layer).model_dump()
    (alone,) = document["measurements"]
    split = alone | {
        "tensor_parallel": 2,
        "microbatch_sizes": [1],
        "forward_seconds": alone["forward_seconds"][:1],
        "backward_seconds": alone["backward_seconds"][:1],
    }
    profile = Profile.parse(document | {"measurements": [alone, split]}, "the profile")
    with pytest.raises(PartitionError, match="no plan fits the memory of the cluster"):
        Auto()(make_problem(make_cluster([{"a": 1}], memory=20), profile, 1))


def test_a_size_above_the_batch_is_packed_too() -> None:
    """Type a was measured at 4 only, and b, which has no memory, at 3: a does all three samples in one micro-batch."""
    layer = {"parameter_bytes": 10, "output_bytes_per_sample": 1, "saved_bytes_per_sample": 1}
    document = make_profile({"a": [1.0, 1.0], "b": [5.0, 5.0]}, sizes=(4,), layer=layer).model_dump()
    a, b = document["measurements"]
    profile = Profile.parse(document | {"measurements": [a, b | {"microbatch_sizes": [3]}]}, "the profile")
    problem = make_problem(make_cluster([{"a": 1}, {"b": 1}], memory={"a": 10**9, "b": 10}), profile, 3)
    assert planned(problem, Exhaustive())
    assert fits(problem)
