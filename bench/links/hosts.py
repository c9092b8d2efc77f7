"""Hosts that are network namespaces of this machine, each joined to one switch by a link with a rate each way. Root only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

INTERFACE = "net0"  # of every host
BURST_BYTES = 2**16
HEADERS = 1448 / 1514  # bytes of a TCP segment over those of its Ethernet frame, which the rates count
LIMIT_SECONDS = 240


class Host(NamedTuple):
    """Its name, bytes/s that it sends and that it receives at most, and how many devices it has."""

    name: str
    out: float
    into: float
    devices: int

    def address(self, hosts: Sequence[Host]) -> str:
        """Among these."""
        return f"10.77.0.{1 + hosts.index(self)}"


HOSTS = (Host("a", 30e6, 90e6, 1), Host("b", 60e6, 20e6, 2), Host("c", 15e6, 45e6, 1))


def missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if tools:
        return f"network namespaces need the commands {tools}"
    try:
        with network([Host("trial", 1e6, 1e6, 1)]):
            return None
    except subprocess.CalledProcessError as error:
        return f"'{' '.join(error.cmd)}' failed: {error.stderr.strip()}"


@contextmanager
def network(hosts: Sequence[Host]) -> Iterator[Mapping[str, str]]:
    """A switch and these hosts; the namespace of each host, by name. The rates are token buckets at both ends of its link."""
    mark = f"hetpipe{os.getpid()}"
    switch, space = f"{mark}-switch", {host.name: f"{mark}-{host.name}" for host in hosts}
    try:
        for name in (switch, *space.values()):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for i, host in enumerate(hosts):
            own, port = space[host.name], f"port{i}"
            _run("ip", "link", "add", INTERFACE, "netns", own, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", own, "addr", "add", f"{host.address(hosts)}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", own, "link", "set", interface, "up")
            for where, interface, rate in ((own, INTERFACE, host.out), (switch, port, host.into)):
                _run(
                    "tc",
                    "-n",
                    where,
                    "qdisc",
                    "add",
                    "dev",
                    interface,
                    "root",
                    "tbf",
                    "rate",
                    f"{rate:.0f}bps",
                    "burst",
                    str(BURST_BYTES),
                    "latency",
                    "50ms",
                )
        yield space
    finally:
        for name in (switch, *space.values()):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def start(space: str, host: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A command on a host, under the host's name."""
    named = ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *command]
    return subprocess.Popen(
        named,
        env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": INTERFACE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def torchrun(hosts: Sequence[Host], spaces: Mapping[str, str], arguments: Sequence[str]) -> None:
    """`python ARGUMENTS` as one rank a device of all hosts. RuntimeError with what they said if it fails."""
    running = []
    for i, host in enumerate(hosts):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            str(len(hosts)),
            "--node-rank",
            str(i),
            "--nproc-per-node",
            str(host.devices),
            "--master-addr",
            hosts[0].address(hosts),
            "--master-port",
            "29500",
            *arguments,
        ]
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
