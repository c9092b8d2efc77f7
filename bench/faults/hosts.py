"""Agents of torchrun on hosts of their own (see `bench.links.hosts`), whose lines are noted with the time at which they came."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.links.hosts import Host, start

PORT = 29500
BYTES_PER_SECOND = 100e6
HOSTS = tuple(Host(name, BYTES_PER_SECOND, BYTES_PER_SECOND, count) for name, count in (("a", 1), ("b", 2), ("c", 1), ("d", 1)))
SLOWDOWN = {"a": 3.0, "b": 6.0, "c": 12.0, "d": 6.0}  # of the emulated devices of each host
LAST_CALL_SECONDS = 3  # for which torchrun waits for further agents once there are enough
TIMEOUT_SECONDS = 10  # of a message of a step
LIMIT_SECONDS = 600.0
CLUSTER = {
    "format": "hetpipe.cluster/1",
    "device_types": {f"of-{name}": {"memory": "1 GiB", "emulate": {"slowdown": factor}} for name, factor in SLOWDOWN.items()},
    "nodes": [{"name": host.name, "host": host.name, "devices": {f"of-{host.name}": host.devices}} for host in HOSTS],
    "link": {"bandwidth": "100 MB/s", "latency": "100 us"},
}
JOB = {
    "format": "hetpipe.job/1",
    "model": {"name": "mlp", "args": {"layers": 8, "width": 128, "inputs": 64, "outputs": 4}},
    "data": {"name": "random_classification", "args": {"samples": 1000, "inputs": 64, "classes": 4}},
    "cluster": "cluster.yaml",
    "train": {"global_batch": 96, "dtype": "float64", "optimizer": {"name": "AdamW", "lr": 0.001}},
    "checkpoint": {"folder": "saved", "every_steps": 100},
    "elastic": {},
    "log": {"folder": "log", "every_steps": 1},
}


class Line(NamedTuple):
    """What a host said, and when."""

    seconds: float
    host: str
    text: str


class Run:
    """One job under torchrun on these hosts, in a folder that they share."""

    def __init__(self, folder: Path, spaces: Mapping[str, str], job: Mapping[str, Any] = JOB) -> None:
        self.folder, self.spaces = folder, spaces
        self.lines, self.agents = list[Line](), dict[str, subprocess.Popen[str]]()
        folder.mkdir(parents=True)
        (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
        (folder / "job.yaml").write_text(yaml.safe_dump(dict(job)))

    def start(self, host: Host, *settings: str) -> None:
        """The agent of a host."""
        options = {
            "nnodes": f"{len(HOSTS) - 1}:{len(HOSTS)}",
            "nproc-per-node": str(host.devices),
            "max-restarts": "20",
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{HOSTS[0].address(HOSTS)}:{PORT}",
            "rdzv-id": "faults",
            "local-addr": host.address(HOSTS),
            "rdzv-conf": f"last_call_timeout={LAST_CALL_SECONDS},is_host={int(host == HOSTS[0])}",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "hetpipe", "train", "job.yaml"]
        environment = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "HETPIPE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
            "PYTHONPATH": os.getcwd(),
        }
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.folder)]
        sets = [word for setting in settings for word in ("--set", setting)]
        agent = start(self.spaces[host.name], host.name, [*inside, *command, *sets], environment)
        self.agents[host.name] = agent
        threading.Thread(target=self._note, args=(host.name, agent), daemon=True).start()

    def start_those_that_ended(self, *settings: str) -> None:
        """As whoever supervises a host does. An agent that is cut off for long ends."""
        for host in HOSTS:
            if self.agents[host.name].poll() not in (None, 0):
                self.start(host, *settings)

    def _note(self, host: str, agent: subprocess.Popen[str]) -> None:
        assert agent.stdout is not None
        with (self.folder / "output").open("a", buffering=1) as file:
            for text in agent.stdout:
                self.lines.append(Line(time.monotonic(), host, text.rstrip()))
                file.write(f"{time.strftime('%H:%M:%S')} {host}: {text}")

    def fault(self, said: str) -> RuntimeError:
        """Where all that the hosts have said can be read."""
        return RuntimeError(f"{said}: see {self.folder}/output")

    def records(self) -> list[dict[str, Any]]:
        """The steps in its log. (A line about a device that has become slower is of none.)"""
        log = self.folder / "log" / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        records = (json.loads(line) for line in lines if line.endswith("\n"))
        return [record for record in records if "loss" in record]

    def step(self) -> int:
        """The last in the log."""
        records = self.records()
        return int(records[-1]["step"]) if records else 0

    def reach(self, step: int) -> float:
        """Wait until this step is in the log; the time."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.step() < step:
            if time.monotonic() > deadline or all(agent.poll() is not None for agent in self.agents.values()):
                raise self.fault(f"step {step} does not come")
            time.sleep(0.05)
        return time.monotonic()

    def said(self, words: str, since: float, hosts: Sequence[str] | None = None) -> list[float]:
        """When a line with these words came."""
        return [x.seconds for x in self.lines if x.seconds >= since and words in x.text and (hosts is None or x.host in hosts)]

    def ranks(self, host: str) -> list[int]:
        """The processes of the ranks of a host."""
        found, there = [], (Path("/proc") / str(self.agents[host].pid) / "ns" / "net").readlink()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                variables = (process / "environ").read_bytes().split(b"\0")
                words = (process / "cmdline").read_bytes()
            except OSError:
                continue
            ours = b"hetpipe" in words and b"torch.distributed.run" not in words and f"PWD={self.folder}".encode() in variables
            if ours and (process / "ns" / "net").readlink() == there:
                found.append(int(process.name))
        return sorted(found)

    def finish(self) -> None:
        """Wait for all agents, which end well."""
        for name, agent in self.agents.items():
            if agent.wait(LIMIT_SECONDS) != 0:
                raise self.fault(f"host {name} ended with {agent.returncode}")

    def stop(self) -> None:
        """Tell all agents to stop, and wait until they have."""
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            agent.wait(LIMIT_SECONDS)

    def switch_off(self, host: str) -> None:
        """Kill the agent of a host and its ranks, which are no longer in its process group."""
        agent = self.agents[host]
        if agent.poll() is None:
            for process in (*self.ranks(host), agent.pid):
                os.kill(process, signal.SIGKILL)
            agent.wait()

    def end(self) -> None:
        """End what is left."""
        for host in self.agents:
            self.switch_off(host)
