"""What `hetpipe finetune` says before it trains, and how to load what it has written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from hetpipe.documents.job import Job
from hetpipe.documents.sections.loss import REWARD
from hetpipe.files.screen import Screen
from hetpipe.files.units import human_bytes, human_seconds, three_digits
from hetpipe.finetune.kinds import PICTURES
from hetpipe.finetune.program import Finetuned
from hetpipe.finetune.statement import Held, Instead, Statement
from hetpipe.hf.exports.beside import GENERATION, TOKENIZER_CONFIG
from hetpipe.processes.progress import duration
from hetpipe.show.words import percent

TOLD_DEVICES = 8  # devices that are told one by one; of more, the fullest


def print_statement(statement: Statement) -> None:
    """On standard output, at once."""
    Screen().print(statement_table(statement))
    sys.stdout.flush()


def statement_table(statement: Statement) -> Table:
    """What will be done, a line for each thing that is said."""
    table = Table(title="what will be trained", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(statement):
        table.add_row(name, value)
    return table


def _rows(s: Statement) -> Iterator[tuple[str, str]]:
    yield "devices", "; ".join(s.cards)
    share = percent(s.trained / s.parameters) if s.parameters else ""
    yield "model", f"{numbered(s.parameters)} parameters, {numbered(s.trained)} of them train ({share})"
    yield "data", s.data
    held = f", the model is held in {s.base}" if s.base not in ("", "as-is") else ""
    yield "precision", f"computed in {s.precision}{held}"
    yield "plan", s.plan
    yield "memory", _memory(s.memory)
    left = f"{s.steps - s.first_step} of {s.steps} steps left" if s.first_step else f"{s.steps} steps"
    each = "each in the mean" if s.steps_differ else "each"
    seconds = f", {human_seconds(s.step_seconds)} {each}: about {duration(s.seconds)}"
    yield "time", f"{left}{seconds}" if s.first_step < s.steps else f"all {s.steps} steps are done"
    for other in s.instead:
        yield other.name, instead_text(other, s.step_seconds)


def instead_text(other: Instead, step_seconds: float) -> str:
    """`2.31 s a step, 1.9 × as long`, or why it cannot be.

    >>> instead_text(Instead(name="t4 alone", needs_bytes=20 * 2**30, has_bytes=15 * 2**30), 1.0)
    'does not fit: needs 20.0 GiB of 15.0 GiB'
    """
    if other.seconds is not None:
        times = f", {three_digits(other.seconds / step_seconds)} × as long" if step_seconds > 0 else ""
        return f"{human_seconds(other.seconds)} a step{times}"
    if other.needs_bytes is not None and other.has_bytes is not None:
        return f"does not fit: needs {human_bytes(other.needs_bytes)} of {human_bytes(other.has_bytes)}"
    return other.reason


def _memory(devices: tuple[Held, ...]) -> str:
    told = (
        devices if len(devices) <= TOLD_DEVICES else sorted(devices, key=lambda d: -d.bytes / max(1, d.of_bytes))[:TOLD_DEVICES]
    )
    parts = [
        f"{d.device} {d.kind} {human_bytes(d.bytes)} of {human_bytes(d.of_bytes)} ({percent(d.bytes / max(1, d.of_bytes))})"
        for d in told
    ]
    return "; ".join(parts) + (f"; {len(devices) - TOLD_DEVICES} more, less full" if len(devices) > TOLD_DEVICES else "")


def numbered(count: int) -> str:
    """
    >>> numbered(7_615_616_512), numbered(40_370_176), numbered(12_345)
    ('7.62 billion', '40.4 million', '12,345')
    """
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{three_digits(count / size)} {word}"
    return f"{count:,}"


def how_to_load(found: Finetuned, job: Job) -> str:
    """Lines of Python."""
    if job.model.name == PICTURES.model:
        return _how_to_draw(found, job)
    there, scores = found.folder if found.folder is not None else Path(), job.loss.name == REWARD
    lines, taken = list[str](), ["AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"]
    load = f"{taken[0]}.from_pretrained"
    if job.adapter is None:
        lines = [f'model = {load}("{there}")']
    else:
        name, _, revision = str(job.model.args.get("weights")).partition("@")
        at = f', revision="{revision}"' if revision else ""
        at += ", num_labels=1" if scores else ""
        lines = [f'model = PeftModel.from_pretrained({load}("{name}"{at}), "{there}")']
        if (there / GENERATION).is_file():
            taken.append("GenerationConfig")
            lines.append(f'model.generation_config = GenerationConfig.from_pretrained("{there}")  # ends where answers do')
    if (there / TOKENIZER_CONFIG).is_file():
        taken.append("AutoTokenizer")
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{there}")')
    imports = [f"from transformers import {', '.join(sorted(taken))}"]
    if job.adapter is not None:
        imports.insert(0, "from peft import PeftModel")
        if few := job.adapter.quantised:
            exact = "hetpipe export-weights JOB.yaml -o FOLDER --merge"
            imports.insert(0, f"# trained over a base in {few}; to get just that: {exact}")
    return "\n".join([*imports, *lines])


def _how_to_draw(found: Finetuned, job: Job) -> str:
    """Return the lines for a transformer of diffusers: the adapter goes into its pipeline, or the whole takes its place there."""
    name = job.model.args.get("weights")
    if job.adapter is not None:
        lines = [f'pipeline = DiffusionPipeline.from_pretrained("{name}")', f'pipeline.load_lora_weights("{found.folder}")']
    else:
        load = f'AutoModel.from_pretrained("{found.folder}")'
        lines = [f'pipeline = DiffusionPipeline.from_pretrained("{name}", transformer={load})']
    return "\n".join([f"from diffusers import {'' if job.adapter is not None else 'AutoModel, '}DiffusionPipeline", *lines])
