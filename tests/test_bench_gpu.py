"""bench/gpu: a dry run on the CPU makes a page with all sections, and what fails is told and leaves the rest alone."""

from __future__ import annotations

import ctypes
import gc
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from bench.gpu import half as bench_half
from bench.gpu import run as command
from bench.gpu.engines import largest_difference, relative_difference
from bench.gpu.environment import environment
from bench.gpu.half import half
from bench.gpu.layer_bytes import allocated_bytes
from bench.gpu.page import Section, as_json, markdown
from bench.gpu.parts import PARTS, Part
from bench.gpu.run import bench, run_parts
from bench.gpu.subject import Subject
from bench.gpu.suite import rows_of
from bench.gpu.worker import Worker
from hetpipe.files.messages import InputError
from hetpipe.layers.device import one_thread
from hetpipe.measuring.precision.layer_bytes import saved_bytes
from tests.support import broken_parts

FAILING = Part("8", "What fails", "It is meant to.", broken_parts.raises)


def subject(folder: Path, **more: Any) -> Subject:
    arguments = {"layers": 1, "width": 16, "heads": 2, "context": 8, "vocabulary": 16}
    given = {"device_type": "cpu", "microbatch": 2, "microbatches": 2, "steps": 1, "repeats": 1, "arguments": arguments}
    return Subject(folder=str(folder), **{**given, **more})


def quiet(_text: str) -> None:
    """Nothing is said."""


# ---- the page ----


@pytest.mark.thorough
def test_a_dry_run_makes_a_page_with_all_sections_and_reports_what_fails(tmp_path: Path) -> None:
    parts, pages = [*PARTS, FAILING], list[str]()
    title = command.title_of(subject(tmp_path))
    sections = run_parts(parts, subject(tmp_path), 120, lambda so_far: pages.append(markdown(title, so_far, len(parts))))
    page, rows = pages[-1], {section.number: section.rows for section in sections}
    assert [section.number for section in sections if section.failed] == ["8"], page
    assert page.startswith("# Dry run on the CPU: no card was used\n\n**Not as it must be:** 8. What fails.\n")
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## {p.number}. {p.title}" for p in parts]
    assert "**This part failed** after" in page
    assert "RuntimeError: CUDA error: an illegal memory access was \\| encountered" in page
    assert "broken_parts.py" in page
    assert "**Not complete:** 1 of 12 parts have ended." in pages[0]
    assert [row["layer"] for row in rows["2"]] == ["embed", "block0_attention", "block0_mlp", "head", "all"]
    for number, library in (("3a", "fairscale"), ("3b", "torchgpipe"), ("4a", "torch")):
        if find_spec(library) is None:
            assert rows[number][0]["what"] == "skipped"
        else:
            (compared,) = (row for row in rows[number] if row["what"] == "gradients in float64")
            assert compared["largest_difference"] <= 1e-10 < compared["largest_gradient"]
    assert {row["ok"] for row in rows["4b"] if "ok" in row} == {True}
    assert "NCCL refuses two ranks on one device" in page
    assert rows["6"][0]["predicted_seconds"] > 0 < rows["6"][0]["measured_seconds"]
    for number in ("6b", "6c"):  # by hand in torch's autocast, in fp16 with a GradScaler
        loss, found_gradients, steps, predicted, peak = rows[number]
        assert (loss["ok"], found_gradients["ok"], found_gradients["relative_difference"]) == (True, True, 0)
        assert steps["ratio"] > 0 < predicted["predicted_seconds"]
        assert "ok" not in predicted | peak, "no card's"
    assert rows["7"][0]["what"] == "not run"


@pytest.mark.thorough
def test_the_command_prints_json_writes_the_page_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    off = Part("9", "What is off", "It is meant to be.", broken_parts.is_off)
    monkeypatch.setattr(command, "PARTS", (off, FAILING))
    with pytest.raises(typer.Exit) as ended:
        bench(output=tmp_path / "page.md", device="cpu", as_json_too=True)
    assert ended.value.exit_code == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["failed"], [section["failed"] for section in found["sections"]]) == (True, [True, True])
    assert found["sections"][0]["rows"] == [{"what": "gradients", "largest_difference": "inf", "ok": False}]
    assert "not as it must be: 9 (What is off), 8 (What fails)" in said.err
    assert "| gradients | inf | **NO** |" in (tmp_path / "page.md").read_text()


def test_without_a_card_there_is_only_the_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no CUDA card is found; --device cpu makes a dry run") as told:
        bench(output=tmp_path / "page.md")
    assert told.value.exit_code == 2
    assert not (tmp_path / "page.md").exists()
    with pytest.raises(InputError, match="--only: unknown value '3'; did you mean"):
        bench(output=tmp_path / "page.md", device="cpu", only="1,3")
    with pytest.raises(InputError, match="--device: unknown value 'gpu'"):
        bench(output=tmp_path / "page.md", device="gpu")


def test_rows_with_the_same_keys_are_one_table() -> None:
    rows: list[dict[str, Any]] = [{"a_seconds": 0.5}, {"a_seconds": 0.25, "ok": True}, {"b_bytes": 1024}]
    section = Section(number="1", title="T", about="A.", rows=rows, seconds=1.0)
    assert "| a | ok |\n| --: | :-- |\n| 500 ms |  |\n| 250 ms | yes |\n\n| b |\n| --: |\n| 1.00 KiB |\n" in markdown(
        "X", [section], 1
    )
    assert as_json("X", [section])["sections"][0]["rows"] == rows


# ---- the process that runs the parts ----


def test_a_process_that_dies_or_never_ends_is_told_and_replaced() -> None:
    said = list[str]()
    with Worker() as worker:
        died = worker.run(broken_parts.dies, None, limit_seconds=60, say=said.append)
        first = worker.run(broken_parts.process, None, limit_seconds=60, say=said.append)
        second = worker.run(broken_parts.process, None, limit_seconds=60, say=said.append)
        late = worker.run(broken_parts.never_ends, None, limit_seconds=1, say=said.append)
    assert died.error == "the process that ran it ended with exit code 7, the last that it said was: the last words"
    assert first.rows == second.rows != []
    assert late.error is not None
    assert late.error.startswith("it had not ended after 1 s")
    assert said[0] == "the last words"


# ---- parts that a dry run does not show ----


def test_gradients_that_are_off_missing_or_no_numbers() -> None:
    truth = {"a": torch.ones(2), "b": torch.zeros(1)}
    assert largest_difference(truth, truth) == relative_difference(truth, truth) == 0
    assert largest_difference({**truth, "b": torch.tensor([0.5])}, truth) == 0.5
    assert relative_difference({**truth, "a": torch.tensor([1.0, 2.0])}, truth) == pytest.approx(0.5**0.5)
    for wrong in ({"a": torch.ones(2)}, {**truth, "a": torch.tensor([1.0, float("nan")])}):
        assert largest_difference(wrong, truth) == float("inf")
    assert not relative_difference({**truth, "a": torch.full((2,), float("nan"))}, truth) <= 1


class _Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


class Heap:
    """The allocator of this process, which on a CPU is torch's, too."""

    def __init__(self) -> None:
        self._ask = ctypes.CDLL(None).mallinfo2
        self._ask.restype = _Info

    def collect(self) -> None:
        gc.collect()

    def used(self) -> int:
        info = self._ask()
        return int(info.uordblks + info.hblkhd)

    def begin(self) -> None: ...

    def peak(self) -> int:
        return self.used()


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no glibc with mallinfo2")
def test_what_a_graph_keeps_is_what_the_profiler_counts(tmp_path: Path) -> None:
    given = subject(tmp_path, arguments={"layers": 1, "width": 64, "heads": 2, "context": 64}, microbatch=8)
    with one_thread(torch.device("cpu")):
        saved = saved_bytes(given.model(), given.device).per_sample
        found = allocated_bytes(given, Heap())
    assert len(found) == len(saved) == 4
    for row, predicted in list(zip(found, saved, strict=True))[1:]:  # an embedding keeps next to nothing
        assert row["kept_bytes"] == pytest.approx(8 * predicted, rel=0.05)
        assert row["forward_peak_bytes"] > 0.95 * row["kept_bytes"]


def test_what_the_card_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        name, major, minor, total_memory = "Some Card", 9, 0, 8 * 2**30

    for name, value in (
        ("get_device_properties", Card()),
        ("mem_get_info", (2**30, 8 * 2**30)),
        ("device_count", 1),
        ("get_device_name", "Some Card"),
        ("get_device_capability", (9, 0)),
        ("get_arch_list", ["sm_75"]),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = {row["what"]: row for row in environment(subject(tmp_path, device_type="cuda"), quiet)}
    assert rows["driver"]["found"] == "unknown (FileNotFoundError of nvidia-smi)"
    assert rows["memory"]["found"] == "8.00 GiB, of which 1.00 GiB are free"
    assert rows["kernels for the card"]["ok"] is False
    assert "has compute capability 9.0" in rows["kernels for the card"]["found"]


def test_on_a_card_a_step_in_half_precision_must_be_near_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = [{"what": "a step", "error": -0.07}, {"what": "peak bytes", "error": 0.06}]
    monkeypatch.setattr(bench_half, "beside", lambda *_: off)
    measured = SimpleNamespace(measurement=None, state_bytes_per_parameter_byte=2)
    monkeypatch.setattr(bench_half, "measure_device", lambda *_, **__: measured)
    monkeypatch.setattr(bench_half, "assemble", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Card")
    assert [row["ok"] for row in bench_half._predicted("bf16", subject(tmp_path, device_type="cuda"), quiet)] == [True, False]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    (row,) = half("bf16", subject(tmp_path, device_type="cuda"), quiet)
    assert row["note"] == "a Some Card of compute capability 7.0 cannot compute in bf16: it has fp32, fp16"


def test_what_pytest_said() -> None:
    said = "..F\n=== short test summary info ===\nFAILED tests/a.py::test_x - assert 1\n1 failed, 2 passed in 3.10s\n"
    assert rows_of(said, 1, 60) == [
        {"what": "pytest", "found": "1 failed, 2 passed in 3.10s", "ok": False},
        {"what": "failed", "found": "tests/a.py::test_x - assert 1"},
    ]
    assert rows_of("==== 3 passed in 1.00s ====\n", 0, 60) == [{"what": "pytest", "found": "3 passed in 1.00s", "ok": True}]
    assert rows_of("", 4, 60) == [{"what": "pytest", "found": "it said nothing", "ok": False}]


@pytest.mark.parametrize("side_by_side", [False, True])
def test_what_pytest_said_before_it_was_ended(side_by_side: bool) -> None:
    lines = [("PASSED", "tests/a.py::test_x"), ("FAILED", "tests/a.py::test_y[a b]"), ("PASSED", "tests/b.py::test_z")]
    said = [f"[gw0] [ 33%] {how} {test} " if side_by_side else f"{test} {how}  [ 33%]" for how, test in lines]
    assert rows_of("\n".join([*said, "tests/b.py::test_w "]), None, 60) == [
        {"what": "pytest", "found": "not over after 60 s; so far: 2 passed, 1 failed", "ok": False},
        {"what": "failed", "found": "tests/a.py::test_y[a b]"},
    ]
