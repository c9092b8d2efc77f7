import json
from itertools import pairwise
from pathlib import Path

import pytest

from hetpipe.files.messages import InputError
from hetpipe.predict.timeline import Span, SpanKind, Timeline
from hetpipe.show.trace import by_device, chrome_trace, load_measured, load_trace, save_trace


def timeline(*spans: Span, step: float = 1.0) -> Timeline:
    return Timeline(spans=spans, step_seconds=step, pipeline_seconds=step, sync_seconds=0.0, optimizer_seconds=0.0)


def span(
    kind: SpanKind,
    start: float,
    end: float,
    *,
    device: str = "n0/0",
    replica: int = 0,
    stage: int = 0,
    microbatch: int | None = None,
) -> Span:
    return Span(device=device, replica=replica, stage=stage, kind=kind, start=start, end=end, microbatch=microbatch)


def test_an_event_has_its_name_duration_and_place() -> None:
    trace = chrome_trace({"measured": timeline(span("F", 0.001, 0.0035, stage=2, microbatch=3))})
    (event,) = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert event == {
        "name": "F3",
        "cat": "F",
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "ts": 1000.0,
        "dur": 2500.0,
        "args": {"replica": 0, "stage": 2, "device": "n0/0", "microbatch": 3},
    }
    assert trace["otherData"] == {
        "step_seconds": {"measured": 1.0},
        "pipeline_seconds": {"measured": 1.0},
        "sync_seconds": {"measured": 0.0},
        "optimizer_seconds": {"measured": 0.0},
    }


def test_threads_are_named_and_sorted_by_replica_and_stage() -> None:
    run = timeline(
        span("F", 0, 1, device="b/0", replica=1, microbatch=0),
        span("F", 0, 1, device="z/0", stage=0, microbatch=0),
        span("F", 0, 1, device="a/0", stage=1, microbatch=0),
    )
    meta = [e for e in chrome_trace({"predicted": run, "measured": run})["traceEvents"] if e["ph"] == "M"]
    names = [(e["pid"], e["args"]["name"]) for e in meta if e["name"] == "thread_name"]
    threads = ["replica 0 stage 0: z/0", "replica 0 stage 1: a/0", "replica 1 stage 0: b/0"]
    assert names == [(1, name) for name in threads] + [(2, name) for name in threads]
    assert [e["args"]["name"] for e in meta if e["name"] == "process_name"] == ["predicted", "measured"]
    assert [e["args"]["sort_index"] for e in meta if e["name"] == "thread_sort_index"] == [1, 2, 3, 1, 2, 3]


def test_what_overlaps_work_has_a_thread_of_its_own_and_no_two_events_of_a_thread_overlap() -> None:
    run = timeline(
        span("F", 0.0, 0.1, microbatch=0),
        span("F", 0.1, 0.1 + 0.2, microbatch=1),
        span("B", 0.3, 0.5, microbatch=0),
        span("send", 0.05, 0.25, microbatch=0),  # two sends at once
        span("send", 0.2, 0.4, microbatch=1),
        span("sync", 0.45, 0.7),
    )
    events = chrome_trace({"predicted": run})["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = {name: [e for e in events if e["ph"] == "X" and e["tid"] == tid] for tid, name in threads.items()}
    assert {name: [e["name"] for e in found] for name, found in shown.items()} == {
        "replica 0 stage 0: n0/0": ["F0", "F1", "B0"],
        "replica 0 stage 0: n0/0 transfers": ["send0", "sync"],
        "replica 0 stage 0: n0/0 transfers 2": ["send1"],
    }
    for found in shown.values():
        for a, b in pairwise(found):
            assert round(a["ts"] * 1000) + round(a["dur"] * 1000) <= round(b["ts"] * 1000)


def test_zero_length_spans_and_empty_timelines_are_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    save_trace(path, {"predicted": timeline(), "measured": timeline(span("optimizer", 0.5, 0.5))})
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    assert [(e["name"], e["dur"]) for e in events if e["ph"] == "X"] == [("optimizer", 0.0)]


def test_by_device_sorts_devices_by_stage_and_spans_by_start() -> None:
    late, early = span("B", 2, 3, microbatch=0), span("F", 0, 1, microbatch=0)
    other = span("F", 0, 1, device="n1/0", stage=1, microbatch=0)
    assert by_device(timeline(other, late, early)) == [(0, 0, "n0/0", [early, late]), (0, 1, "n1/0", [other])]


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    run = timeline(span("F", 0.001, 0.0035, microbatch=0), span("B", 0.0035, 0.01, microbatch=0), span("sync", 0.01, 0.02))
    save_trace(tmp_path / "trace.json", {"predicted": run, "measured": run})
    found = load_trace(tmp_path / "trace.json")
    assert list(found) == ["predicted", "measured"]
    assert found["measured"].step_seconds == run.step_seconds
    for one, other in zip(found["measured"].spans, run.spans, strict=True):
        assert (one.device, one.kind, one.microbatch) == (other.device, other.kind, other.microbatch)
        assert (one.start, one.end) == pytest.approx((other.start, other.end), abs=1e-9)


def test_what_is_no_trace_and_a_trace_without_measurement_say_so(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"traceEvents": [{"ph": "X", "pid": 1}]}')
    with pytest.raises(InputError, match="it is no trace that hetpipe wrote"):
        load_trace(tmp_path / "other.json")
    save_trace(tmp_path / "trace.json", {"predicted": timeline()})
    with pytest.raises(InputError, match="has 'predicted', but none named 'measured'"):
        load_measured(tmp_path / "trace.json")
