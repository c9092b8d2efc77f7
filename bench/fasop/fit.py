"""Layer times from FASOP's estimates: those with which its formula comes nearest to all of its published plans."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from bench.fasop.formula import Times, estimate
from bench.fasop.published import BITS_PER_SECOND, DEVICES_PER_NODE, MEMORY_GB, NODES, Model, Searched
from hetpipe.exchange.importers.fasop_factors import layer_kinds
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan, ReplicaPlan, StagePlan

START_SECONDS, MOST_SECONDS = 1e-3, 2e-2


def cluster_of(a100_node: int) -> Cluster:
    """Eight nodes of four, each with one adapter."""
    types = ["A100" if node == a100_node else "A10" for node in range(NODES)]
    return Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {kind: {"memory": f"{gb} GB"} for kind, gb in MEMORY_GB.items()},
            "nodes": [
                {
                    "name": f"n{i}",
                    "devices": {kind: DEVICES_PER_NODE},
                    "link": {"bandwidth": BITS_PER_SECOND[kind] / 8},
                    "adapter": {"bandwidth": "40 Gbit/s"},
                }
                for i, kind in enumerate(types)
            ],
        },
        "FASOP's cluster",
    )


def plan_of(model: Model, searched: Searched) -> Plan:
    """As FASOP counts ranks: stages before replicas."""
    R, ends = searched.replicas, np.cumsum([0, *searched.layers]).tolist()
    sizes = (searched.microbatch,) * (model.global_batch // R // searched.microbatch)

    def device(stage: int, replica: int) -> str:
        node, index = divmod(stage * R + replica, DEVICES_PER_NODE)
        return f"n{node}/{index}"

    replicas = tuple(
        ReplicaPlan(
            microbatch_sizes=sizes,
            stages=tuple(StagePlan(layers=(ends[s], ends[s + 1]), devices=(device(s, r),)) for s in range(len(searched.layers))),
        )
        for r in range(R)
    )
    return Plan(model=model.name, global_batch=model.global_batch, replicas=replicas)


def times_of(model: Model, values: NDArray[np.float64]) -> Times:
    """Seconds of each layer from those of each kind of layer on both types; T5's embeddings are two."""
    kinds = [f"{kind}.{i > 0}" if kind == "embedding" else kind for i, kind in enumerate(layer_kinds(model.name, model.layers))]
    names = list(dict.fromkeys(kinds))
    return {
        kind: [float(row[names.index(name)]) for name in kinds]
        for kind, row in zip(BITS_PER_SECOND, values.reshape(2, len(names)), strict=True)
    }


def errors(model: Model, times: Times) -> list[tuple[float, float]]:
    """Of the pipeline and of the step of each published plan, relative."""
    found = []
    for searched in model.searched:
        got = estimate(plan_of(model, searched), model, times, cluster_of(searched.a100_node))
        found.append((got.pipeline / searched.pipeline_seconds - 1, got.step / searched.step_seconds - 1))
    return found


def fitted(model: Model) -> Times:
    """By least squares of the relative errors of pipelines."""
    kinds = len({*layer_kinds(model.name, model.layers)}) + (model.name == "T5")

    def missed(scaled: NDArray[np.float64]) -> list[float]:
        return [pipeline for pipeline, _ in errors(model, times_of(model, scaled * START_SECONDS))]

    limits = (0.0, MOST_SECONDS / START_SECONDS)
    found = least_squares(missed, np.ones(2 * kinds), bounds=limits, diff_step=1e-4, x_scale=0.3)
    return times_of(model, found.x * START_SECONDS)
