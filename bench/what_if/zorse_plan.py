"""The plan that Zorse published for its example cluster, priced by hetpipe, beside hetpipe's own.

    python -m bench.what_if.zorse_plan

The plan is of llama-tiny (1.3 billion parameters): one stage whose layers all four cards hold, each with its own number of
micro-batches of 2 samples. In hetpipe that is four replicas of one stage. What hetpipe has no word for: Zorse shards
parameters, gradients and optimizer state over the four cards (ZeRO), and gathers them when they are needed. So the row prices the
same work on the same cards, with sums of gradients in place of gathering and scattering, and more memory than Zorse needs.

It needs `zorse` in the folder that the environment variable HETPIPE_DATA names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import typer

from bench.tables import markdown
from hetpipe.building.datasets import data_folder
from hetpipe.cli.commands import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.assumed import with_assumed
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.exchange.importers import ImportOptions
from hetpipe.exchange.importers.zorse_cluster import zorse_cluster
from hetpipe.files.formats import read_mapping
from hetpipe.planning.planner import make_plan
from hetpipe.predict.simulator import simulate
from hetpipe.whatif.answer import Question, profile_of
from hetpipe.whatif.cards import known_cards
from hetpipe.whatif.models import measured_model

MODEL = "llama-tiny"
CARDS = ("a6000", "p40", "l4")


class Priced(NamedTuple):
    """A plan, seconds of a step as simulated, and the peak bytes of each card."""

    name: str
    plan: Plan
    step_seconds: float
    peak_bytes: dict[str, int]


def published_plan(config: dict[str, Any], cluster: Cluster, layers: int) -> Plan:
    """Zorse's training_config.json of one stage as replicas of one stage, a card each."""
    (stage,), size = config["pipeline_config"], config["microbatch_size"]
    ids = [device.id for device in cluster.devices]
    order = _ranks(cluster)
    replicas = [
        ReplicaPlan(microbatch_sizes=(size,) * count, stages=(StagePlan(layers=(0, layers), devices=(ids[order[rank]],)),))
        for rank, count in zip(stage["gpu_ranks"], stage["num_microbatches_per_rank"], strict=True)
    ]
    return Plan(model=MODEL, global_batch=sum(r.samples for r in replicas), partitioner="Zorse", replicas=tuple(replicas))


def _ranks(cluster: Cluster) -> list[int]:
    """Zorse's rank → place among the cluster's devices, of a machine whose equal cards stand side by side."""
    (node,) = cluster.nodes
    assert [kind for kind, count in node.devices.items() for _ in range(count)] == ["l4", "l4", "a6000", "p40"]
    return [0, 1, 2, 3]


def priced(folder: Path) -> tuple[Profile, Cluster, float, list[Priced]]:
    """Profile, cluster, the seconds that Zorse says, and the plans: Zorse's, and ours of the same batch."""
    config = read_mapping(folder / "training_config.json")
    cluster = zorse_cluster(folder / "cluster_info.json", ImportOptions(model=MODEL))
    question = Question(
        model=measured_model(MODEL),
        machines=(CARDS,),
        cards=known_cards().cards,
        link=next(iter(cluster.nodes)).link,  # type: ignore[arg-type]
        tokens=config["sequence_length"],
    )
    profile = profile_of(question)[0].at(dict.fromkeys(CARDS, "fp16"))
    whole = with_assumed(cluster, profile)
    theirs = published_plan(config, cluster, len(profile.layers))
    timeline = simulate(theirs, profile, whole)
    ours = make_plan(profile, cluster, theirs.global_batch)
    assert ours.predicted is not None
    rows = [
        Priced("Zorse's plan", theirs, timeline.step_seconds, dict(timeline.peak_bytes)),
        Priced("hetpipe's plan", ours, ours.predicted.step_seconds, dict(ours.predicted.peak_bytes)),
    ]
    return profile, cluster, config["latency"] / 1e3, rows


def shares(row: Priced, cluster: Cluster) -> str:
    """What each card does."""
    return "; ".join(
        f"{cluster.device(stage.device).type}: layers {stage.layers[0]}-{stage.layers[1] - 1}, {replica.samples} samples"
        for replica in row.plan.replicas
        for stage in replica.stages
    )


def memory(row: Priced, cluster: Cluster) -> str:
    """Peak over what there is, in GiB."""
    return "; ".join(
        f"{cluster.device(device).type} {peak / 2**30:.1f} of {cluster.type_of(device).memory / 2**30:.1f}"
        for device, peak in row.peak_bytes.items()
    )


def run() -> None:
    """Print both."""
    _, cluster, said, rows = priced(data_folder("zorse", "download its planner's measurements"))
    lines = []
    for row in rows:
        rate = row.plan.global_batch * 512 / row.step_seconds
        lines.append([row.name, f"{row.step_seconds:.2f}", f"{rate:.0f}", shares(row, cluster), memory(row, cluster)])
    print(f"Zorse says {said:.2f} s for its own\n\n{markdown(['', 'step, s', 'tokens/s', 'who does what', 'peak GiB'], lines)}")


if __name__ == "__main__":
    main(lambda: typer.run(run))
