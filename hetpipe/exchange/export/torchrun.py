"""The plan itself under torchrun. Source: PyTorch, "torchrun (Elastic Launch)"."""

from __future__ import annotations

from collections import Counter

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.places import launches
from hetpipe.exchange.grid.script import SHEBANG, Export, cases, header, start


def export_torchrun(plan: Plan, cluster: Cluster | None) -> Export:
    """`hetpipe train` under torchrun: one process for each device of a node, so that local ranks are the plan's indices."""
    if cluster is not None:
        ids = [device.id for device in cluster.devices]
    else:
        most = Counter[str]()
        for device in plan.device_ids:
            node, index = device.rsplit("/", 1)
            most[node] = max(most[node], int(index) + 1)
        ids = [f"{node}/{i}" for node, count in most.items() for i in range(count)]
    idle = [device for device in ids if device not in plan.device_ids]
    assumed = ["JOB.yaml names the model, the data and the cluster file, PLAN.json is this plan"]
    if cluster is None:
        assumed.append("the nodes below are all nodes of the cluster file, in its order (give --cluster to be sure)")
    if idle:
        assumed.append(f"processes of devices without a stage wait: {', '.join(idle)}")
    nodes = launches(ids, cluster)
    lines = [
        (launch, f"{start(launch, i, nodes, False)} -m hetpipe train JOB.yaml --plan PLAN.json") for i, launch in enumerate(nodes)
    ]
    text = "\n".join([SHEBANG, *header(plan, "torchrun", [], assumed), *cases(lines)]) + "\n"
    return Export(target="torchrun", text=text, lost=())
