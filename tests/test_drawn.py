"""bench/partitioners' clusters of measured devices, and bench/precision's policies, where the data is present."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from bench.partitioners.clusters import cluster
from bench.partitioners.drawn import drawn, fields
from bench.partitioners.profiles import profile
from bench.precision.run import CAPABILITY, CASES, POLICIES, precision_of, profile_of
from bench.precision.run import run_case as plan_precisions
from bench.prediction.vtrain import predict_from_zorse, predict_pipelines, vtrain_runs
from tests.test_zorse import NEEDS_ZORSE, ZORSE


@NEEDS_ZORSE
def test_clusters_are_drawn_by_the_seed_from_all_labels() -> None:
    cases = list(islice(drawn(1, ZORSE), 40))
    assert cases == list(islice(drawn(1, ZORSE), 40))
    assert cases != list(islice(drawn(2, ZORSE), 40))
    labels = {gpu for gpus in json.loads((ZORSE / "model_latencies.json").read_text()).values() for gpu in gpus}
    beside_others = {gpu for gpus in fields(ZORSE).values() for gpu in gpus}
    assert labels - beside_others == {"rtx_3090"}  # its model was measured on nothing else
    assert {kind for case in cases for kind in case.types} == beside_others
    for case in cases:
        assert 2 <= case.devices <= 8
        found = profile(case.model, case.types)
        assert found is not None
        found.check(cluster(case))


@NEEDS_ZORSE
def test_policies_of_precision() -> None:
    assert [precision_of("one for each", kind) for kind in ("p40", "v100x16", "t4", "a6000")] == ["fp32", "fp16", "fp16", "bf16"]
    assert [precision_of("bf16, else fp32", kind) for kind in ("t4", "l4")] == ["fp32", "bf16"]
    for case in CASES:
        measured = profile_of(case, ZORSE)
        for policy in POLICIES:
            for kind in case.types:
                precision = precision_of(policy, kind)
                assert precision is None or precision in measured.precisions(kind), (case.name, kind, policy)
        assert set(case.types) <= set(CAPABILITY)
    row = plan_precisions(CASES[0]._replace(batch=8), ZORSE)
    gain = row.gain("fp32 for all")
    assert gain is not None
    assert gain > 1


@NEEDS_ZORSE
def test_a_second_source_of_measured_runs() -> None:
    runs = vtrain_runs()
    assert len(runs) == len(predict_from_zorse(ZORSE)) == 87
    assert all(run.stages * run.replicas == run.devices for run in runs)
    assert all(row["predicted_seconds"] == pytest.approx(row["measured_seconds"], rel=0.5) for row in predict_pipelines(ZORSE))
