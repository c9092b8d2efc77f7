"""Training in the memory that was planned: peaks, recomputation, frozen layers, and what does not fit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.units import human_bytes
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.training.results.table import memory_table
from hetpipe.training.runlog import TrainResult
from tests.support.chats import chat_of, lines, tokenizer
from tests.support.jobs import MLP, POINTS, Folder, train
from tests.support.runs import alone, reference, trained

QWEN = {
    "name": "causal_lm",
    "coupled_layers": "per_microbatch",
    "args": {  # which are not tried, to be fast
        "type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}
FUSED = {"name": "cross_entropy", "weight": "tokens", "fused": "auto"}


def chat_job(
    folder: Folder,
    counts: tuple[int, ...],
    rows: list[dict[str, Any]],
    adapter: dict[str, Any] | None,
    loss: dict[str, Any] = FUSED,
    *,
    evaluated: int = 0,
    **data: Any,
) -> Path:
    """A job on chats of unequal lengths, the longest of which, cut to the length of a row, fill one by themselves."""
    chats = [chat_of("quick fox " * (1 + i % 5), "dog " * (1 + i % 3)) for i in range(30)]
    file = lines(folder.path / "chats.jsonl", chats)
    args = {"file": file, "tokenizer": tokenizer(folder.path / "tokenizer"), "test_fraction": 0.3, **data}
    section = train(global_batch=sum(rows[0]["sizes"]), steps=2, dtype="float32", evaluate_samples=evaluated, scheduler=None)
    return folder.ready(
        counts, rows, slowdown=1.0, model=QWEN, data={"name": "chat", "args": args}, loss=loss, adapter=adapter, train=section
    )


def beside(found: TrainResult) -> dict[str, float]:
    """Measured over predicted bytes of each device, less one."""
    assert found.predicted is not None
    said = found.predicted.peak_bytes
    assert said.keys() == found.peak_bytes.keys()
    return {device: size / said[device] - 1 for device, size in found.peak_bytes.items()}


def test_adapters_take_the_memory_that_is_predicted_of_rows_of_any_kind(tmp_path: Path) -> None:
    """Of packed rows the first has one sample, which needs no mask, and the others have one, of the square of their length. (What
    is measured is less than predicted where a micro-batch shares tables of positions, which are counted with each sample.)"""
    lora, plain, pack = {"r": 8}, {**FUSED, "fused": False}, {"length": 28, "pack": True}
    cases: dict[str, tuple[dict[str, Any] | None, dict[str, Any], dict[str, Any]]] = {
        "packed": (lora, FUSED, pack),
        "all train": (None, plain, pack),
        "int8": ({**lora, "base": "int8"}, FUSED, pack),
        "nf4": ({**lora, "base": "nf4"}, FUSED, pack),
        "dora": ({**lora, "use_dora": True}, FUSED, pack),
        "padded": (lora, FUSED, {"length": 28}),
        "mask": (lora, plain, {"length": 28, "mask": True}),
    }
    found, rows = dict[str, float](), [{"cuts": [5], "sizes": [4, 4]}]
    for number, (name, (adapter, loss, data)) in enumerate(cases.items()):
        (folder := tmp_path / str(number)).mkdir()
        found[name] = beside(alone(chat_job(Folder(folder), (1,), rows, adapter, loss, **data)))["n0/0"]
    assert not {name: off for name, off in found.items() if not -0.02 < off < 0.001}, found


def test_measured_stands_beside_predicted_memory_in_one_unit() -> None:
    at_once = Timeline(
        spans=(),
        step_seconds=1.0,
        pipeline_seconds=1.0,
        sync_seconds=0.0,
        optimizer_seconds=0.0,
        peak_bytes={"n0/0": 1020 * 2**10},
    )
    found = TrainResult(plan=None, predicted=at_once, peak_bytes={"n0/0": 1044 * 2**10, "n0/1": 2048})
    said = io.StringIO()
    Console(file=said, width=100).print(memory_table(found))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.getvalue().splitlines() if "│ n0/" in line]
    assert rows == [["n0/0", "1.02 MiB", "1.00 MiB", "+2.4%"], ["n0/1", "2.00 KiB", "", ""]]


@pytest.mark.thorough
def test_stages_of_adapters_take_the_memory_that_is_predicted_and_no_more_in_an_evaluation(tmp_path: Path) -> None:
    """The head holds little beside what it receives: in the evaluation two micro-batches more are on their way, in the buffers of
    training. Tables of positions are in each stage once."""
    rows: list[dict[str, Any]] = [{"cuts": [2, 2, 1], "sizes": [2] * 4}]
    file = chat_job(Folder(tmp_path), (3,), rows, {"r": 8}, evaluated=8, length=28, pack=True)
    found = beside(trained(file))
    assert all(-0.02 < off < 0.001 for off in found.values()), found


def test_peak_bytes_of_emulated_devices_and_their_summary(tmp_path: Path) -> None:
    file = Folder(tmp_path).ready(slowdown=2.0, train=train(steps=4, dtype="float32"))
    found = trained(file)
    assert set(found.peak_bytes) == {"n0/0", "n0/1", "n1/0"}
    assert found.predicted is not None
    for device, peak in found.peak_bytes.items():
        assert peak == pytest.approx(found.predicted.peak_bytes[device], rel=0.05), device
    assert found.summary()["predicted_peak_bytes"] == found.predicted.peak_bytes
    page = (tmp_path / "log" / "report.html").read_text("utf-8")
    for device, off in beside(found).items():
        size, said = human_bytes(found.peak_bytes[device]), human_bytes(found.predicted.peak_bytes[device])
        assert f" of {device}</th><td>{size}</td><td>{said}</td><td>{100 * off:+.1f} %</td>" in page
    assert found.summary()["measured_step_seconds"] >= 2.0 * 6 * 4 * 2e-4  # n1/0: 6 layers, 4 samples, forward and backward


def test_peak_bytes_of_many_micro_batches_are_those_in_flight(tmp_path: Path) -> None:
    """64 micro-batches of 4 samples, of which three, two and one are in flight; the middle stage recomputes."""
    folder = Folder(tmp_path)
    model, data = {**MLP, "args": {**MLP["args"], "width": 256}}, {**POINTS, "args": {**POINTS["args"], "samples": 256}}
    section = train(global_batch=256, steps=2, dtype="float32", evaluate_samples=0)
    rows = [{"cuts": [2, 2, 2], "sizes": [4] * 64}]
    file = folder.ready((3,), rows, slowdown=1.0, model=model, data=data, train=section)
    plan = folder.read("plan.json")
    plan["replicas"][0]["stages"][1]["recompute"] = True
    folder.write("plan.json", plan)
    found = trained(file)
    assert found.predicted is not None
    assert found.peak_bytes == pytest.approx(dict(found.predicted.peak_bytes), rel=0.03)


def test_a_recomputed_stage_with_the_loss_trains_in_the_memory_that_is_predicted(tmp_path: Path) -> None:
    """Of 512 classes, so that the loss saves more than a layer: no room for it beside the layer that is recomputed."""
    folder, classes = Folder(tmp_path), 512
    model = {**MLP, "args": {**MLP["args"], "outputs": classes}}
    data = {**POINTS, "args": {**POINTS["args"], "classes": classes}}
    file = folder.ready((1,), [{"cuts": [6], "sizes": [4, 4, 4], "recompute": True}], slowdown=1.0, model=model, data=data)
    cluster, profile = (kind.load(tmp_path / name) for kind, name in ((Cluster, "cluster.yaml"), (Profile, "profile.json")))
    peak = simulate(Plan.load(tmp_path / "plan.json"), profile, cluster).peak_bytes["n0/0"]  # type: ignore[arg-type]
    folder.cluster(1, memory=f"{peak + 1024} B", slowdown=1.0)  # AdamW counts the steps of each parameter
    found = trained(file)
    assert found.peak_bytes["n0/0"] == pytest.approx(peak, rel=0.03)


def test_a_mostly_frozen_model_is_planned_and_trained_where_it_could_not_train_as_a_whole(tmp_path: Path) -> None:
    """Its parameters take half a megabyte, with all gradients and AdamW's state two."""
    folder = Folder(tmp_path)
    file = folder.job(
        model={"target": "tests.support.user_parts:mostly_frozen"},
        plan={"partitioner": "auto"},
        train=train(steps=3, dtype="float32"),
    )
    folder.cluster(2, memory="600 KiB", slowdown=1.0)
    profile, cluster = Profile.load(folder.profile(file)), Cluster.load(tmp_path / "cluster.yaml")
    assert [layer.trained for layer in profile.layers] == [0, 0, 0, 0, 256 * 4, 257 * 4 * 4]
    whole = tuple(layer.model_copy(update={"trained_bytes": None}) for layer in profile.layers)
    with pytest.raises(PartitionError, match="no plan fits"):
        make_plan(profile.model_copy(update={"layers": whole}), cluster, 12)
    found, truth = trained(file), reference(file)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(truth.losses), rtol=0, atol=1e-5)
    assert found.losses[-1] < found.losses[0]
    assert found.predicted is not None
    assert found.peak_bytes.keys() == found.predicted.peak_bytes.keys()
    for device, peak in found.peak_bytes.items():
        assert 0.9 * found.predicted.peak_bytes[device] < peak <= found.predicted.peak_bytes[device] * 1.01, device


def test_stages_below_all_that_trains_hold_what_is_predicted_and_run_no_backward(tmp_path: Path) -> None:
    """Two stages of three, with a warm-up of eight: of 16 micro-batches two are in flight there. The inputs of the step are there
    as well, and at the other end its targets."""
    folder = Folder(tmp_path)
    section = train(global_batch=64, steps=2, dtype="float32", evaluate_samples=0)
    rows = [{"cuts": [2, 2, 2], "sizes": [4] * 16, "warmup": [8, 8, 1]}]
    file = folder.ready((3,), rows, slowdown=1.0, model={"target": "tests.support.user_parts:mostly_frozen"}, train=section)
    found = trained(file)
    assert found.predicted is not None
    assert found.peak_bytes == pytest.approx(dict(found.predicted.peak_bytes), rel=0.03)
    for timeline in (found.measured, found.predicted):
        assert timeline is not None
        actions = {(span.stage, span.kind) for span in timeline.spans if span.kind in ("F", "B")}
        assert actions == {(0, "F"), (1, "F"), (2, "F"), (2, "B")}


def test_an_emulated_device_out_of_memory_names_rank_stage_and_device(tmp_path: Path) -> None:
    file = Folder(tmp_path).ready(slowdown=1.0, memory="20 KiB")
    with pytest.raises(RankFailure) as caught:
        trained(file)
    text = str(caught.value)
    assert "out of memory on rank" in text
    assert "of 20480 bytes (the device type's memory in the cluster file)" in text
    assert any(
        f"rank {rank}, {place}" in text
        for rank, place in enumerate(
            ("replica 0 stage 0, device n0/0", "replica 0 stage 1, device n0/1", "replica 1 stage 0, device n1/0")
        )
    )
    assert caught.value.report is not None
