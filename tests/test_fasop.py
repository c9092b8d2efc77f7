"""hetpipe's plans on FASOP's published inputs are no slower than FASOP's own plans; and plans from such inputs train.

FASOP (Hwang et al., HPDC '24; github.com/AvatarHwang/FASOP) searched plans of two models on a node of 4 A100 and seven nodes of
4 A10. docs/measurements.md says where the layer times come from.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.exchange.export import export
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.fasop import greedy
from hetpipe.planning.partition import Problem
from hetpipe.planning.registry import partitioner
from hetpipe.predict.simulator import simulate
from tests.support.ranks import run_ranks
from tests.support.split_programs import compared

NODES, DEVICES_PER_NODE = 8, 4
MEMORY = {"A100": "40 GB", "A10": "24 GB"}
LINKS = {"A100": "1840 Gbit/s", "A10": "252 Gbit/s"}  # inside a node
Layers = list[tuple[int, float]]  # how many layers in a row take so many milliseconds forward, for one sample


class Published(NamedTuple):
    """A model, and FASOP's choice for it: two replicas of 16 stages, stages before replicas in the order of the devices."""

    options: ImportOptions
    milliseconds: dict[str, Layers]
    global_batch: int
    microbatch: int
    a100_node: int
    cuts: tuple[int, ...]


GPT2_XL = Published(
    ImportOptions(model="gpt2XL", hidden_size=1600, sequence_length=1024, attention_heads=16, vocabulary=50257, number_bytes=2),
    {"A100": [(1, 0.0306), (48, 1.5764), (1, 1.1172)], "A10": [(1, 0.0), (48, 2.3758), (1, 2.0796)]},
    global_batch=64,
    microbatch=1,
    a100_node=0,
    cuts=(5, 4, 3, 3, 2, *[3] * 11),
)
T5 = Published(
    ImportOptions(model="T5", hidden_size=1024, sequence_length=512, attention_heads=32, vocabulary=30522, number_bytes=2),
    {
        "A100": [(1, 0.7656), (24, 1.2672), (1, 1.1183), (24, 1.1752)],
        "A10": [(1, 1.4932), (24, 1.5144), (1, 1.6374), (24, 1.4804)],
    },
    global_batch=128,
    microbatch=2,
    a100_node=7,
    cuts=(4, *[3] * 14, 4),
)


def cluster_of(a100_node: int) -> Cluster:
    """Eight nodes of four, each with one adapter."""
    kinds = ["A100" if node == a100_node else "A10" for node in range(NODES)]
    nodes = [
        {
            "name": f"n{number}",
            "devices": {kind: DEVICES_PER_NODE},
            "link": {"bandwidth": LINKS[kind]},
            "adapter": {"bandwidth": "40 Gbit/s"},
        }
        for number, kind in enumerate(kinds)
    ]
    types = {kind: {"memory": memory} for kind, memory in MEMORY.items()}
    return Cluster.parse({"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes}, "FASOP's cluster")


def profile_of(model: Published, folder: Path) -> Profile:
    """The profile that `hetpipe import fasop` makes of the layer times."""
    for kind, layers in model.milliseconds.items():
        seconds = np.repeat([each / 1e3 for _, each in layers], [count for count, _ in layers])
        np.save(folder / f"{model.options.model}_{kind}_1.npy", seconds)
    return import_published("fasop", [folder], model.options).profile


def plan_of(model: Published) -> Plan:
    """FASOP's choice."""
    replicas, ends = 2, np.cumsum([0, *model.cuts]).tolist()
    sizes = (model.microbatch,) * (model.global_batch // replicas // model.microbatch)

    def stage(number: int, replica: int) -> StagePlan:
        node, index = divmod(number * replicas + replica, DEVICES_PER_NODE)
        return StagePlan(layers=(ends[number], ends[number + 1]), devices=(f"n{node}/{index}",))

    rows = [tuple(stage(number, replica) for number in range(len(model.cuts))) for replica in range(replicas)]
    plans = tuple(ReplicaPlan(microbatch_sizes=sizes, stages=stages) for stages in rows)
    return Plan(model=model.options.model, global_batch=model.global_batch, replicas=plans)


@pytest.mark.parametrize(("model", "seconds"), [(GPT2_XL, 1.102), (T5, 0.845)], ids=["gpt2XL", "T5"])
def test_fasops_choice_costs_what_the_documentation_says(model: Published, seconds: float, tmp_path: Path) -> None:
    assert simulate(plan_of(model), profile_of(model, tmp_path), cluster_of(model.a100_node)).step_seconds == pytest.approx(
        seconds, abs=6e-4
    )


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT2_XL, T5], ids=["gpt2XL", "T5"])
def test_hetpipes_plan_is_no_slower_than_fasops_in_the_simulator(model: Published, tmp_path: Path) -> None:
    cluster, profile = cluster_of(model.a100_node), profile_of(model, tmp_path)
    problem = Problem.create(cluster=cluster, profile=profile, global_batch=model.global_batch)
    plans = plan_of(model), partitioner("fasop")(problem).plan, Auto(time_limit_seconds=60.0)(problem).plan
    published, rule, own = (simulate(plan, profile, cluster).step_seconds for plan in plans)
    assert own <= min(published, rule) * (1 + 1e-9)


# ---- the two models at toy width, their stages split over both devices of a node ----

GPT_CHAIN = {"layers": 4, "width": 64, "heads": GPT2_XL.options.attention_heads, "context": 8, "vocabulary": 32}
T5_CHAIN: dict[str, Any] = {"d_model": 64, "d_kv": 4, "d_ff": 128, "num_heads": T5.options.attention_heads, "vocab_size": 32}
T5_CHAIN |= {"num_layers": 2, "num_decoder_layers": 2, "dropout_rate": 0.0}
TOY: dict[str, tuple[dict[str, Any], Published, Callable[..., list[float]]]] = {
    "gpt": (GPT_CHAIN, GPT2_XL, lambda first, block, last: [first, *[block / 3, block * 2 / 3] * 4, last]),  # attention, MLP
    "t5": (T5_CHAIN, T5, lambda first, encoder, bridge, decoder: [first, *[encoder] * 2, bridge, *[decoder] * 3]),
}
SHARE = 0.55  # of the seconds on one device, on each of two: assumed, since the published files are of one


def two_nodes() -> Cluster:
    """Two A100, and two A10."""
    nodes = [
        {"name": f"n{i}", "devices": {kind: 2}, "link": {"bandwidth": LINKS[kind]}, "adapter": {"bandwidth": "40 Gbit/s"}}
        for i, kind in enumerate(MEMORY)
    ]
    types = {kind: {"memory": memory} for kind, memory in MEMORY.items()}
    return Cluster.parse({"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes}, "two of FASOP's nodes")


def toy_profile(name: str, folder: Path) -> Profile:
    """The profile of FASOP's files, one for each device type and tensor-parallel degree, of the toy model."""
    _, model, chain = TOY[name]
    for kind, layers in model.milliseconds.items():
        seconds = np.array(chain(*(each / 1e3 for _, each in layers)))
        np.save(folder / f"{model.options.model}_{kind}_1.npy", seconds)
        np.save(folder / f"{model.options.model}_{kind}_2.npy", SHARE * seconds)
    return import_published("fasop", [folder], model.options).profile


def split_grid(profile: Profile) -> Plan:
    """A pipeline of two stages, each over both devices of a node, cut by FASOP's rule."""

    def seconds(s: int, lo: int, hi: int) -> float:
        measured = profile.measurement([*MEMORY][s], 2)
        return sum(measured.forward_seconds[0][lo:hi]) + sum(measured.backward_seconds[0][lo:hi])

    ends = greedy(seconds, len(profile.layers), 2)
    stages = tuple(StagePlan(layers=(lo, hi), devices=(f"n{s}/0", f"n{s}/1")) for s, (lo, hi) in enumerate(pairwise(ends)))
    return Plan(model=profile.model, global_batch=4, replicas=(ReplicaPlan(microbatch_sizes=(1,) * 4, stages=stages),))


def test_plans_with_split_stages_train_as_one_device(tmp_path: Path) -> None:
    """A grid by FASOP's rule, and hetpipe's own plan; Megatron-LM can be told the grid."""
    cluster, cases = two_nodes(), dict[str, Any]()
    for name, (chain, _, _) in TOY.items():
        profile = toy_profile(name, tmp_path)
        own = Auto(time_limit_seconds=5.0)(Problem.create(cluster=cluster, profile=profile, global_batch=2)).plan
        cases |= {f"{name}, {by}": (name, chain, plan) for by, plan in (("grid", split_grid(profile)), ("auto", own))}
    degrees = {case: [len(s.devices) for r in plan.replicas for s in r.stages] for case, (_, _, plan) in cases.items()}
    found = run_ranks(compared, cluster, cases)
    for case, each in degrees.items():
        told = [rank[case] for rank in found if case in rank]
        assert len(told) == sum(each)
        assert max(max(apart, abs(off)) for apart, off, _ in told) < 1e-10
        assert sum(shards > 0 for _, _, shards in told) == sum(n for n in each if n > 1)
    assert degrees == {"gpt, grid": [2, 2], "gpt, auto": [2], "t5, grid": [2, 2], "t5, auto": [2]}
    script = export(cases["gpt, grid"][2], "megatron", cluster=cluster, blocks=(1, 9))
    assert [lost.partition(":")[0] for lost in script.lost] == ["unequal devices"]
    assert "--tensor-model-parallel-size 2\n  --pipeline-model-parallel-size 2\n" in script.text
