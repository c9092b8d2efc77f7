"""What launchers are read back with: programs that stand in for torchrun and srun, a Ray, and the fields of YAML files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from hetpipe.documents.cluster import Cluster

STAND_INS = {
    "torchrun": r'printf "%s\0" "$@" "" >> "$LINES"',  # in one piece: several run at once
    "scontrol": 'echo "first of $3"; echo "second of $3"',
    "srun": """
for word in "$@"; do case $word in --ntasks=*) count=${word#*=};; esac; done
for ((i = 0; i < count; i++)); do SLURM_PROCID=$i "${@: -3}" || exit; done
""",
}


class Line(NamedTuple):
    """A torchrun that was started: its options, and the program with its arguments."""

    options: dict[str, str]
    program: list[str]

    @property
    def place(self) -> tuple[int, int]:
        """The node rank and the number of devices."""
        return int(self.options["--node-rank"]), int(self.options["--nproc-per-node"])


def places(cluster: Cluster) -> list[tuple[int, int]]:
    """As `Line.place`, by the cluster file."""
    return [(rank, sum(node.devices.values())) for rank, node in enumerate(cluster.nodes)]


def torchruns(script: str, folder: Path, shell: str = "sh", **variables: str) -> list[Line]:
    """Every torchrun that a script starts, if programs of that name stand in for those of the system."""
    folder.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    lines = folder / "lines"
    lines.write_bytes(b"")
    kept = {"PATH": f"{folder}:/usr/bin:/bin", "LINES": str(lines)}
    subprocess.run([shell, "-c", script], env=kept | variables, check=True, cwd=folder)
    return [_line(os.fsdecode(found).split("\0")) for found in lines.read_bytes().removesuffix(b"\0\0").split(b"\0\0") if found]


def _line(words: Sequence[str]) -> Line:
    count = 2 * len(("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port"))
    return Line(dict(zip(words[:count:2], words[1:count:2], strict=True)), list(words[count:]))


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """What Kubernetes makes of a command: $(NAME) is the variable, if there is one, and $$ is a dollar sign."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text)


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]


class _Port(_Fields):
    container_port: int


class _Mount(_Fields):
    name: Label
    mount_path: str


class _Resources(_Fields):
    limits: dict[str, int]


class Container(_Fields):
    name: Label
    image: str
    command: list[str]
    working_dir: str | None = None
    ports: list[_Port]
    resources: _Resources | None = None
    volume_mounts: list[_Mount]


class _EmptyFolder(_Fields):
    medium: Literal["", "Memory"]


class _Volume(_Fields):
    name: Label
    empty_dir: _EmptyFolder


class Pod(_Fields):
    restart_policy: Literal["Never", "OnFailure"]  # of a job's pods
    node_selector: dict[str, str] | None = None
    containers: list[Container]
    volumes: list[_Volume]


class _PodTemplate(_Fields):
    spec: Pod


class _JobSpec(_Fields):
    parallelism: int
    completions: int
    completion_mode: Literal["Indexed", "NonIndexed"]
    backoff_limit: int
    template: _PodTemplate


class _JobTemplate(_Fields):
    spec: _JobSpec


class ReplicatedJob(_Fields):
    name: Label
    replicas: int
    template: _JobTemplate


class _Network(_Fields):
    enable_hostnames: Annotated[bool, Field(alias="enableDNSHostnames")]
    subdomain: Label
    publish_not_ready_addresses: bool


class _Spec(_Fields):
    network: _Network
    replicated_jobs: list[ReplicatedJob]


class _Metadata(_Fields):
    name: Label


class JobSet(_Fields):
    """The fields of jobset.x-k8s.io/v1alpha2 and of batch/v1 that are written, and no others."""

    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: _Metadata
    spec: _Spec

    def pods(self) -> dict[str, tuple[Pod, int]]:
        """Each pod by the host name by which others find it, with its number in its job."""
        found = {}
        for job in self.spec.replicated_jobs:
            for index in range(job.template.spec.completions):
                name = f"{self.metadata.name}-{job.name}-0-{index}"
                assert len(name) + len("-abcde") <= 63, "a label of a host name, and the pod's own name is longer"
                found[f"{name}.{self.spec.network.subdomain}"] = job.template.spec.template.spec, index
        return found


class _SkyFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _SkyResources(_SkyFields):
    accelerators: Annotated[str, Field(pattern=r"^[^:\s]+:[1-9]\d*$")] | None = None
    cpus: Annotated[str, Field(pattern=r"^\d+\+$")] | None = None
    image_id: Annotated[str, Field(pattern=r"^docker:.+$")] | None = None


class SkyTask(_SkyFields):
    """The fields of a task of SkyPilot that are written."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    num_nodes: int
    workdir: str
    resources: _SkyResources
    run: str


class SkyGroup(_SkyFields):
    """The header of a job group of SkyPilot."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    execution: Literal["parallel"]


class StandInRay:
    """Ray in one process: a task runs when its result is asked for. `started` are the words of the torchrun of each node."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.codes, self.started, self.bundles, self.cancelled = codes, dict[int, list[str]](), list[Any](), list[Any]()
        self.strategy = ""

    def modules(self) -> dict[str, Any]:
        """What the script imports."""
        outer = self

        class Strategy(NamedTuple):
            placement_group: Any
            placement_group_bundle_index: int

        class Group:
            def wait(self, _seconds: float) -> bool:
                return True

        def placement_group(bundles: list[dict[str, float]], strategy: str) -> Group:
            outer.bundles, outer.strategy = bundles, strategy
            return Group()

        class Ray:
            class exceptions:  # noqa: N801
                RayError = RuntimeError

            class util:  # noqa: N801
                get_node_ip_address = staticmethod(lambda: "10.0.0.1")

            init = staticmethod(lambda: None)
            cancel = staticmethod(outer.cancelled.append)
            get = staticmethod(lambda task: task())
            wait = staticmethod(lambda tasks, num_returns: (tasks[:num_returns], tasks[num_returns:]))

            @staticmethod
            def remote(**_options: Any) -> Any:
                return lambda function: _Task(function)

        class Process:
            def __init__(self, words: list[str]) -> None:
                rank = int(words[words.index("--node-rank") + 1])
                outer.started[rank], self.code = words, outer.codes[rank]

            def wait(self) -> int:
                return self.code

            def terminate(self) -> None: ...

        return {
            "ray": Ray,
            "ray.util": Ray.util,
            "ray.util.placement_group": type("module", (), {"placement_group": staticmethod(placement_group)}),
            "ray.util.scheduling_strategies": type("module", (), {"PlacementGroupSchedulingStrategy": Strategy}),
            "subprocess": type("module", (), {"Popen": Process}),
        }


class _Task:
    def __init__(self, function: Any) -> None:
        self.function = function

    def options(self, *, num_cpus: float, num_gpus: float, scheduling_strategy: Any) -> _Task:
        self.placed = scheduling_strategy.placement_group_bundle_index
        return self

    def remote(self, *arguments: Any) -> Any:
        return lambda: self.function(*arguments)
