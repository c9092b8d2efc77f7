"""What the framework takes, as it is measured (`measuring.overhead`), and what plans make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from hetpipe.documents.cluster import Cluster, RuntimeOverhead
from hetpipe.documents.clusters.assumed import ALLOCATOR_FACTOR, MIB, told_of, with_assumed
from hetpipe.documents.job import ProfileSection
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.layers.model import Loss, Model, mse
from hetpipe.measuring import overhead as measuring
from hetpipe.measuring.measure import profile_cluster
from hetpipe.measuring.traffic import Flow
from hetpipe.planning.planner import make_plan as planned
from hetpipe.predict.simulator import simulate
from hetpipe.processes.world import World
from hetpipe.show.tables import beside_table, profile_table
from tests.support.ranks import cluster_of, make_plan, run_ranks
from tests.support.strategies import make_cluster, make_profile

GIB = 2**30
CPU = torch.device("cpu")


def profile_of(*overheads: DeviceOverhead) -> Profile:
    return make_profile({"a": [1.0] * 2, "b": [1.0] * 2}).model_copy(update={"overheads": overheads})


def cards(**overhead: Any) -> Cluster:
    return make_cluster([{"a": 1}, {"b": 1}], memory=24 * GIB, link={"bandwidth": 1e9}, overhead=overhead or None)


def small_model() -> Model:
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return Model(name="small", layers=layers, inputs=torch.ones(2, 4), targets=torch.ones(2, 2), loss=Loss(function=mse))


def test_an_action_takes_seconds_of_its_own_and_they_are_of_the_profile_of_each_type() -> None:
    assert 0 <= measuring.action_seconds(CPU).value < 1
    found = measuring.device_overhead(small_model(), "cpu", CPU, 2)
    assert found.action_seconds is not None
    assert (found.host_bytes_per_second or 0.0) > 1e6
    assert set(found.relative_spread) == {"action_seconds", "host_bytes_per_second"}
    assert (found.device_bytes, found.allocator_factor, found.communicator_bytes, found.transfer_overlap) == (None,) * 4
    assert found.host_copy_overlap is None, "a processor copies at once"


def stand_for_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's figures of a card of 100 bytes, of which 70 are free, 12 held, 130 were held at most and 100 used."""
    figures: dict[str, Any] = {
        "memory_allocated": 0,
        "mem_get_info": (70, 100),
        "memory_reserved": 12,
        "max_memory_reserved": 130,
        "max_memory_allocated": 100,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
    }
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_the_allocator_s_factor_is_of_a_stage_that_trains_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trained = small_model(), list[int]()
    before = [p.detach().clone() for p in model.layers.parameters()]
    real = measuring._stage_run

    def run(layers: nn.Sequential, *arguments: Any, **options: Any) -> Any:
        trained.append(len(layers))
        if len(layers) > 1:
            raise torch.OutOfMemoryError("too much")
        return real(layers, *arguments, **options)

    stand_for_a_card(monkeypatch)
    assert measuring.allocator_factor(model, CPU, 2) == measuring.Figure(1.3, 0.0)
    assert measuring.context_bytes(CPU).value == 100 - 70 - 12
    monkeypatch.setattr(measuring, "_stage_run", run)
    assert measuring.allocator_factor(model, CPU, 2) == measuring.Figure(1.3, 0.0)
    assert trained == [3, 1]  # the whole model does not fit; of half of three layers, one does
    assert all(p.grad is None for p in model.layers.parameters())
    assert all(torch.equal(x, p) for x, p in zip(before, model.layers.parameters(), strict=True))


@given(st.lists(st.floats(0, 1e-3), min_size=2, max_size=2), st.booleans())
def test_plans_take_the_mean_seconds_of_an_action_unless_the_file_says_them(seconds: list[float], said: bool) -> None:
    profile = profile_of(*(DeviceOverhead(device_type=k, action_seconds=x) for k, x in zip("ab", seconds, strict=True)))
    cluster = cards().model_copy(update={"runtime_overhead": RuntimeOverhead(action_seconds=0.0) if said else RuntimeOverhead()})
    joined = profile.joined(cluster)
    assert joined.runtime_overhead.action_seconds == pytest.approx(0 if said else sum(seconds) / 2)
    assert profile.joined(joined) == joined
    plan = make_plan([{"cuts": [2], "sizes": [1] * 3, "devices": ["n0/0"]}], model=profile.model)
    alone = simulate(plan, profile_of(), cluster).step_seconds
    more = 6 * joined.runtime_overhead.action_seconds
    assert simulate(plan, profile, cluster).step_seconds == pytest.approx(alone + more)


def test_plans_take_the_most_bytes_of_the_types_and_the_default_of_one_that_was_not_measured() -> None:
    one = DeviceOverhead(device_type="a", device_bytes=600 * MIB, communicator_bytes=10 * MIB, allocator_factor=1.02)
    other = DeviceOverhead(device_type="b", device_bytes=700 * MIB, communicator_bytes=20 * MIB, allocator_factor=1.03)
    both = with_assumed(cards(), profile_of(one, other)).runtime_overhead
    assert (both.device_bytes, both.allocator_factor, both.backward_workspace) == ((700 + 3 * 20) * MIB, 1.03, 1.0)
    part = with_assumed(cards(), profile_of(one)).runtime_overhead
    assert (part.device_bytes, part.allocator_factor) == ((600 + 3 * 2 * 36) * MIB, ALLOCATOR_FACTOR)
    assert "of these the context's, communicators', the allocator's part was measured" in told_of(cards(), profile_of(one, other))
    assert "was measured" not in told_of(cards(), profile_of(one))
    said = cards(device_bytes=5)
    assert with_assumed(said, profile_of(one, other)) is said


def test_transfers_that_do_not_hide_are_planned_as_part_of_actions_and_memory_is_assumed_all_the_same() -> None:
    for hidden, overlaps in ((0.9, True), (0.2, False)):
        profile = profile_of(*(DeviceOverhead(device_type=k, transfer_overlap=x) for k, x in (("a", 1.0), ("b", hidden))))
        found = with_assumed(profile.joined(cards()), profile).runtime_overhead
        assert found.overlap_transfers == overlaps
        assert found.device_bytes > 400 * MIB
        assert PlanOptions().reserve(profile.joined(cards())) == 0


def test_overheads_of_a_type_are_given_once() -> None:
    document = profile_of(*(2 * [DeviceOverhead(device_type="a")])).model_dump(mode="json", exclude_none=True)
    with pytest.raises(ValueError, match="overheads of 'a' are given twice"):
        Profile.parse(document, "test")


def overlapping(world: World) -> list[Any]:
    """Whether a transfer hides, once between two ranks; a third has no part in it. Then a whole profile."""
    hidden = measuring.transfer_overlap(world, Flow(2, 0), 50e6)
    options = ProfileSection(microbatch_sizes=(1,), repeats=1)
    profile = profile_cluster(small_model(), cluster_of(2, 1), world, options, torch.optim.SGD)
    return [hidden, measuring.communicator_bytes(world), profile]


def test_the_profile_of_several_ranks_on_one_host_says_what_was_not_measured() -> None:
    found = run_ranks(overlapping, cluster_of(2, 1))
    assert found[1][0] is None
    assert all(0 <= found[rank][0].value <= 1 for rank in (0, 2))
    profile: Profile = found[0][2]
    assert [x.device_type for x in profile.overheads] == ["cpu"]
    assert (profile.adapters, profile.overheads[0].transfer_overlap, found[0][1]) == ((), None, None)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(beside_table(profile))
    text = shown.get()
    assert "one flow" in text
    assert "each forward and backward more" in text
    assert "not measured, adapters (one host): each as fast as its node's fastest link" in text
    assert "not measured, held by the allocator, over in use on cpu: 1.05 on a CUDA card, 1 elsewhere" in text


def test_a_profile_says_what_trains_where_not_all_does() -> None:
    layers = [{"parameter_bytes": 2 * MIB, "trained_bytes": 0}, {"parameter_bytes": MIB}]
    for rows, trained in ((layers, ["0 B", "1.00 MiB", "1.00 MiB"]), ([{"parameter_bytes": MIB}] * 2, None)):
        table = profile_table(make_profile({"a": [1.0] * 2}, layers=rows))
        columns = {str(column.header): list(column.cells) for column in table.columns}
        assert columns.get("of these train") == trained


def test_plans_keep_to_the_memory_that_a_device_was_found_to_have() -> None:
    """Of a type that ran out, less than its cluster says; never more; the least where it was found twice."""
    cluster = make_cluster([{"a": 1, "b": 1}], memory=10_000)
    plain = make_profile({"a": [1.0] * 4, "b": [1.0] * 4}, layer={"parameter_bytes": 500, "saved_bytes_per_sample": 10})
    limited = plain.limited("a", 2_500).limited("a", 5_000)
    assert {name: kind.memory for name, kind in limited.joined(cluster).device_types.items()} == {"a": 2_500, "b": 10_000}
    assert plain.limited("a", 20_000).joined(cluster) == plain.joined(cluster)
    assert Profile.parse(limited.model_dump(mode="json"), "itself") == limited

    def peak(profile: Profile) -> int:
        found = planned(profile, cluster, 8, memory_reserve=0.0).predicted
        assert found is not None
        return found.peak_bytes.get("n0/0", 0)

    assert peak(limited) <= 2_500 < peak(plain)
