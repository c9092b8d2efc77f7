"""A task of SkyPilot, or a job group of tasks if nodes are of several kinds. Sources: "SkyPilot YAML", "Job Groups"."""

from __future__ import annotations

import shlex
from typing import Any

from hetpipe.documents.cluster import Cluster
from hetpipe.exchange.launch.asked import Asked
from hetpipe.exchange.launch.kinds import Kind, kinds_of, refuse_hosts, summary
from hetpipe.exchange.launch.texts import script_of, yaml_text
from hetpipe.files.messages import InputError

FIRST_OF_TASK = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'


def skypilot_text(cluster: Cluster, asked: Asked) -> str:
    """One task for each kind of node. Tasks of a job group start together and know each other by their host names."""
    kinds = kinds_of(cluster)
    refuse_hosts(kinds, "SkyPilot")
    group = [{"name": asked.name, "execution": "parallel"}] if len(kinds) > 1 else []
    tasks = [_task(kind, asked, len(cluster.nodes), kinds[0]) for kind in kinds]
    if not group:
        tasks[0]["name"] = asked.name
    start = "sky jobs launch FILE" if group else "sky launch FILE"
    hint = "Without an --image that has hetpipe, add a 'setup' that installs it to each task."
    return yaml_text([f"{summary(cluster, kinds)}. To start: {start}", *[hint][: asked.image is None]], [*group, *tasks])


def _task(kind: Kind, asked: Asked, nodes: int, first: Kind) -> dict[str, Any]:
    devices = kind.requested(asked)
    if len(devices) > 1:
        raise InputError(
            f"SkyPilot rents nodes with one type of device, but {kind.nodes[0].name!r} has {' and '.join(map(repr, devices))}"
            ". Give each type a node of its own, or use --to hosts"
        )
    if devices:
        ((name, count),) = devices.items()
        resources = {"accelerators": f"{name}:{count}"}
    else:
        resources = {"cpus": f"{kind.size * asked.cpus}+"}
    if asked.image is not None:
        resources["image_id"] = f"docker:{asked.image}"
    master = FIRST_OF_TASK if kind is first else f'{shlex.quote(f"{first.name}-0")}."$SKYPILOT_JOBGROUP_NAME"'
    return {
        "name": kind.name,
        "num_nodes": len(kind.nodes),
        "workdir": ".",
        "resources": resources,
        "run": script_of(asked, kind, nodes, "SKYPILOT_NODE_RANK", master),
    }
