"""`hetpipe profile` under torchrun on hosts whose rates are set, and what it makes of them. See README.md beside this file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.links.hosts import HEADERS, Host, network, start
from hetpipe.spec.profile import Profile

HOSTS = (Host("a", 30e6, 90e6, 1), Host("b", 60e6, 20e6, 2), Host("c", 15e6, 45e6, 1))
LIMIT_SECONDS = 240
JOB = {
    "format": "hetpipe.job/1", "model": {"name": "mlp"}, "cluster": "cluster.yaml",
    "data": {"name": "random_classification", "args": {"inputs": 32, "classes": 10}},
    "train": {"global_batch": 4, "steps": 1, "optimizer": {"name": "SGD", "lr": 0.1}},
}  # fmt: skip


def profiled(hosts: Sequence[Host]) -> Profile:
    """What `hetpipe profile` measures on them. RuntimeError with its output if it fails."""
    with tempfile.TemporaryDirectory() as folder, network(hosts) as spaces:
        at = Path(folder)
        nodes = [{"name": host.name, "host": host.name, "devices": {"cpu": host.devices}} for host in hosts]
        cluster = {"format": "hetpipe.cluster/1", "device_types": {"cpu": {"memory": "1 GiB"}}, "nodes": nodes}
        (at / "cluster.yaml").write_text(json.dumps(cluster))
        job = {**JOB, "profiler": {"microbatch_sizes": [1, 2], "repeats": 1, "cache": str(at / "cache")}}
        (at / "job.yaml").write_text(json.dumps(job))
        running = []
        for i, host in enumerate(hosts):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank", str(i),
                "--nproc-per-node", str(host.devices), "--master-addr", hosts[0].address(hosts), "--master-port", "29500",
                "-m", "hetpipe", "profile", str(at / "job.yaml"), "-o", str(at / "profile.json"),
            ]  # fmt: skip
            running.append(start(spaces[host.name], host.name, command, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}))
        try:
            output = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if any(process.returncode for process in running):
            raise RuntimeError("\n".join(output))
        return Profile.load(at / "profile.json")


def carried(hosts: Sequence[Host], source: str | None, target: str | None) -> float:
    """Bytes/s from a host to a host, or to or from all others by as many flows as there can be, as the rates are set: of one
    flow the slower end's, of several no more than all ends carry together."""
    others = [host for host in hosts if host.name not in (source, target)]
    out = [host.out for host in hosts if host.name == source] or [host.out for host in others]
    into = [host.into for host in hosts if host.name == target] or [host.into for host in others]
    return min(sum(out), sum(into)) * HEADERS


def main() -> None:
    """Print the table of README.md."""
    try:
        profile = profiled(HOSTS)
    except subprocess.TimeoutExpired as error:
        sys.exit(f"no end within {LIMIT_SECONDS} s: {error}")
    print("| from | to | flows | set, MB/s | measured, MB/s | error | spread |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for row in profile.provenance["links"]:
        source, target = row.get("from"), row.get("to")
        if source != target:
            wanted, got, rest = carried(HOSTS, source, target), row["bytes_per_second"], "the others"
            print(f"| {source or rest} | {target or rest} | {row['flows']} | {wanted / 1e6:.1f} | {got / 1e6:.1f} "
                  f"| {got / wanted - 1:+.1%} | {row['relative_spread']:.0%} |")  # fmt: skip
    print("\n| node | adapter out, MB/s | in, MB/s |\n|---|--:|--:|")
    for adapter in profile.adapters:
        print(f"| {adapter.node} | {adapter.rates.out / 1e6:.1f} | {adapter.rates.into / 1e6:.1f} |")
    hidden = profile.overheads[0].transfer_overlap or 0.0
    print(f"\nOf a transfer from a to b, or of what both compute beside it, {hidden:.0%} were hidden.")


if __name__ == "__main__":
    main()
