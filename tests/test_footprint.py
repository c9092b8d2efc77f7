import pickle

import pytest

from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.predict.cost import Costs
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.show.trace import chrome_trace
from tests.support.ranks import cluster_of, make_plan

LAYER = {"parameter_bytes": 100, "output_bytes_per_sample": 10, "saved_bytes_per_sample": 30}


def profile() -> Profile:
    """Two layers: forward 1 s, backward 2 s; saved 30 and output 10 bytes a sample; SGD (no state)."""
    measured = {
        "device_type": "cpu",
        "microbatch_sizes": [1],
        "forward_seconds": [[1.0, 1.0]],
        "backward_seconds": [[2.0, 2.0]],
        "optimizer_seconds": [0.0, 0.0],
    }
    return Profile.parse(
        {
            "format": "hetpipe.profile/1",
            "model": "test",
            "layers": [{"name": name, **LAYER} for name in ("a", "b")],
            "measurements": [measured],
            "optimizer": {"state_bytes_per_parameter_byte": 0.0},
        },
        "test profile",
    )


def run(plan: Plan) -> Timeline:
    cluster = cluster_of(2)
    return with_footprint(simulate(plan, profile(), cluster), plan, profile(), cluster)


def test_one_device_holds_one_micro_batch_at_a_time() -> None:
    timeline = run(make_plan([{"cuts": [2], "sizes": [1, 1]}]))
    # 400 static; F takes 2 s and keeps 60 saved + 10 output, B takes 4 s and frees them, when the next F keeps as much
    assert list(timeline.memory["n0/0"]) == [(0.0, 470), (12.0, 400)]


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", 2), ("gpipe", 3)])
def test_the_first_stage_holds_its_warm_up_depth(schedule: str, in_flight: int) -> None:
    plan = make_plan([{"cuts": [1, 1], "sizes": [1, 1, 1]}], schedule=schedule)
    timeline = run(plan)
    static = Costs(profile(), cluster_of(2)).stage_memory("cpu", 0, 1, samples=3)
    series = timeline.memory["n0/0"]
    assert max(size for _, size in series) == static.static + in_flight * 40 + 20  # two gradients
    assert max(size for _, size in series) == timeline.peak_bytes["n0/0"]
    assert series[-1][1] == static.static


def test_a_recomputed_layer_exists_while_its_backward_runs() -> None:
    timeline = run(make_plan([{"cuts": [2], "sizes": [1], "recompute": True}]))
    # kept: the input of layer b (10) and the output (10); recomputed: 30, from 2 s (end of F) to 8 s (F again, then B)
    assert list(timeline.memory["n0/0"]) == [(0.0, 420), (2.0, 450), (8.0, 400)]


def test_the_trace_has_a_counter_per_device() -> None:
    events = chrome_trace({"predicted": run(make_plan([{"cuts": [1, 1], "sizes": [1]}]))})["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"memory of n0/0", "memory of n0/1"}
    assert all(event["args"]["bytes"] > 0 for event in counters)


def test_a_timeline_can_be_sent_to_another_process() -> None:
    timeline = simulate(make_plan([{"cuts": [1, 1], "sizes": [1]}]), profile(), cluster_of(2))
    assert list(pickle.loads(pickle.dumps(timeline)).spans) == list(timeline.spans)
