"""The whole job of a command: its draft, with what the model and the data say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hetpipe.building.build import build_data
from hetpipe.building.content import Content
from hetpipe.documents.job import Job
from hetpipe.files.messages import counted
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.draft import LENGTH_KEY, SOURCE, DataFacts, ModelFacts, draft, filled, open_keys, steps_of
from hetpipe.finetune.facts import cards_here, data_content, data_facts, model_facts
from hetpipe.finetune.kinds import COUNTED
from hetpipe.finetune.looked import Looked
from hetpipe.processes.environment import place
from hetpipe.processes.progress import Activity


class Made(NamedTuple):
    """A job, its `keys` as they stand in its file, and read; the cluster file's content, where cards are emulated; the data in
    words, and what is in them; how many steps that are, and whether the schedule was left open."""

    keys: dict[str, Any]
    job: Job
    cluster: dict[str, Any] | None
    data: str
    content: Content | None
    steps: int
    open_schedule: bool


def make_job(asked: Asked, looked: Looked) -> Made:
    """Look at the model and read the data. The same on every rank of a host. InputError where something is wrong or missing."""
    found = draft(asked, looked.found, looked.cluster, cards=cards_here())
    with Activity("starting", shown=place().local_rank == 0) as activity:
        activity.say("looking at the model")
        facts = model_facts(found["model"])
        activity.say("reading the data")
        splits = build_data(Job.parse(unpacked(found, facts), SOURCE))
    read = data_facts(splits)
    keys = filled(found, facts, read)
    job = Job.parse(keys, SOURCE)
    args = job.data.args
    rows = read.rows(args[LENGTH_KEY[looked.found.kind]] if args.get("pack") else None)
    return Made(
        keys,
        job,
        looked.emulated,
        data_text(job, read),
        data_content(splits, args),
        steps_of(job.train.model_dump(), rows),
        ("train", "scheduler") in open_keys(found),
    )


def unpacked(found: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """The job that reads the data a sample in a row, whatever becomes of them."""
    content = filled(found, facts._replace(apart=False), None)
    if content["data"]["args"].get("pack"):
        content["data"]["args"]["pack"] = False
    if content["loss"].get("fused"):
        content["loss"] = {**content["loss"], "fused": False}
    return content


def data_text(job: Job, data: DataFacts) -> str:
    """`180 chats to train on, 20 held out; 11,020 tokens, 4,100 of them learned; packed into 47 rows of 256 tokens`."""
    args, noun = job.data.args, COUNTED.get(job.data.label, "sample")
    held = "to evaluate" if job.evaluate is not None else "held out"
    parts = [f"{counted(data.train, noun)} to train on{f', {data.test} {held}' if data.test else ''}"]
    if data.groups is not None and len(data.groups) > 1:
        parts.append(f"of {len(data.groups)} shapes, of which a step has one")
    if data.tokens is not None:
        some = f", {data.learned:,} of them learned" if data.learned not in (None, data.tokens) else ""
        parts.append(f"{data.tokens:,} tokens{some}")
    if args.get("pack"):
        parts.append(f"packed into {counted(sum(data.rows(args['length'])), 'row')} of {args['length']} tokens")
    elif data.longest is not None:
        parts.append(f"the longest has {data.longest} tokens" if data.lengths is not None else f"{data.longest} tokens each")
    return "; ".join(parts)
