"""A Python script for Ray: a placement group with a bundle for each node. Source: Ray, "Placement Groups"."""

from __future__ import annotations

import json

from hetpipe.documents.cluster import Cluster
from hetpipe.exchange.launch.asked import Asked
from hetpipe.exchange.launch.kinds import kinds_of, summary
from hetpipe.exchange.launch.texts import program

SHARE = 0.001  # of the mark that Ray gives to each machine with a type of accelerator


def ray_script(cluster: Cluster, asked: Asked) -> str:
    """Each bundle is a machine of its own, on which one task starts torchrun with the devices of the bundle."""
    kinds = kinds_of(cluster)
    bundles: list[dict[str, float]] = [{}] * len(cluster.nodes)
    for kind in kinds:
        requested = kind.requested(asked)
        bundle: dict[str, float] = {"CPU": kind.size * asked.cpus}
        if requested:
            bundle["GPU"] = sum(requested.values())
        if len(requested) == 1:  # Ray marks a machine with one type only
            bundle[f"accelerator_type:{next(iter(requested))}"] = SHARE
        for rank in kind.ranks:
            bundles[rank] = bundle
    sizes = [sum(node.devices.values()) for node in cluster.nodes]
    head = f'"""{summary(cluster, kinds)}. To start: ray job submit --working-dir . -- python FILE"""\n'
    rows = "".join(f"    {json.dumps(bundle)},\n" for bundle in bundles)
    words = json.dumps(program(asked.command))
    return f"{head}{IMPORTS}BUNDLES = [\n{rows}]\nDEVICES = {json.dumps(sizes)}\nPROGRAM = {words}\n{BODY}"


IMPORTS = """
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

WAIT_SECONDS = 600  # for machines that have what the bundles need

# A bundle for each node of the cluster file, in its order; and how many devices each node has
"""

BODY = '''

@ray.remote(max_retries=0)
def address():
    """Return the address of this machine and a free port there."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1]


@ray.remote(max_retries=0)
def node(rank, host, port):
    """Run torchrun on this machine and return its exit code."""
    place = ["--node-rank", str(rank), "--master-addr", host, "--master-port", str(port)]
    counts = ["--nnodes", str(len(BUNDLES)), "--nproc-per-node", str(DEVICES[rank])]
    process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *counts, *place, *PROGRAM])
    try:
        return process.wait()
    finally:
        process.terminate()
        process.wait()


def main():
    """Start all nodes, end all when one fails, and return the exit code of the first that failed."""
    ray.init()
    group = placement_group(BUNDLES, strategy="STRICT_SPREAD")
    if not group.wait(WAIT_SECONDS):
        print(f"no machines have {BUNDLES}: 'ray status' shows what there is", file=sys.stderr)
        return 1

    def on(rank, task, cpus, gpus):
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        return task.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy)

    host, port = ray.get(on(0, address, 1, 0).remote())
    running = {}
    for rank, bundle in enumerate(BUNDLES):
        running[on(rank, node, bundle["CPU"], bundle.get("GPU", 0)).remote(rank, host, port)] = rank
    code = 0
    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        rank = running.pop(done)
        try:
            ended = ray.get(done)
        except ray.exceptions.RayError as error:
            ended = 1
            if not code:  # else it was cancelled
                print(f"node {rank}: {error}", file=sys.stderr)
        if ended and not code:
            code = ended if ended > 0 else 128 - ended
            print(f"node {rank} ended with exit code {code}; the others are stopped", file=sys.stderr)
            for other in running:
                ray.cancel(other)
    return code


if __name__ == "__main__":
    sys.exit(main())
'''
