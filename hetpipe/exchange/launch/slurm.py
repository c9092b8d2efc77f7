"""A batch script for SLURM: each kind of node is a component of a heterogeneous job. Source: "Heterogeneous Job Support"."""

from __future__ import annotations

import shlex

from hetpipe.documents.cluster import Cluster
from hetpipe.exchange.launch.asked import Asked, address
from hetpipe.exchange.launch.kinds import Kind, kinds_of, summary
from hetpipe.exchange.launch.texts import script_of

SIGNAL = "TERM@120"  # two minutes before the time limit, for a step and a checkpoint


def slurm_script(cluster: Cluster, asked: Asked) -> str:
    """A torchrun on each node, one step of SLURM for each component; the script ends with the code of the first that failed."""
    kinds = kinds_of(cluster)
    several = len(kinds) > 1
    lines = ["#!/bin/bash", f"# {summary(cluster, kinds)}. To start: sbatch FILE", f"#SBATCH --job-name={asked.name}"]
    for i, kind in enumerate(kinds):
        lines += [*["#SBATCH hetjob"][: i > 0], f"#SBATCH {_request(kind, asked)}"]
    nodes = "SLURM_JOB_NODELIST_HET_GROUP_0" if several else "SLURM_JOB_NODELIST"
    lines += ["", f'MASTER_ADDR=$(scontrol show hostnames "${nodes}" | head -n 1)', "export MASTER_ADDR"]
    steps = [_step(kind, asked, len(cluster.nodes), i if several else None) for i, kind in enumerate(kinds)]
    if not several:
        return "\n".join([*lines, *steps, ""])
    lines.append("steps=()")
    for step in steps:
        lines += [f"{step} &", "steps+=($!)"]
    lines += ["code=0", 'for step in "${steps[@]}"; do', '  wait "$step" || { ended=$?; [ "$code" -ne 0 ] || code=$ended; }']
    return "\n".join([*lines, "done", 'exit "$code"', ""])


def _request(kind: Kind, asked: Asked) -> str:
    """What a component asks for: `--nodes=2 --ntasks-per-node=1 --gres=gpu:a100:4 …`."""
    words = [f"--nodes={len(kind.nodes)}", "--ntasks-per-node=1"]
    if devices := kind.requested(asked):
        words.append("--gres=" + ",".join(f"gpu:{name}:{count}" for name, count in devices.items()))
    hosts = [address(node.host, node.name) for node in kind.nodes if node.host is not None]
    if hosts:
        words.append(f"--nodelist={','.join(hosts)}")
    return " ".join([*words, f"--cpus-per-task={kind.size * asked.cpus}", f"--signal={SIGNAL}"])


def _step(kind: Kind, asked: Asked, nodes: int, component: int | None) -> str:
    """srun of one component. It does not take the number of cores from the script (SLURM 22.05), so that is said again."""
    where = "" if component is None else f"--het-group={component} "
    count = len(kind.nodes)
    script = script_of(asked, kind, nodes, "SLURM_PROCID", '"$MASTER_ADDR"')
    cores = kind.size * asked.cpus
    return f"srun {where}--nodes={count} --ntasks={count} --cpus-per-task={cores} sh -c {shlex.quote(script)}"
