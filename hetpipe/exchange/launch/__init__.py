"""The launcher of a job for the system that starts its processes: from the cluster file and a command to a file. No torch. Read
in this order:

asked (what the user says), kinds (of nodes), texts (torchrun's line on a node, YAML), slurm, jobset, ray, skypilot, hosts (each a
system, of which a new one gets a line in `TARGETS`), over_ssh (starts the hosts).
"""

from __future__ import annotations

from collections.abc import Callable

from hetpipe.documents.cluster import Cluster
from hetpipe.exchange.launch.asked import Asked
from hetpipe.exchange.launch.hosts import hosts_text
from hetpipe.exchange.launch.jobset import jobset_text
from hetpipe.exchange.launch.ray import ray_script
from hetpipe.exchange.launch.skypilot import skypilot_text
from hetpipe.exchange.launch.slurm import slurm_script

__all__ = ["TARGETS", "Asked"]

TARGETS: dict[str, Callable[[Cluster, Asked], str]] = {
    "slurm": slurm_script,
    "jobset": jobset_text,
    "ray": ray_script,
    "skypilot": skypilot_text,
    "hosts": hosts_text,
}
