"""bench/finetune: its cards are those of cards.yaml, its ways do what their names say, and its figures are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.finetune.cards import CLUSTERS, LARGE, SMALL, memory, times
from bench.finetune.figures import draw, means, ratios, tables
from bench.finetune.run import job_of
from bench.finetune.ways import ALIKE, DEVICE_MAP, ONE, ORDER, OURS, PARALLEL, PIPELINE, in_order, plans_of
from bench.throughput.clusters import Mix, cluster_document
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.whatif.cards import known_cards
from tests.support.strategies import make_profile

MIB = 2**20
LAYER = {"parameter_bytes": 2 * MIB, "output_bytes_per_sample": MIB // 16, "saved_bytes_per_sample": MIB}
TWO, THREE, SERVER = CLUSTERS


def test_in_order() -> None:
    """As transformers 5.23 maps a Llama of 16 blocks, its embedding and its head with device_map="auto"."""
    assert in_order([0.5, *[3.1] * 16, 0.5], 2) == [9, 9]
    assert in_order([0.5, *[3.1] * 16, 0.5], 3) == [6, 6, 6]


def planned(mix: Mix, case: str) -> tuple[Cluster, dict[str, Plan]]:
    layers = [{"name": f"{i}", **LAYER} for i in range(18)]
    profile = make_profile({k: [0.01 * t] * 18 for k, t in times(mix).items()}, sizes=(1, 2, 4), layers=layers)
    link = {"link": {"bandwidth": "4 GB/s"}}
    ample = Cluster.parse(cluster_document(mix, times=times(mix)) | link, mix.name)
    cluster = Cluster.parse(cluster_document(mix, memory(mix, case, profile, ample, 8), times(mix)) | link, mix.name)
    return cluster, plans_of(profile, cluster, 8)


@pytest.mark.parametrize("mix", CLUSTERS, ids=lambda mix: mix.name)
def test_cards_are_to_each_other_as_they_are(mix: Mix) -> None:
    cluster, cards = planned(mix, SMALL)[0], known_cards().cards
    fast, slow = (cluster.device_types[name] for name in dict.fromkeys(mix.cards))
    real, other = (cards[name] for name in dict.fromkeys(mix.cards))
    assert slow.emulate is not None
    assert fast.emulate is not None
    rate = slow.emulate.slowdown_at(None, "slow") / fast.emulate.slowdown_at(None, "fast")
    assert (rate, slow.memory / fast.memory) == pytest.approx((real.fp16 / other.fp16, other.memory / real.memory), rel=1e-3)


def test_which_ways_have_room() -> None:
    assert list(planned(TWO, SMALL)[1]) == [DEVICE_MAP, PIPELINE, PARALLEL, ONE, OURS]
    assert list(planned(TWO, LARGE)[1]) == [DEVICE_MAP, OURS]  # of an equal pipeline half the model, of the 3060 less
    assert list(planned(THREE, SMALL)[1]) == list(ORDER)
    assert list(planned(THREE, LARGE)[1]) == [DEVICE_MAP, PIPELINE, ALIKE, OURS]
    assert list(planned(SERVER, LARGE)[1]) == [DEVICE_MAP, PIPELINE, OURS]


def test_one_card_at_a_time_and_fast_cards_alone() -> None:
    plans = planned(THREE, SMALL)[1]
    assert [stage.warmup for stage in plans[DEVICE_MAP].replicas[0].stages] == [1, 1, 1]
    assert plans[ONE].device_ids == ("n0/0",)
    assert sorted(plans[ALIKE].device_ids) == ["n0/0", "n0/1"]
    assert {replica.samples for replica in plans[PARALLEL].replicas} == {2, 3}
    assert [stage.layers for stage in plans[PIPELINE].replicas[0].stages] == [(0, 6), (6, 12), (12, 18)]


def ran(*speeds: float) -> dict[str, Any]:
    peaks = {"n0/0": 3 * MIB}
    same = {"tokens_per_second": speeds[1], "predicted_tokens_per_second": speeds[1], "overrun_fraction": 0.0}
    return {"rounds": list(speeds), "peak_bytes": peaks, **same}


def test_figures(tmp_path: Path) -> None:
    stages = [
        {"layers": [0, 13], "devices": ["n0/0"], "recompute": False},
        {"layers": [13, 18], "devices": ["n0/1"], "recompute": True},
    ]
    row = {
        "cluster": TWO.name,
        "case": SMALL,
        "cards": {"n0/0": ("3090", 8 * MIB), "n0/1": ("3060", 4 * MIB)},
        "fluid_tokens_per_second": 600.0,
        "losses_apart": 1e-7,
        "ways": {PIPELINE: ran(100, 200, 300), ONE: ran(200, 400, 600), OURS: ran(300, 500, 600)},
        "plan": [{"microbatch_sizes": [4, 4], "stages": stages}],
    }
    found = means([row])
    assert list(found.values()) == pytest.approx([1.25, 1.25, 2.5, 1.5])
    assert ratios([row])[f"{SMALL} on {TWO.name}: hetpipe over {PIPELINE}"] == 2.5
    text = tables([row])
    assert "| no room | 200 (150–250) | no room | 400 (300–500) | – | 500 (400–550) |" in text
    assert "| 13 on 3090 → 5 on 3060 recomputed: 8 | 1.25 (1.12–1.38) | 1.50 |" in text
    assert "3090 3 of 8, 3060 0 of 4" in text
    draw([row], tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")


def test_its_job_can_be_read(tmp_path: Path) -> None:
    for quick in (True, False):
        assert job_of(cluster_document(TWO, times=times(TWO)), tmp_path, quick).adapter is not None
