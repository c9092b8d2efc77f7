from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from hetpipe.documents.cluster import LinkBetween
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.seats import owners_of
from hetpipe.files.messages import InputError
from hetpipe.predict.cost import Costs, RingParts, StageMemory, most_in_flight
from hetpipe.predict.sums import sync_segments
from tests.support.strategies import make_cluster, make_profile

LAYERS: list[dict[str, Any]] = [
    {"parameter_bytes": 100, "output_bytes_per_sample": 10, "saved_bytes_per_sample": 30, "buffer_bytes": 1},
    {"parameter_bytes": 200, "output_bytes_per_sample": 20, "saved_bytes_per_sample": 50},
    {"parameter_bytes": 300, "output_bytes_per_sample": 5, "saved_bytes_per_sample": 40},
]


FROZEN = [layer | {"trained_bytes": 0} for layer in LAYERS[:2]] + LAYERS[2:]


def costs(layers: list[dict[str, Any]] | None = None, **cluster: Any) -> Costs:
    profile = make_profile({"a": [1.0, 2.0, 4.0]}, sizes=(1, 2, 4), layers=layers or LAYERS, fixed=0.5, optimizer=0.1)
    return Costs(profile, make_cluster([{"a": 2}, {"a": 2}], **cluster))


def test_types_that_the_cluster_lacks_do_not_make_its_messages_larger() -> None:
    """Type b gives twice the bytes to the next layer. If one of the cluster was not measured, the error lists all that were."""
    profile = make_profile({"a": [1.0, 2.0, 4.0], "b": [1.0, 2.0, 4.0]}, layers=LAYERS)
    wide = {"output_bytes_per_sample": (20, 40, 10)}
    first, second = profile.measurements
    profile = profile.model_copy(update={"measurements": (first, second.model_copy(update=wide))})
    both, alone = (Costs(profile, make_cluster(nodes)).profile for nodes in ([{"a": 1, "b": 1}], [{"a": 2}]))
    assert both.output_bytes.tolist() == [20, 40, 10]
    assert alone.output_bytes.tolist() == [10, 20, 5]
    with pytest.raises(InputError, match="no measurement of device type 'c'; known: a, b"):
        Costs(profile, make_cluster([{"c": 1}])).stage_seconds("c", 0, 1, 1)


def replica(*cuts: int, devices: list[str], sizes: tuple[int, ...] = (1, 1)) -> ReplicaPlan:
    ends = zip((0, *cuts), (*cuts, 3), strict=True)
    stages = tuple(StagePlan(layers=end, devices=(d,)) for end, d in zip(ends, devices, strict=True))
    return ReplicaPlan(microbatch_sizes=sizes, stages=stages)


class TestSeconds:
    def test_sums_over_the_range(self) -> None:
        assert costs().stage_seconds("a", 1, 3, 1) == (6.0, 12.0)

    def test_recompute_runs_the_forward_again(self) -> None:
        assert costs().stage_seconds("a", 1, 3, 1, recompute=True) == (6.0, 18.0)

    def test_each_action_has_the_overhead_once(self) -> None:
        assert costs(overhead={"action_seconds": 0.5}).stage_seconds("a", 0, 1, 1, recompute=True) == (1.5, 3.5)

    def test_linear_between_measured_sizes_and_beyond(self) -> None:
        """Half of the time is fixed: 1, 1.5, 2, 2.5 for 1 to 4 samples."""
        found = [costs().stage_seconds("a", 0, 1, b)[0] for b in (1, 2, 3, 4, 6)]
        assert found == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.5])

    def test_a_stage_below_all_that_trains_has_no_backward(self) -> None:
        """Layers 0 and 1 do not train, whatever was measured of their backwards; nor is their forward run again."""
        of = costs(FROZEN, overhead={"action_seconds": 0.5})
        assert [of.has_backward(hi) for hi in (1, 2, 3)] == [False, False, True]
        assert of.stage_seconds("a", 0, 2, 1, recompute=True) == (3.5, 0.0)
        assert of.stage_seconds("a", 1, 3, 1) == (6.5, 8.5)
        assert of.stage_seconds("a", 1, 3, 1, recompute=True) == (6.5, 12.5)
        assert of.backward_below("a", 1, 3, 1, recompute=True).tolist() == [0.0, 0.0]

    def test_where_nothing_trains_a_profile_says_nothing(self) -> None:
        assert costs([layer | {"trained_bytes": 0} for layer in LAYERS]).stage_seconds("a", 0, 1, 1) == (1.0, 2.0)
        assert costs([{"parameter_bytes": 0}, *LAYERS[1:]]).stage_seconds("a", 0, 1, 1) == (1.0, 0.0), "a layer without any"

    def test_optimizer(self) -> None:
        assert costs().optimizer_seconds("a", 0, 3) == pytest.approx(0.7)


class TestMemory:
    def test_by_hand(self) -> None:
        """Layers 1 and 2, 2 of 4 samples in flight: 4 x 500 parameters; 2 x (50 + 40 + 5) and the inputs, 2 x 10 and the next."""
        memory = costs().stage_memory("a", 1, 3, samples=4)
        assert (memory.static, memory.boundary, memory.held_per_sample) == (2000, 0, 105)
        assert memory.peak((1, 1, 1, 1), 2) == 2000 + 2 * 105 + 10

    def test_the_first_layer_of_a_stage_saves_what_was_measured_of_it_there(self) -> None:
        """Layer 1 saves 42 without what enters, which each micro-batch in flight has in a receive buffer; where there is one such
        buffer only, autograd keeps it, too. The last stage has the targets of the step, 3 bytes of each sample."""
        layers = [LAYERS[0], LAYERS[1] | {"first_saved_bytes_per_sample": 42}, LAYERS[2]]
        of = costs(layers)
        of.profile = of.profile.model_copy(update={"target_bytes_per_sample": 3})
        memory = of.stage_memory("a", 1, 3, samples=4)
        assert (memory.boundary, memory.held_per_sample) == (4 * 3, 42 + 40 + 5 + 10)
        assert of.stage_memory("a", 0, 3, samples=4).held_per_sample == 30 + 50 + 40 + 5
        assert of.stage_memory("a", 1, 2, samples=4).boundary == 0
        assert costs(layers, overhead={"receive_buffers": "one"}).stage_memory("a", 1, 3, samples=4).held_per_sample == 95

    def test_receive_buffers_for_all_micro_batches_of_a_step(self) -> None:
        """As torch.distributed.pipelining has them: 4 inputs of 10, or 4 gradients of 10."""
        memory = costs(overhead={"receive_buffers": "step"}).stage_memory("a", 1, 3, samples=4)
        assert (memory.static, memory.boundary, memory.held_per_sample) == (2000, 40, 95)
        assert memory.peak((1, 1, 1, 1), 2) == 2000 + 40 + 190
        assert costs(overhead={"receive_buffers": "step"}).stage_memory("a", 0, 1, samples=4).boundary == 40

    def test_a_stage_that_is_not_the_last_receives_a_gradient_while_another_is_in_use(self) -> None:
        memory = costs().stage_memory("a", 0, 1, samples=4)
        assert (memory.static, memory.boundary, memory.transient_per_sample) == (401, 0, 20)

    def test_recompute_keeps_inputs_and_one_layer(self) -> None:
        """The input 10 bytes, between its layers 20, the output 5; in backward the largest layer, 50, and the next input."""
        memory = costs().stage_memory("a", 1, 3, samples=4, recompute=True)
        assert (memory.held_per_sample, memory.transient_per_sample) == (35, 60)
        assert memory.peak((2, 2), 1) == 2000 + 2 * 35 + 2 * 60

    @pytest.mark.parametrize("recompute", [False, True])
    def test_a_stage_below_all_that_trains_keeps_nothing(self, recompute: bool) -> None:
        """Whatever its depth: two outputs of 20, two inputs of 10 and the next."""
        memory = costs(FROZEN).stage_memory("a", 1, 2, samples=4, recompute=recompute)
        assert memory.static == 200
        assert memory.peak((2, 2), 1) == memory.peak((2, 2), 2) == 200 + 2 * (2 * 20 + 3 * 10)
        assert costs(FROZEN).stage_memory("a", 0, 2, samples=4, recompute=recompute).peak((1,) * 4, 4) == 301 + 2 * 20

    def test_the_layers_of_a_stage_below_all_that_trains_save_nothing(self) -> None:
        """What layer 2 saves, 40, the output and the input; under recompute what enters layer 2, and that layer."""
        plain, again = (costs(FROZEN).stage_memory("a", 1, 3, samples=4, recompute=r) for r in (False, True))
        assert (plain.held_per_sample, plain.transient_per_sample) == (40 + 5 + 10, 10)
        assert (again.held_per_sample, again.transient_per_sample) == (20 + 5 + 10, 40 + 10)

    def test_tied_parameters_in_one_stage_count_once(self) -> None:
        tied = [layer | {"tied": "wte", "tied_parameter_bytes": 100} if i != 1 else layer for i, layer in enumerate(LAYERS)]
        assert costs(tied).parameter_bytes("a", 0, 3) == (500, 500)
        assert costs(tied).parameter_bytes("a", 0, 2) == (300, 300)

    def test_what_does_not_train_has_neither_gradients_nor_state(self) -> None:
        """Of layer 1 nothing trains, of layer 2 a third: 500 parameters, and 100 gradients with twice as much of AdamW."""
        layers = [LAYERS[0], LAYERS[1] | {"trained_bytes": 0}, LAYERS[2] | {"trained_bytes": 100}]
        assert costs(layers).parameter_bytes("a", 1, 3) == (500, 100)
        assert costs(layers).stage_memory("a", 1, 3, samples=4).static == 500 + 3 * 100
        copies = costs(layers, overhead={"parameter_copies": 0.5})
        assert copies.stage_memory("a", 0, 3, samples=4).static == 600 + 3.5 * 200 + 1

    @pytest.mark.parametrize("trains", [True, False])
    def test_a_tied_parameter_is_held_once_and_has_state_once_if_it_trains(self, trains: bool) -> None:
        """Layers 0 and 2 share 100; of layer 0 nothing else is left, of layer 2 the other 200 train."""
        own = {"tied": "wte", "tied_parameter_bytes": 100, "tied_trained_bytes": 100 * trains}
        layers = [
            LAYERS[0] | own | {"trained_bytes": 100 * trains},
            LAYERS[1] | {"trained_bytes": 0},
            LAYERS[2] | own | {"trained_bytes": 200 + 100 * trains},
        ]
        assert costs(layers).parameter_bytes("a", 0, 3) == (500, 300 if trains else 200)

    def test_most_samples_in_flight(self) -> None:
        """The greatest window of consecutive micro-batches, wherever it lies; a depth of more than there are is all of them."""
        cases = {
            (4, 4, 3): {1: 4, 2: 8, 3: 11, 9: 11},  # the first one
            (1, 4, 4): {1: 4, 2: 8, 3: 9, 4: 9},  # the last one
            (1, 2, 3, 4): {1: 4, 2: 7, 3: 9, 4: 10},
            (1, 5, 5, 1): {1: 5, 2: 10, 3: 11},  # in the middle
            (5, 1, 1, 5): {1: 5, 2: 6, 3: 7, 4: 12},  # the two greatest are no neighbours
            (2, 9, 1, 1, 8, 1): {2: 11, 3: 12, 4: 19, 5: 21},
            (3, 3, 3): {1: 3, 2: 6, 3: 9, 7: 9},
            (7,): {1: 7, 2: 7},
        }
        found = {sizes: {depth: most_in_flight(sizes, depth) for depth in table} for sizes, table in cases.items()}
        assert found == cases

    def test_the_peak_is_that_of_the_greatest_window_and_the_largest_microbatch(self) -> None:
        stage = StageMemory(static=100.0, boundary=7.0, held_per_sample=10.0, backward_per_sample=0.5, passing_per_sample=0.25)
        assert [stage.peak((1, 4, 4), depth) for depth in (1, 2, 3)] == [107 + 10 * most + 3 for most in (4, 8, 9)]


class TestLinks:
    def test_transfer(self) -> None:
        link = {"bandwidth": 100.0, "latency": 0.25}
        assert costs(link=link).transfer("n0/0", "n1/0", 2, 3) == pytest.approx((0.6, 0.25))

    def test_measured_points(self) -> None:
        points = {"points": [[10, 1.0], [20, 2.0], [30, 4.0]]}
        occupied, latency = costs(link=points).transfer("n0/0", "n1/0", 1, 4)
        assert (occupied, latency) == pytest.approx((6.0 - 1.0, 1.0))

    def test_ring_over_the_slowest_link(self) -> None:
        """3 devices on 2 nodes: 2 x 2 rounds of a third, 100 bytes at 100 bytes/s + 0.5 s."""
        mixed = costs(link={"bandwidth": 100.0, "latency": 0.5}, inside={"bandwidth": 1e9, "latency": 0.0})
        assert mixed.all_reduce_seconds(["n0/0", "n0/1", "n1/0"], 300) == pytest.approx(4 * 1.5)
        assert mixed.all_reduce_seconds(["n0/0", "n0/1"], 300) == pytest.approx(2 * 150e-9)
        assert mixed.all_reduce_seconds(["n0/0"], 300) == 0.0

    def test_a_ring_is_the_same_from_any_device_on(self) -> None:
        """Also of links that take as long and wait longer."""
        even = make_cluster([{"a": 1}] * 3, link={"bandwidth": 100.0, "latency": 0.0})
        waits = LinkBetween(between=("n0", "n1"), bandwidth=200.0, latency=0.5)
        mixed = Costs(make_profile({"a": [1.0]}), even.with_links((waits,)))
        rings = {mixed.ring(devices, 300, {"n0": 2, "n1": 0, "n2": 1}) for devices in permutations(["n0/0", "n1/0", "n2/0"])}
        assert rings == {RingParts((0, 1, 2), 2.0, 2.0, 200.0)}


class TestSegments:
    def test_runs_with_the_same_owners(self) -> None:
        """
        layers     0   1   2
        replica 0  n0/0|n0/1
        replica 1  n1/0    |n1/1
        """
        found = owners_of([x.stages for x in (replica(1, devices=["n0/0", "n0/1"]), replica(2, devices=["n1/0", "n1/1"]))])
        runs = [(x.lo, x.hi, *x.pieces) for x in found]
        assert runs == [(2, 3, ("n0/1", "n1/1")), (1, 2, ("n0/1", "n1/0")), (0, 1, ("n0/0", "n1/0"))]

    def test_launched_from_the_last_layer_and_tied_ones_last(self) -> None:
        tied = [layer | {"tied": "wte", "tied_parameter_bytes": 100} if i != 1 else layer for i, layer in enumerate(LAYERS)]
        plan = Plan(model="test", global_batch=4, replicas=(replica(1, devices=["n0/0", "n0/1"]), replica(devices=["n1/0"])))
        found = [(s.lo, s.hi, s.owners, s.size_bytes, s.tied) for s in sync_segments(plan, costs(tied))]
        assert found == [
            (1, 3, ("n0/1", "n1/0"), 400.0, None),  # the first layer is all tied: no segment of its own
            (0, 3, ("n0/0", "n0/1", "n1/0"), 100.0, "wte"),
        ]

    def test_a_tied_parameter_that_does_not_train_is_not_summed(self) -> None:
        frozen = {"tied": "wte", "tied_parameter_bytes": 100, "tied_trained_bytes": 0}
        tied = [LAYERS[0] | frozen | {"trained_bytes": 0}, LAYERS[1], LAYERS[2] | frozen | {"trained_bytes": 50}]
        plan = Plan(model="test", global_batch=4, replicas=(replica(1, devices=["n0/0", "n0/1"]), replica(devices=["n1/0"])))
        found = [(s.lo, s.hi, s.owners, s.size_bytes, s.tied) for s in sync_segments(plan, costs(tied))]
        assert found == [(1, 3, ("n0/1", "n1/0"), 250.0, None)]

    def test_one_replica_sums_only_what_is_tied(self) -> None:
        plan = Plan(model="test", global_batch=2, replicas=(replica(1, devices=["n0/0", "n0/1"]),))
        assert sync_segments(plan, costs()) == []


def test_prefix_sums_are_those_of_the_profile() -> None:
    forward, backward = costs().time_prefix("a", 1)
    assert np.array_equal(forward, [0, 1, 3, 7])
    assert np.array_equal(backward, [0, 2, 6, 14])
