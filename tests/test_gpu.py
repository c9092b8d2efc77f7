"""What a card alone can show; without one, and with a torch that drives none, all of it is skipped. Everything runs in processes
of its own, which see the card that the other tests do not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import SHOWN
from tests.support.commands import Ended, agents, finish, hetpipe, processes
from tests.support.jobs import Folder, train

OWN_LOOP = """
import sys, torch, hetpipe
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
inputs, targets = torch.randn(64, 8), torch.randint(4, (64,))
engine = hetpipe.auto(model, (inputs[:8], targets[:8]), torch.nn.functional.cross_entropy, global_batch=16)
print(engine.step(engine.share(inputs[:16]), engine.share(targets[:16])), next(engine.parameters()).device.type)
"""

OUT_OF_RANGE = """
import torch, hetpipe
model = torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 2))
words, targets = torch.full((8,), 34), torch.zeros(8, dtype=torch.long)
hetpipe.auto(model, (words, targets), torch.nn.functional.cross_entropy, global_batch=16)
"""

OFFLOADED = """
import torch
from torch import nn
from hetpipe.layers.host.offload import Offload
from hetpipe.layers.recipe import make_stage
torch.manual_seed(0)
card = torch.device("cuda", 0)
block = [nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Dropout(0.1)]
stage = make_stage(nn.Sequential(*block * 8), 0, 32, card)
inputs = torch.randn(6, 2048, 1024, device=card)

def run(offload, depth):
    stage.offload = offload
    stage.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, flying = torch.cuda.memory_allocated(), []
    def backward():
        flying.pop(0).backward()
        if offload is not None:
            offload.end()
    for rows in inputs:
        flying.append(stage(rows.clone().requires_grad_()).square().mean())
        if len(flying) == depth:
            backward()
    while flying:
        backward()
    torch.cuda.synchronize()
    return [p.grad.clone() for p in stage.parameters()], torch.cuda.max_memory_allocated() - before

for depth in (1, 3, 6):
    (kept, most), (away, less) = run(None, depth), run(offload := Offload(card), depth)
    assert all(torch.equal(a, b) for a, b in zip(kept, away, strict=True)), depth
    assert less < 0.6 * most, (depth, less, most)
    assert offload.host_bytes == 0 < offload.host_peak
print("alike")
"""

# To NCCL, which refuses two ranks on one card of a host, each rank is on a host of its own; they send through a socket.
SHARED_CARD = """
import os
os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "VERSION"}
from hetpipe.__main__ import main
main()
"""
UNEQUAL = [{"cuts": [4, 2], "sizes": [3, 3, 2], "devices": ["n0/0", "n1/0"]}, {"cuts": [6], "sizes": [2, 2], "devices": ["n2/0"]}]


def has_card() -> bool:
    """Whether the driver lists a card (asking torch would begin CUDA in this process)."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not torch.backends.cuda.is_built() or SHOWN == "":
        return False
    return bool(subprocess.run([tool, "-L"], capture_output=True, check=False).stdout.strip())


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_card(), reason="no CUDA card that this torch drives")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Commands that are started there see the card."""
    if SHOWN is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SHOWN)
    return Folder(tmp_path)


def ran(folder: Folder, *arguments: str, code: int = 0) -> Ended:
    ended = hetpipe("train", *arguments, folder=folder.path, timeout=280)
    assert (ended.code, ended.leftover) == (code, []), ended.err
    return ended


def losses(folder: Folder, log: str) -> list[float]:
    return [line["loss"] for line in folder.lines(f"{log}/metrics.jsonl") if "loss" in line]


def job(folder: Folder, log: str, **sections: Any) -> str:
    """A job on whatever is there."""
    sections = {"cluster": None, "profile": None, "plan": None, "log": {"folder": log, "every_steps": 1}, **sections}
    return str(folder.job(f"{log}.yaml", train=train(global_batch=8, steps=6), **sections))


def test_a_job_trains_on_the_card_goes_on_there_and_is_what_the_cpu_trains(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = {"checkpoint": {"folder": "kept", "every_steps": 3}}
    ran(folder, job(folder, "card"))
    assert [m["device_type"] for m in folder.read("card/profile.json")["measurements"]] != ["cpu"]
    ran(folder, job(folder, "half", **saving), "--set", "train.steps=3")
    ran(folder, job(folder, "rest", **saving))
    assert losses(folder, "half") + losses(folder, "rest") == pytest.approx(losses(folder, "card"), rel=1e-6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ran(folder, job(folder, "cpu"))
    assert losses(folder, "card") == pytest.approx(losses(folder, "cpu"), rel=1e-4)


@pytest.mark.parametrize("backend", ["fairscale", "torchgpipe"])
def test_one_process_drives_a_replica_on_the_card(folder: Folder, backend: str) -> None:
    pytest.importorskip(backend)
    ran(folder, job(folder, "card"), "--set", f"plan.backend={backend}")
    assert folder.read("card/plan.json")["backend"] == backend


def test_emulated_devices_beside_a_card(folder: Folder) -> None:
    """Their ranks are forked, and torch's optimizers ask CUDA whether it records a graph."""
    folder.cluster(2, slowdown=2.0)
    ran(folder, job(folder, "emulated", cluster="cluster.yaml"))


def test_a_word_that_is_out_of_range_names_the_layer(folder: Folder) -> None:
    """The card says so later, in another call, and is of no use after it."""
    (folder.path / "words.py").write_text(OUT_OF_RANGE)
    (agent,) = agents([1], [], folder.path, "words", program=["words.py"])
    ended = finish(agent, folder.path, "words", "agent0")
    assert (ended.code, ended.leftover) == (1, [])
    assert "InputError: layer '0' (Embedding) does not run on a micro-batch of" in ended.err


def test_a_loop_of_ones_own_warns_of_nothing(folder: Folder) -> None:
    (folder.path / "loop.py").write_text(OWN_LOOP)
    (agent,) = agents([1], [], folder.path, "loop", program=["loop.py"])
    ended = finish(agent, folder.path, "loop", "agent0")
    assert (ended.code, ended.leftover) == (0, []), ended.err
    loss, device = ended.out.split()
    assert (float(loss) > 0, device) == (True, "cuda")
    assert "Warning" not in ended.err


def test_what_a_stage_offloads_comes_back_as_it_was(folder: Folder) -> None:
    """Copies run beside the layers on streams of their own; memory that was given back too early would be another's by then."""
    (folder.path / "offloaded.py").write_text(OFFLOADED)
    (agent,) = agents([1], [], folder.path, "offloaded", program=["offloaded.py"])
    ended = finish(agent, folder.path, "offloaded", "agent0")
    assert (ended.code, ended.leftover) == (0, []), ended.err
    assert ended.out.split() == ["alike"]


def test_a_job_whose_stages_offload_trains_the_same_on_the_card(folder: Folder) -> None:
    ran(folder, job(folder, "kept"))
    (overhead,) = folder.read("kept/profile.json")["overheads"]
    assert overhead["host_bytes_per_second"] > 1e8
    assert 0 <= overhead["host_copy_overlap"] <= 1
    plan = folder.read("kept/plan.json")
    for replica in plan["replicas"]:
        for stage in replica["stages"]:
            stage.update(recompute=False, offload=True)
    folder.write("away.json", plan)
    ran(folder, job(folder, "away", plan={"file": "away.json"}, profile="kept/profile.json"))
    assert losses(folder, "away") == pytest.approx(losses(folder, "kept"), rel=1e-6)


def on_one_card(folder: Folder, codes: set[int]) -> str:
    """Three ranks train over NCCL, all on this card, or over gloo where none is shown; what they say. All of them end so."""
    (folder.path / "shared_card.py").write_text(SHARED_CARD)
    mark = str(folder.path)
    started = agents([1, 1, 1], ["train", "job.yaml"], folder.path, mark, program=["shared_card.py"])
    deadline = time.monotonic() + 150
    try:
        while (left := processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for agent in started:
            agent.kill()
            agent.wait()
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
    said = "".join((folder.path / f"agent{i}.err").read_text() for i in range(3))
    print(said)
    assert left == []
    assert {agent.returncode for agent in started} == codes
    return said


@pytest.mark.parametrize("weight", ["samples", "tokens"])
def test_unequal_pipelines_over_nccl_train_what_they_train_over_gloo(
    folder: Folder, weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages beside one, the last batch of each epoch smaller: activations, gradients, sums and agreements of all kinds."""
    file = folder.ready(
        (1, 1, 1),
        UNEQUAL,
        loss={"name": "cross_entropy", "weight": weight},
        train=train(steps=9),
        log={"folder": "card", "every_steps": 1},
    )
    on_one_card(folder, {0})
    assert "NCCL version" in (folder.path / "agent0.out").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file.write_text(file.read_text().replace("folder: card", "folder: cpu"))
    on_one_card(folder, {0})
    assert losses(folder, "card") == pytest.approx(losses(folder, "cpu"), rel=1e-9)
    assert len(losses(folder, "card")) == 9


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_all_over_nccl(folder: Folder, how: str) -> None:
    """What the others were sending or summing on the card does not keep them."""
    model = {"target": "tests.support.user_parts:failing", "args": {"how": how, "step": 4}}
    rows = [{**UNEQUAL[0], "cuts": [3, 3]}, UNEQUAL[1]]
    folder.ready((1, 1, 1), rows, model=model, train=train(steps=500))
    assert "rank 1 on host" in on_one_card(folder, {1})
