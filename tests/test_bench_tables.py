"""Tables of benches, and the check of their ratios."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer

from bench import check
from bench.tables import geometric_mean, markdown, replace_table
from bench.throughput.clusters import CARDS, MIXES, MODELS, PROCESSORS, cluster_document, tight_memory
from bench.throughput.run import EQUAL, OURS, accuracy, ratios, summary, table
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError


def test_a_table_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("Before.\n<!-- table -->\nold\n<!-- end of table -->\nAfter.\n")
    replace_table(readme, "table", markdown(["what | how", "x"], [["a", "1"]]))
    assert readme.read_text() == (
        "Before.\n<!-- table -->\n\n| what \\| how | x |\n| :-- | --: |\n| a | 1 |\n\n<!-- end of table -->\nAfter.\n"
    )
    with pytest.raises(ValueError, match="has no <!-- other -->"):
        replace_table(readme, "other", "")


def test_geometric_mean() -> None:
    assert geometric_mean([2, 8]) == pytest.approx(4)
    assert math.isnan(geometric_mean([]))


def write(path: Path, **found: float) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"environment": "here", "ratios": found}))
    return path


def test_ratios_that_are_off_and_files_that_hold_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "HERE", tmp_path)
    rows = {"a: v": 1.0, "b: v": 4.0}
    kept = write(tmp_path / "a" / "kept.json", x=1.0, y=2.0, z=1.0, **rows)
    cases = [({"x": 1.1, "y": 1.8}, 0), ({"x": 1.2, "y": 2.0}, 1), ({"x": math.nan}, 1), ({"x": 0.0}, 1), ({"new": 1.0}, 1)]
    cases += [({"a: v": 1.5, "b: v": 2.7}, 0), ({"a: v": 1.0, "b: v": 6.0}, 1), ({"b: v": 4.1}, 0)]  # the mean is kept, or not
    for values, code in cases:
        file = write(tmp_path / "a.json", **values)
        with pytest.raises(typer.Exit) as ended:
            check.check([file], tolerance=0.15)
        assert ended.value.exit_code == code, values
    assert "x: 1.200, kept 1.000" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        check.check([file], keep=True)
    assert json.loads(kept.read_text())["ratios"] == {"b: v": 4.1}
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(InputError, match=r"a\.json does not hold a bench's ratios \(KeyError: 'ratios'\)"):
        check.check([tmp_path / "a.json"])


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_emulated_cards_are_as_fast_to_each_other_as_measured_and_leave_room_for_their_ranks(mix: Any, tmp_path: Path) -> None:
    memory = tight_memory(mix, 3_000_000) if mix.tight else None
    cluster = Cluster.parse(cluster_document(mix, memory), mix.name)
    slowdown = {k: t.emulate.slowdown_at(None, k) for k, t in cluster.device_types.items() if t.emulate is not None}
    assert len(cluster.devices) == len(mix.cards)
    assert sum(1 / slowdown[d.type] for d in cluster.devices) == pytest.approx(PROCESSORS, rel=1e-2)
    for a in slowdown:
        for b in slowdown:
            assert slowdown[a] / slowdown[b] == pytest.approx(CARDS[a][0] / CARDS[b][0], rel=1e-2)
    assert not mix.tight or min(t.memory for t in cluster.device_types.values()) == 2_000_000


@pytest.mark.parametrize("name", MODELS)
def test_jobs_of_the_bench_can_be_read(name: str) -> None:
    Job.parse({"format": "hetpipe.job/1", **MODELS[name], "train": {"global_batch": 4, "steps": 1}}, name)


def way(seconds: float, predicted: float, peaks: dict[str, tuple[int, int]]) -> dict[str, Any]:
    return {"samples_per_second": 24 / seconds, "step_seconds": seconds, "predicted_seconds": predicted, "peaks": peaks}


def test_what_is_said_of_all_rows() -> None:
    fits = {
        "model": "m",
        "cluster": "c",
        "tight": False,
        "fluid_seconds": 0.8,
        "bound_seconds": 1.0,
        "ways": {EQUAL: way(4.0, 4.4, {"n0/0": (100, 90)}), "Zorse": way(2.0, 2.0, {}), OURS: way(1.0, 1.0, {})},
    }
    tight = {**fits, "tight": True, "bound_seconds": None, "ways": {"Zorse": way(1.0, 1.0, {}), OURS: way(2.0, 2.0, {})}}
    found = summary([fits, tight])
    assert [found["over_equal_ddp"], found["over_best_other"], found["rows"]] == pytest.approx([4, 2, 2])
    assert (found["rows_where_another_is_faster"], found["step_over_bound_worst"]) == (0, 1)
    assert ratios([tight]) == {"m on c: hetpipe over Zorse": 0.5}
    assert accuracy([fits]) == pytest.approx(
        {
            "seconds_mean_error": 0.1 / 3,
            "seconds_worst_error": 0.1,
            "bytes_mean_error": 0.1,
            "bytes_worst_error": 0.1,
            "rank_correlation": 1.0,
        }
    )
    lines = table([fits, tight]).splitlines()
    assert "| c | m | 24.0 | 4.00 |" in lines[2]
    assert "| 80% | 1.000 |" in lines[2]
    assert lines[3].startswith("| c | m | 12.0 | – |")
    assert "**geometric mean** |  |  | 4.00 |" in lines[4]
