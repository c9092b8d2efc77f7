"""bench/half: what it trains can be read, and what it says of losses and steps is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.half import curves, steps
from bench.throughput.run import Ran
from hetpipe.building.build import build_layers
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.job import Job

WAY = "bf16 → fp16, beside fp32"


@pytest.mark.parametrize("model", curves.MODELS)
def test_the_plan_is_one_of_the_model_in_each_way(model: str, tmp_path: Path) -> None:
    cluster = curves.cluster_of_three()
    cluster.save(tmp_path / "cluster.json")
    job = curves.job_of(model, 1, 200, str(tmp_path / "cluster.json"))
    job.check_files()
    for way in curves.WAYS:
        plan = curves.plan_of(model, way)
        plan.check(cluster=cluster, layers=len(build_layers(job)), global_batch=job.train.global_batch, source=way)
        assert [len(replica.stages) for replica in plan.replicas] == [2, 1]
        assert plan.replicas[0].samples > plan.replicas[1].samples
    assert curves.plan_of(model, WAY).precision == {"first": "bf16", "second": "fp16", "alone": "fp32"}


def test_final_losses_are_compared_seed_by_seed_and_in_the_mean() -> None:
    def rows(*ends: float) -> dict[str, list[float]]:
        return {str(seed): [9.0] * 5 + [end] * curves.LAST for seed, end in enumerate(ends)}

    ways = {curves.FULL: rows(1.0, 1.4, 1.2), "near": rows(1.1, 1.3, 1.2), "one is far": rows(1.5, 1.1, 1.0), WAY: rows(2, 2, 2)}
    found = curves.summary(ways)
    assert found["near"].pop("finals") == pytest.approx({"0": 1.1, "1": 1.3, "2": 1.2})
    near = {"mean": 1.2, "spread": 0.2, "apart": 0.0, "furthest": 0.1, "within": True}
    assert found["near"] == pytest.approx(near)
    assert (found["one is far"]["apart"], found["one is far"]["furthest"]) == pytest.approx((0, 0.5))
    assert [row["within"] for row in found.values()] == [True, True, False, False]
    line = curves.table({"gpt": ways}).splitlines()[-1]
    assert line == f"| gpt | {WAY} | 2.0000 | 2.0000 | 2.0000 | 2.0000 | 0.0000 | +0.8000 | +1.0000 | **no** |"
    assert curves.smooth([3.0, 1.0]) == [3.0, 2.0]


def test_the_picture_is_drawn_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ways = {way: {"0": [3.0, 2.0, 1.0 + number]} for number, way in enumerate(curves.WAYS)}
    for name in ("a", "b"):
        curves.draw({"gpt": ways}, tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


@pytest.mark.parametrize("mix", steps.MIXES, ids=lambda mix: mix.name)
def test_emulated_cards_are_as_fast_to_each_other_in_each_precision_as_measured(mix: steps.Mix) -> None:
    memory = steps.tight_memory(mix, 3_000_000) if mix.tight else None
    cluster = Cluster.parse(steps.cluster_document(mix, memory), mix.name)
    found = {k: t.emulate for k, t in cluster.device_types.items() if t.emulate is not None}
    busy = 0.0
    for kind, emulate in found.items():
        full, low = (emulate.slowdown_at(precision, kind) for precision in ("fp32", "bf16"))
        assert full / low == pytest.approx(steps.CARDS[kind][1], rel=1e-2)
        busy += mix.cards.count(kind) / low
        for other in found:
            ratio = steps.CARDS[kind][0] / steps.CARDS[other][0]
            assert full / found[other].slowdown_at("fp32", other) == pytest.approx(ratio, rel=1e-2)
    assert busy == pytest.approx(steps.PROCESSORS, rel=1e-2)
    assert not mix.tight or min(t.memory for t in cluster.device_types.values()) == 2_000_000


@pytest.mark.parametrize("model", steps.MODELS)
def test_jobs_of_steps_can_be_read(model: str, tmp_path: Path) -> None:
    job = steps.job_of(model, steps.MIXES[0], tmp_path)
    assert isinstance(job, Job)
    assert job.train.precision == "auto"


def test_what_is_said_of_predictions() -> None:
    plan = curves.plan_of("gpt", WAY)
    runs = [Ran([2.0, 4.0], 2.5, {"n0/0": (100, 90)}, 0.01), Ran([3.0], 2.5, {"n0/0": (100, 110), "n0/1": (0, 5)}, 0.02)]
    found = steps.row_of(plan, runs)
    assert (found["step_seconds"], found["quartiles"], found["overrun_fraction"]) == (3.0, [2.5, 3.5], 0.02)
    assert found["layers"] == "n0/0: 6 → n0/1: 4, n0/2: 10"
    fast: dict[str, Any] = {**found, "step_seconds": 1.5, "predicted_seconds": 1.5}
    row = {"model": "gpt", "cluster": "c", "gains": {"v100": 4.0}, "plans": {"fp32": found, "auto": fast}}
    said = steps.texts([row])
    assert "| 2.500 | 3.000 (2.500 to 3.500) | -16.7% | 100 B | +10.0% to +10.0% | 2.0% | 1.00 |" in said
    assert "| 1.500 | 1.500 (2.500 to 3.500) | +0.0% | 100 B | +10.0% to +10.0% | 2.0% | 2.00 |" in said
    assert said.endswith("- gpt on c: v100 4.00")
    assert steps.accuracy([row])["seconds_worst_error"] == pytest.approx(1 / 6)
