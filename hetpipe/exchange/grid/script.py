"""The text of an export: its header, in words, and a line for each node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.places import Launch
from hetpipe.files.messages import counted

SHEBANG = "#!/usr/bin/env bash"


@dataclass(frozen=True, kw_only=True)
class Export:
    """`text` is the file that the target reads; `lost` what the target cannot express of the plan, a sentence each."""

    target: str
    text: str
    lost: tuple[str, ...]


def header(plan: Plan, system: str, lost: Sequence[str], assumed: Sequence[str] = ()) -> list[str]:
    """Comments, for any format that has `#`: what this is, what is lost, and what is assumed."""
    size = f"{counted(len(plan.replicas), 'replica')}, {counted(len(plan.device_ids), 'device')}"
    lines = [
        f"# {system}: what comes closest to this plan of {plan.partitioner!r} for model {plan.model!r}",
        f"# ({size}, {plan.global_batch} samples a step).",
    ]
    if plan.predicted is not None:
        seconds = plan.predicted.step_seconds
        lines.append(f"# The plan's predicted step, {seconds:.6g} s, is not predicted for what differs from it.")
    lines.append(f"# {system} cannot express:" if lost else f"# Nothing of the plan is lost in {system}.")
    lines += [f"#   - {item}" for item in lost]
    return lines + [f"# Assumed: {item}" for item in assumed]


def cases(lines: Sequence[tuple[Launch, str]]) -> list[str]:
    """One branch a node: `bash FILE NODE` on each."""
    found = ["# On each node: bash FILE NODE", 'case "$1" in']
    for launch, line in lines:
        found.append(f"  {shlex.quote(launch.node)}) {line} ;;")
    usage = shlex.quote(f"give a node: {' '.join(launch.node for launch, _ in lines)}")
    return [*found, f"  *) echo {usage} >&2; exit 2 ;;", "esac"]


def starts(nodes: Sequence[Launch], program: str) -> list[str]:
    """Comments, for formats that start nothing: the command of each node."""
    return ["# Start:", *(f"#   on {launch.node}: {start(launch, i, nodes, True)} {program}" for i, launch in enumerate(nodes))]


def start(launch: Launch, number: int, all_: Sequence[Launch], visible: bool) -> str:
    """`torchrun` on one node. Static rendezvous: with c10d, --node-rank is ignored."""
    devices = f"CUDA_VISIBLE_DEVICES={','.join(map(str, launch.indices))} " if visible else ""
    return (
        f"{devices}torchrun --nnodes {len(all_)} --node-rank {number} --nproc-per-node {len(launch.indices)} "
        f"--master-addr {shlex.quote(all_[0].host)} --master-port 29500"
    )
