"""A JobSet for Kubernetes: each kind of node is a replicated job. Source: the types of JobSet's API, version v1alpha2."""

from __future__ import annotations

import re
from typing import Any

from hetpipe.documents.cluster import Cluster
from hetpipe.exchange.launch.asked import Asked
from hetpipe.exchange.launch.kinds import Kind, kinds_of, refuse_hosts, summary
from hetpipe.exchange.launch.texts import script_of, yaml_text
from hetpipe.files.messages import InputError

GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"  # the label that NVIDIA's feature discovery gives to nodes


def jobset_text(cluster: Cluster, asked: Asked) -> str:
    """One pod a node. JobSet makes a headless service, over which pods find the first by its host name."""
    if asked.image is None:
        raise InputError("--to jobset needs --image, a container image that has hetpipe and the job's files")
    kinds = kinds_of(cluster)
    refuse_hosts(kinds, "Kubernetes")
    master = f"{asked.name}-{kinds[0].name}-0-0.{asked.name}"
    mixed = len({device_type for kind in kinds for device_type in kind.devices}) > 1
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": asked.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": asked.name, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": kind.name, "replicas": 1, "template": {"spec": _job(kind, asked, len(cluster.nodes), master, mixed)}}
                for kind in kinds
            ],
        },
    }
    return yaml_text([f"{summary(cluster, kinds)}. To start: kubectl apply -f FILE"], [document])


def _job(kind: Kind, asked: Asked, nodes: int, master: str, mixed: bool) -> dict[str, Any]:
    """An indexed job with a pod for each node of the kind. A pod that fails ends the whole set."""
    pod: dict[str, Any] = {"restartPolicy": "Never"}
    if selector := _selector(kind, asked, mixed):
        pod["nodeSelector"] = selector
    script = script_of(asked, kind, nodes, "JOB_COMPLETION_INDEX", master)
    container: dict[str, Any] = {
        "name": "hetpipe",
        "image": asked.image,
        "command": ["sh", "-c", re.sub(r"\$(?=[$(])", "$$", script)],  # Kubernetes replaces $(NAME) itself, but not $$(NAME)
        "ports": [{"containerPort": asked.port}],
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if asked.folder is not None:
        container["workingDir"] = asked.folder
    if devices := kind.requested(asked):
        container["resources"] = {"limits": {GPU: sum(devices.values())}}
    pod |= {"containers": [container], "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]}
    count = len(kind.nodes)
    return {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": 0, "template": {"spec": pod}}


def _selector(kind: Kind, asked: Asked, mixed: bool) -> dict[str, str]:
    """The label of the machines of this kind; none if all devices of the cluster are alike and nobody said it."""
    found = {}
    for name in kind.requested(asked):
        label, _, value = name.rpartition("=")
        if mixed and name not in asked.types.values():
            raise InputError(
                f"the cluster has several types of devices, and a node for {name!r} is chosen by a label. Say which one its "
                f"machines have: --type {name}=PRODUCT, where PRODUCT is the value of {PRODUCT} (kubectl get nodes -L "
                f"{PRODUCT}), or --type {name}=LABEL=VALUE for another label"
            )
        if name in asked.types.values():
            found[label or PRODUCT] = value
    if len(kind.requested(asked)) > len(found) > 0:
        raise InputError(
            f"nodes with {' and '.join(map(repr, kind.devices))} are chosen by one label, but --type gives {len(found)} values "
            f"for it. Give the types the same label and value, such as --type NAME=LABEL=VALUE for each"
        )
    return found
