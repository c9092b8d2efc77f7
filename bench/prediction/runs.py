"""The 15 measured training runs of OPT-350 on GH200 nodes (Sailor, SOSP '25) as plans."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.files.messages import InputError

DEVICES_PER_NODE = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row: nodes, global and micro-batch, the three degrees, layers of each stage; and what was measured: seconds of
    an iteration, of it the gradient sums on rank 0, and the greatest bytes in use on any device."""

    nodes: int
    global_batch: int
    microbatch: int
    stages: int
    replicas: int
    degree: int
    layers: tuple[int, ...]
    seconds: float
    sums_seconds: float
    peak_bytes: int
    model: str = "OPT-350"

    @property
    def name(self) -> str:
        """`16 nodes, pp 4 dp  4 tp 4, batch 1024/8`."""
        degrees = f"pp {self.stages} dp {self.replicas:>2} tp {self.degree}"
        return f"{self.nodes:>2} nodes, {degrees}, batch {self.global_batch}/{self.microbatch}"

    def plan(self) -> Plan:
        """The plan of the row. Ranks are counted as DeepSpeed counts them, stages before replicas before shards: the node of
        stage s of replica r is s·R + r."""
        cuts = [0]
        for count in self.layers:
            cuts.append(cuts[-1] + count)
        sizes = (self.microbatch,) * (self.global_batch // self.replicas // self.microbatch)
        replicas = tuple(
            ReplicaPlan(
                microbatch_sizes=sizes,
                stages=tuple(
                    StagePlan(
                        layers=(cuts[s], cuts[s + 1]), devices=tuple(f"n{s * self.replicas + r}/{t}" for t in range(self.degree))
                    )
                    for s in range(self.stages)
                ),
            )
            for r in range(self.replicas)
        )
        return Plan(model=self.model, global_batch=self.global_batch, schedule="1f1b", replicas=replicas)


def read_runs(path: Path) -> list[Run]:
    """The rows of measured_opt350_gh200.csv."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return [
            Run(
                nodes=int(row["nodes"]),
                global_batch=int(row["gbs"]),
                microbatch=int(row["mbs"]),
                stages=int(row["pp"]),
                replicas=int(row["dp"]),
                degree=int(row["tp"]),
                layers=tuple(map(int, row["layers"].split("-"))),
                seconds=float(row["real_iter_s"]),
                sums_seconds=float(row["red_grads_s"]),
                peak_bytes=int(row["max_mem_bytes"]),
            )
            for row in rows
        ]
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"cannot read the measured runs in {path}: {error!r}") from None
