"""bench/prediction: rows as plans; and, where the measured runs are, that predictions do not get worse."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest

from bench.prediction.gpt_neo import GPT_NEO_RUNS
from bench.prediction.predicted import System, in_training, mean_error
from bench.prediction.run import parts_of, run
from bench.prediction.runs import read_runs
from hetpipe.documents.cluster import RuntimeOverhead
from hetpipe.documents.profile import LayerProfile, OptimizerProfile, Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.messages import InputError
from tests.support.external import NEEDS_SAILOR

HEADER = "file,cluster,model,nodes,gbs,mbs,pp,dp,tp,layers,stage_gpus,real_iter_s,red_grads_s,max_mem_bytes,flag"

PROFILE = Profile(
    format="hetpipe.profile/1",
    model="m",
    layers=(LayerProfile(name="l", parameter_bytes=1000, output_bytes_per_sample=1, saved_bytes_per_sample=1),),
    measurements=(
        Measurement(
            device_type="a",
            microbatch_sizes=(1,),
            forward_seconds=((2.0,),),
            backward_seconds=((4.0,),),
            optimizer_seconds=(0.0,),
        ),
        Measurement(
            device_type="a",
            tensor_parallel=2,
            microbatch_sizes=(1,),
            forward_seconds=((1.0,),),
            backward_seconds=((2.0,),),
            optimizer_seconds=(0.0,),
            parameter_bytes=(300,),
            saved_bytes_per_sample=(1,),
        ),
    ),
    optimizer=OptimizerProfile(state_bytes_per_parameter_byte=2.0),
)


def test_a_row_as_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\nf,c,OPT-350,4,16,2,2,2,4,12-14,GH-96,1.5,0.1,1000,\n")
    (run,) = read_runs(path)
    plan = run.plan()
    assert (plan.global_batch, plan.layer_count, run.seconds, run.peak_bytes) == (16, 26, 1.5, 1000)
    assert [replica.microbatch_sizes for replica in plan.replicas] == [(2, 2, 2, 2)] * 2
    nodes = [[(stage.layers, stage.devices[0], len(stage.devices)) for stage in r.stages] for r in plan.replicas]
    assert nodes == [[((0, 12), "n0/0", 4), ((12, 26), "n2/0", 4)], [((0, 12), "n1/0", 4), ((12, 26), "n3/0", 4)]]


def test_files_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the measured runs"):
        read_runs(tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("nodes\n4\n")
    with pytest.raises(InputError, match="cannot read the measured runs"):
        read_runs(tmp_path / "bad.csv")


def test_gradients_are_added_up_and_backwards_slow_down() -> None:
    found = in_training(PROFILE, 1.5, memory_rate=3000.0)  # adds 3 · 1000 / 3000 seconds on one device, 0.3 on each of two
    one, two = found.measurement("a", 1), found.measurement("a", 2)
    assert (one.forward_seconds, one.backward_seconds) == (((3.0,),), ((1.5 * (4.0 + 1.0),),))
    (backward,) = two.backward_seconds
    assert backward == pytest.approx((1.5 * (2.0 + 0.3),))
    assert in_training(PROFILE, 1.0, memory_rate=inf) == PROFILE


def test_no_run_is_both_predicted_and_measured_on() -> None:
    assert {other.model for other in GPT_NEO_RUNS} == {"GPT-Neo-2.7"}
    for other in GPT_NEO_RUNS:
        assert (other.plan().layer_count, other.nodes) == (34, other.stages * other.replicas)


def test_a_system_without_each_of_its_parts() -> None:
    less = parts_of(System(RuntimeOverhead(device_bytes=7, parameter_copies=1.0), 1.1, 1.2, 1e12))
    assert set(less) == {
        "nothing but profile and plan",
        "without slowdown",
        "without sums_slowdown",
        "without memory_rate",
        "without device_bytes",
        "without parameter_copies",
    }
    assert less["without slowdown"] == System(RuntimeOverhead(device_bytes=7, parameter_copies=1.0), 1.0, 1.2, 1e12)
    assert less["without device_bytes"] == System(RuntimeOverhead(parameter_copies=1.0), 1.1, 1.2, 1e12)


@NEEDS_SAILOR
def test_the_measured_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["overhead"]["device_bytes"] == pytest.approx(4573 * 2**20, rel=1e-3)
    assert (found["slowdown"], found["sums_slowdown"]) == (pytest.approx(1.046, abs=1e-3), pytest.approx(1.66, abs=1e-2))
    assert [len(found[key]) for key in ("rows", "earlier_rows", "gpt_neo_rows")] == [15, 14, 11]
    assert mean_error(found["rows"], "time_error") < 0.07
    assert mean_error(found["rows"], "memory_error") < 0.03
    assert mean_error(found["earlier_rows"], "time_error") < 0.03
    assert mean_error(found["earlier_rows"], "memory_error") < 0.02
