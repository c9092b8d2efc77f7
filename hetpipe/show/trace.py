"""Timelines as Chrome/Perfetto traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetpipe.files.writing import write_text
from hetpipe.predict.timeline import Span, Timeline

WORK = ("F", "B", "optimizer")


def by_device(timeline: Timeline) -> list[tuple[int, int, str, list[Span]]]:
    """(replica, stage, device, its spans by start), in the order of replicas and stages."""
    found: dict[tuple[int, int, str], list[Span]] = {}
    for span in timeline.spans:
        found.setdefault((span.replica, span.stage, span.device), []).append(span)
    order = sorted(found, key=lambda key: key[:2])
    return [(*key, sorted(found[key], key=lambda span: (span.start, span.end))) for key in order]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans sorted by start, each in the first lane where it overlaps none before it."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in lanes if _nanoseconds(lane[-1].end) <= _nanoseconds(span.start)), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    start, end = _nanoseconds(span.start), _nanoseconds(span.end)  # whole, so that neighbours touch
    args: dict[str, Any] = {"replica": span.replica, "stage": span.stage, "device": span.device}
    name: str = span.kind
    if span.microbatch is not None:
        args["microbatch"] = span.microbatch
        name += str(span.microbatch)
    return {"name": name, "cat": span.kind, "ph": "X", "pid": pid, "tid": tid,
            "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args}  # fmt: skip


def _named(what: str, pid: int, tid: int, name: str, rank: int) -> list[dict[str, Any]]:
    """The metadata that name a process or thread and give its place on the screen."""
    base = {"ph": "M", "pid": pid, "tid": tid}
    return [{"name": f"{what}_name", **base, "args": {"name": name}},
            {"name": f"{what}_sort_index", **base, "args": {"sort_index": rank}}]  # fmt: skip


def _run_events(pid: int, name: str, timeline: Timeline) -> list[dict[str, Any]]:
    events = _named("process", pid, 0, name, pid)
    tid = 0
    for r, s, device, spans in by_device(timeline):
        work = [span for span in spans if span.kind in WORK]
        other = [span for span in spans if span.kind not in WORK]
        for group, suffix in ((work, ""), (other, " transfers")):
            for i, lane in enumerate(_lanes(group)):
                tid += 1
                number = f" {i + 1}" if i else ""
                events += _named("thread", pid, tid, f"replica {r} stage {s}: {device}{suffix}{number}", tid)
                events += [_event(span, pid, tid) for span in lane]
        events += [
            {"name": f"memory of {device}", "ph": "C", "pid": pid, "ts": _nanoseconds(when) / 1e3, "args": {"bytes": size}}
            for when, size in timeline.memory.get(device, ())
        ]
    return events


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Trace events for ui.perfetto.dev and chrome://tracing: a process per named timeline ("predicted", …).

    Each device is a thread, in the order of replicas and stages; what may overlap its work (transfers, sums
    of gradients) has threads of its own, so that no two events of a thread overlap. A timeline's memory
    becomes a counter per device.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items(), 1):
        events += _run_events(pid, name, timeline)
    steps = {name: timeline.step_seconds for name, timeline in timelines.items()}
    return {"displayTimeUnit": "ms", "otherData": {"step_seconds": steps}, "traceEvents": events}


def save_trace(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Write `chrome_trace` as a JSON file."""
    write_text(path, json.dumps(chrome_trace(timelines)) + "\n")
