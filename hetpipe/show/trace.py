"""Timelines as Chrome/Perfetto traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetpipe.files.formats import read_mapping
from hetpipe.files.messages import InputError
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
    return {
        "name": name,
        "cat": span.kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": args,
    }


def _named(what: str, pid: int, tid: int, name: str, rank: int) -> list[dict[str, Any]]:
    """The metadata that name a process or thread and give its place on the screen."""
    base = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {"name": f"{what}_name", **base, "args": {"name": name}},
        {"name": f"{what}_sort_index", **base, "args": {"sort_index": rank}},
    ]


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
    parts = ("step_seconds", "pipeline_seconds", "sync_seconds", "optimizer_seconds")
    about = {part: {name: getattr(timeline, part) for name, timeline in timelines.items()} for part in parts}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def save_trace(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Write `chrome_trace` as a JSON file."""
    write_text(path, json.dumps(chrome_trace(timelines)) + "\n")


def load_trace(path: str | Path) -> dict[str, Timeline]:
    """The timelines of a file that `save_trace` wrote, by name. InputError if it is none."""
    try:
        return _timelines(read_mapping(path))
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = "it is no trace that hetpipe wrote (the trace.json of a run's log folder, or of 'hetpipe simulate --trace')"
        raise InputError(f"cannot read {path}: {what}: {type(error).__name__}: {error}") from None


def load_measured(path: str | Path) -> Timeline:
    """The measured timeline of a run's trace. InputError if it has none."""
    found = load_trace(path)
    if "measured" not in found:
        names = ", ".join(map(repr, found)) or "no timeline"
        raise InputError(f"{path} has {names}, but none named 'measured': give the trace.json of a run's log folder")
    return found["measured"]


def _timelines(document: Any) -> dict[str, Timeline]:
    names: dict[int, str] = {}
    spans: dict[int, list[Span]] = {}
    memory: dict[int, dict[str, list[tuple[float, int]]]] = {}
    for event in document["traceEvents"]:
        pid, args = event["pid"], event["args"]
        if event["ph"] == "M" and event["name"] == "process_name":
            names[pid] = args["name"]
        elif event["ph"] == "X":
            start = event["ts"] / 1e6
            spans.setdefault(pid, []).append(
                Span(
                    device=args["device"],
                    replica=args["replica"],
                    stage=args["stage"],
                    kind=event["cat"],
                    start=start,
                    end=start + event["dur"] / 1e6,
                    microbatch=args.get("microbatch"),
                )
            )
        elif event["ph"] == "C":
            device = event["name"].removeprefix("memory of ")
            memory.setdefault(pid, {}).setdefault(device, []).append((event["ts"] / 1e6, args["bytes"]))
    about = document["otherData"]
    return {
        name: Timeline(
            spans=tuple(spans.get(pid, ())),
            memory=memory.get(pid, {}),
            step_seconds=about["step_seconds"][name],
            pipeline_seconds=about.get("pipeline_seconds", {}).get(name, 0.0),
            sync_seconds=about.get("sync_seconds", {}).get(name, 0.0),
            optimizer_seconds=about.get("optimizer_seconds", {}).get(name, 0.0),
        )
        for pid, name in names.items()
    }
