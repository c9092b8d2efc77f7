"""python -m bench.gpu.run [-o gpu.md] [--json] [--device cpu] [--size small] [--only 3a,4a] [--tests]

Runs on one CUDA card everything that one card allows, and writes a page of what came out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.gpu.page import Section, as_json, markdown
from bench.gpu.parts import PARTS, Part
from bench.gpu.subject import Subject
from bench.gpu.suite import suite
from bench.gpu.worker import Worker
from bench.tables import chosen
from hetpipe.cli.exits import main
from hetpipe.files.messages import InputError
from hetpipe.files.writing import check_output, write_text
from hetpipe.models.gpt import SIZES
from hetpipe.processes.progress import Activity, say

DEVICES = {"cuda": "small", "cpu": "tiny"}  # and the size of the model there
MARGIN_SECONDS = 60.0  # the tests end themselves at their limit


def title_of(subject: Subject) -> str:
    """The page's first line."""
    if subject.device_type == "cuda":
        return "What one CUDA card does"
    return "Dry run on the CPU: no card was used"


def run_parts(
    parts: Sequence[Part], subject: Subject, limit_seconds: float, done: Callable[[list[Section]], object]
) -> list[Section]:
    """All parts, one after the other, each in at most so many seconds (the tests: in theirs). `done` is called after each."""
    sections = list[Section]()
    with Worker() as worker, Activity("the parts", len(parts), lasting=True) as activity:
        for part in parts:
            activity.say(part.title)
            began = time.monotonic()
            limit = subject.tests_seconds + MARGIN_SECONDS if part.call is suite else limit_seconds
            outcome = worker.run(part.call, subject, limit_seconds=limit, say=partial(_say, activity, part))
            sections.append(
                Section(
                    number=part.number,
                    title=part.title,
                    about=part.about,
                    rows=outcome.rows,
                    seconds=time.monotonic() - began,
                    error=outcome.error,
                    trace=outcome.trace,
                )
            )
            activity.advance(part.title)
            done(sections)
    return sections


def _say(activity: Activity, part: Part, text: str) -> None:
    activity.say(f"{part.title}: {text}")


def parts_of(only: str | None) -> list[Part]:
    """The parts of these numbers; InputError for one that there is not."""
    numbers = [part.number for part in PARTS]
    wanted = numbers if only is None else chosen("--only", only, numbers)
    return [part for part in PARTS if part.number in wanted]


def bench(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the page goes (Markdown).")] = Path("gpu.md"),
    as_json_too: Annotated[bool, typer.Option("--json", help="Print everything as JSON, too.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu: a dry run of the same parts.")] = "cuda",
    size: Annotated[str | None, typer.Option(help="Of the zoo's gpt; by default small, on the CPU tiny.")] = None,
    microbatch: Annotated[int, typer.Option(min=1, help="Samples of a micro-batch.")] = 8,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps that a median is of.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each layer that a median is of.")] = 5,
    only: Annotated[str | None, typer.Option(help="Numbers of parts, such as 3a,4a; by default all.")] = None,
    tests: Annotated[bool, typer.Option("--tests", help="Run the whole test suite, too, which takes long.")] = False,
    tests_seconds: Annotated[float, typer.Option(min=1, help="When the tests are ended, if they are not over.")] = 3600.0,
    tests_arguments: Annotated[str, typer.Option(help="Arguments of pytest, with blanks between them.")] = "",
    limit_seconds: Annotated[float, typer.Option(min=1, help="When any other part is ended.")] = 300.0,
) -> None:
    """Run the parts, write the page after each of them, and say what failed."""
    chosen("--device", device, list(DEVICES))
    chosen("--size", size or "tiny", list(SIZES))
    parts = parts_of(only)
    check_output(output)
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA card is found; --device cpu makes a dry run of the same parts on the CPU")
    with tempfile.TemporaryDirectory(prefix="hetpipe-gpu-") as folder:
        subject = Subject(
            device_type=device,
            arguments={"size": size or DEVICES[device]},
            microbatch=microbatch,
            microbatches=microbatches,
            steps=steps,
            repeats=repeats,
            folder=folder,
            tests=tuple(tests_arguments.split()) if tests else None,
            tests_seconds=tests_seconds if tests else 0.0,
        )
        title = title_of(subject)

        def write(so_far: list[Section]) -> None:
            write_text(output, markdown(title, so_far, len(parts)))

        sections = run_parts(parts, subject, limit_seconds, write)
    say(f"the page is {output}")
    result: dict[str, Any] = as_json(title, sections)
    if as_json_too:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if result["failed"]:
        say(f"not as it must be: {', '.join(f'{s.number} ({s.title})' for s in sections if s.failed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    main(lambda: typer.run(bench))
