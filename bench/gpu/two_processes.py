"""Part 5: what needs a second card, and what can be known of it with one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bench.gpu.engines import world
from bench.gpu.page import Rows, Say
from bench.gpu.subject import Subject
from hetpipe.runtime.replicas import PlanGroups


def two_processes(subject: Subject, say: Say) -> Rows:
    """That the pipeline is not run, and whether its two ways would have a group each, as NCCL needs."""
    say("process groups")
    places = world(subject.device_type).rank_of
    lanes = PlanGroups.create(subject.plan(), places, {}).pipelines[0]
    apart, needed = lanes.activations is not lanes.gradients, "nccl" in dist.get_backend_config()
    found = "one each" if apart else "one for both"
    wanted = "one each, since NCCL keeps to one order in a group" if needed else "one for both: gloo tells them apart"
    rows: Rows = [
        {
            "what": "two stages in two processes on one card",
            "found": "not run: NCCL refuses two ranks on one device, so each stage of the back end torch needs a card of its own",
        },
        {
            "what": "process groups for activations and for gradients",
            "found": f"{found} (wanted: {wanted})",
            "ok": apart == needed,
        },
    ]
    if subject.device_type == "cuda" and (count := torch.cuda.device_count()) > 1:
        rows.append({"what": "this machine", "found": f"{count} cards are visible; `hetpipe train` without a cluster uses all"})
    return rows
