"""The whole job of a command: its draft, with what the model and the data say."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from hetpipe.files.messages import counted
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.draft import BATCH, LENGTH, LENGTH_KEY, SOURCE, check_base, draft, open_keys, schedule
from hetpipe.finetune.emulated import parse_emulated
from hetpipe.finetune.facts import DataFacts, ModelFacts, cards_here, data_facts, model_facts
from hetpipe.finetune.kinds import COUNTED, kind_of
from hetpipe.processes.environment import place
from hetpipe.processes.progress import Activity
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.job import Job


class Made(NamedTuple):
    """A job, as it stands in its file and read; the cluster file's content, where cards are emulated; the data in words."""

    content: dict[str, Any]
    job: Job
    cluster: dict[str, Any] | None
    data: str


def make_job(asked: Asked) -> Made:
    """Looks at the model and reads the data. The same on every rank of a host. InputError where something is wrong, or missing.
    """
    check_base(asked.base)
    emulated = parse_emulated(asked.emulate) if asked.emulate else None
    cluster = Cluster.parse(emulated, "--emulate") if emulated is not None else None
    if asked.cluster is not None:
        cluster = Cluster.load(asked.cluster)
    found = draft(asked, kind_of(asked.data), cluster, cards=cards_here())
    Job.parse(filled(found, ModelFacts(), None), SOURCE)  # before anything is read
    with Activity("starting", shown=place().local_rank == 0) as activity:
        activity.say("looking at the model")
        facts = model_facts(found["model"])
        activity.say("reading the data")
        read = data_facts(Job.parse(unpacked(found, facts), SOURCE))
    content = filled(found, facts, read)
    job = Job.parse(content, SOURCE)
    return Made(content, job, emulated, data_text(job, read))


def unpacked(found: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """The job that reads the data a sample in a row, whatever becomes of them."""
    content = filled(found, facts._replace(apart=False), None)
    if content["data"]["args"].get("pack"):
        content["data"]["args"]["pack"] = False
    content["loss"] = {**content["loss"], "fused": False}
    return content


def filled(found: Mapping[str, Any], model: ModelFacts, data: DataFacts | None) -> dict[str, Any]:
    """The draft with a value for each key that it leaves open: samples are of 2048 tokens at most, and of no more than the model
    has positions for; rows are packed where the model tells samples apart, and as long as the longest sample; a step has 32 of
    them, or all that there are; the schedule goes over all steps."""
    content, left = copy.deepcopy(dict(found)), set(open_keys(found))
    args, train = content["data"].setdefault("args", {}), content["train"]
    length = LENGTH_KEY.get(content["data"].get("name"), "")
    if ("data", length) in left:
        args[length] = min(LENGTH, model.positions or LENGTH)
    if ("data", "pack") in left:
        args["pack"] = model.apart and not {"sizes", "mask"} & set(args)
    if ("data", length) in left and data is not None and data.longest is not None:
        args[length] = min(args[length], data.longest)
    rows = data.rows(args[length] if args.get("pack") else None) if data is not None else None
    if ("train", "global_batch") in left:
        train["global_batch"] = min(BATCH, rows or BATCH)
    if ("train", "scheduler") in left and rows is not None:
        train["scheduler"] = schedule(steps_of(train, rows))
    return content


def steps_of(train: Mapping[str, Any], rows: int) -> int:
    """Steps of a section `train`, where an epoch has so many samples."""
    if train.get("steps") is not None:
        return int(train["steps"])
    return int(train["epochs"]) * -(-rows // int(train["global_batch"]))


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
        parts.append(f"the longest has {data.longest} tokens" if data.sequences is not None else f"{data.longest} tokens each")
    return "; ".join(parts)
