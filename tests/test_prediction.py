"""bench/prediction: rows as plans; and, where the measured runs are, that predictions do not get worse."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.prediction.deepspeed import deepspeed_on_gh200
from bench.prediction.run import mean_error, predict_all
from bench.prediction.runs import FOLDER, read_runs
from hetpipe.formats import InputError

HEADER = (
    "file,cluster,model,nodes,gbs,mbs,pp,dp,tp,layers,stage_gpus,real_iter_s,red_grads_s,max_mem_bytes,flag"
)


def test_a_row_as_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\nf,c,OPT-350,4,16,2,2,2,4,12-14,GH-96,1.5,0.1,1000,\n")
    (run,) = read_runs(path)
    plan = run.plan()
    assert (plan.global_batch, plan.layer_count, run.seconds, run.peak_bytes) == (16, 26, 1.5, 1000)
    assert [replica.microbatch_sizes for replica in plan.replicas] == [(2, 2, 2, 2)] * 2
    nodes = [
        [(stage.layers, stage.devices[0], len(stage.devices)) for stage in r.stages] for r in plan.replicas
    ]
    assert nodes == [
        [((0, 12), "n0/0", 4), ((12, 26), "n2/0", 4)],
        [((0, 12), "n1/0", 4), ((12, 26), "n3/0", 4)],
    ]


def test_files_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the measured runs"):
        read_runs(tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("nodes\n4\n")
    with pytest.raises(InputError, match="cannot read the measured runs"):
        read_runs(tmp_path / "bad.csv")


def test_the_section_is_what_was_measured_elsewhere() -> None:
    overhead = deepspeed_on_gh200()
    assert overhead.device_bytes == pytest.approx(3149 * 2**20, rel=1e-3)  # the mean of 15 other runs
    assert overhead.allocator_factor == pytest.approx(1.044, abs=1e-3)


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the measured runs are not in {FOLDER}")
def test_the_measured_runs() -> None:
    rows = predict_all(FOLDER, deepspeed_on_gh200())
    assert len(rows) == 15
    assert mean_error(rows, "time_error") < 0.08
    assert mean_error(rows, "memory_error") < 0.067
