"""The whole job of a command: its draft, with what the model and the data say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hetpipe.files.messages import counted
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.draft import SOURCE, DataFacts, ModelFacts, draft, filled
from hetpipe.finetune.facts import cards_here, data_facts, model_facts
from hetpipe.finetune.kinds import COUNTED
from hetpipe.finetune.looked import Looked
from hetpipe.processes.environment import place
from hetpipe.processes.progress import Activity
from hetpipe.spec.job import Job


class Made(NamedTuple):
    """A job, as it stands in its file and read; the cluster file's content, where cards are emulated; the data in words."""

    content: dict[str, Any]
    job: Job
    cluster: dict[str, Any] | None
    data: str


def make_job(asked: Asked, looked: Looked) -> Made:
    """Looks at the model and reads the data. The same on every rank of a host. InputError where something is wrong, or missing.
    """
    found = draft(asked, looked.found, looked.cluster, cards=cards_here())
    with Activity("starting", shown=place().local_rank == 0) as activity:
        activity.say("looking at the model")
        facts = model_facts(found["model"])
        activity.say("reading the data")
        read = data_facts(Job.parse(unpacked(found, facts), SOURCE))
    content = filled(found, facts, read)
    job = Job.parse(content, SOURCE)
    return Made(content, job, looked.emulated, data_text(job, read))


def unpacked(found: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """The job that reads the data a sample in a row, whatever becomes of them."""
    content = filled(found, facts._replace(apart=False), None)
    if content["data"]["args"].get("pack"):
        content["data"]["args"]["pack"] = False
    content["loss"] = {**content["loss"], "fused": False}
    return content


def data_text(job: Job, data: DataFacts) -> str:
    """`180 chats to train on, 20 held out; 11,020 tokens, 4,100 of them learned; packed into 47 rows of 256 tokens`."""
    args, noun = job.data.args, COUNTED.get(job.data.label, "sample")
    parts = [f"{counted(data.train, noun)} to train on{f', {data.test} held out' if data.test else ''}"]
    if data.tokens is not None:
        some = f", {data.learned:,} of them learned" if data.learned not in (None, data.tokens) else ""
        parts.append(f"{data.tokens:,} tokens{some}")
    if args.get("pack"):
        parts.append(f"packed into {counted(data.rows(args['length']), 'row')} of {args['length']} tokens")
    elif data.longest is not None:
        parts.append(f"the longest has {data.longest} tokens" if data.lengths is not None else f"{data.longest} tokens each")
    return "; ".join(parts)
