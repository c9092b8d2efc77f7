"""bench/scale: its tables come out, and what they say of growth is right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.scale import run
from bench.scale.run import bench, phases
from bench.scale.starting import PHASES
from bench.scale.texts import exponent, fitted


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"DEVICES": (4,), "KINDS": ((2, 4),), "RANKS": (2,), "LAYERS": (2,), "MICROBATCHES": (1, 2)}
    for name, sizes in tiny.items():
        monkeypatch.setattr(run, name, sizes)


def measured(parts: str, tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    bench(parts, repeats=1, largest=4, output=tmp_path / "all.json")
    found: dict[str, list[dict[str, Any]]] = json.loads((tmp_path / "all.json").read_text())
    return found


@pytest.mark.thorough
@pytest.mark.slow
def test_tables_of_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured("planning,ranks,steps", tmp_path)
    (planned,), (alone,), steps = (found[name] for name in ("planning", "ranks", "steps"))
    assert (planned["devices"], planned["types"], planned["layers"]) == (4, 2, 4)
    assert planned["seconds"] > 0 < planned["peak_bytes"]
    assert all(seconds >= 0 for seconds in alone.values())
    assert [(row["layers"], row["microbatches"]) for row in steps] == [(2, 1), (2, 2)]
    text = capsys.readouterr().out
    for line in ("| 4 | 2 | 4 |", "| bind nodes of 1 |", "| 2 | 2 |", "Engine less loop, fit", "| micro-batches | layers: 2 |"):
        assert line in text, line


@pytest.mark.thorough
@pytest.mark.slow
def test_a_start_has_all_its_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = measured("starting", tmp_path)["starting"]
    assert row["ranks"] == 2
    assert all(row[phase] >= 0 for phase in PHASES)
    assert row["in all"] == pytest.approx(sum(row[phase] for phase in PHASES))
    assert "| **until the first step is done** |" in capsys.readouterr().out


def test_a_phase_ends_with_the_last_process() -> None:
    moments = {phase: 10.0 + number for number, phase in enumerate(PHASES)}
    late = {**moments, "first step": moments["first step"] + 0.5}
    found = phases(8.0, [moments, late])
    assert (found["commands"], found["loop"], found["first step"], found["in all"]) == (2.0, 1.0, 1.5, len(PHASES) + 1.5)


def test_exponents_and_the_fit_find_what_was_put_in() -> None:
    assert exponent([(n, 1.0) for n in (1, 2)] + [(n, 3e-6 * n**1.5) for n in (4, 16, 64)]) == pytest.approx(1.5)
    assert math.isnan(exponent([(4, 1.0)]))
    rows = [
        {"layers": L, "microbatches": m, "engine": 1e-3 * L * m, "extra": 1e-6 * (50 + 7 * L + 20 * 2 * m + 0.5 * L * 2 * m)}
        for L in (4, 16, 64)
        for m in (1, 4, 16)
    ]
    assert fitted(rows) == pytest.approx([50, 7, 20, 0.5])
