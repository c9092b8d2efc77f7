"""examples/: the seven scripts, each as a user starts it, end with the parameters of one device that has the whole batch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples import common
from hetpipe.building.data import EpochSampler
from hetpipe.layers.device import one_thread
from tests.support.commands import ROOT, THREADS_LEFT, finish, start
from tests.support.ranks import make_plan

Parameters = dict[str, Tensor]
EPOCHS, GLOBAL_BATCH = 3, 8
ROUNDING = 2e-5  # float32, after 78 steps, half of them clipped, that move parameters by up to 0.5


def one_device(dtype: torch.dtype | None = None) -> Parameters:
    """The job without hetpipe's sampler and weighting: mean losses of whole batches."""
    dataset, model = common.text_classification(), common.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE, momentum=common.MOMENTUM)
    order = EpochSampler(len(dataset), GLOBAL_BATCH)
    for epoch in range(EPOCHS):
        for indices in order.order(epoch).split(GLOBAL_BATCH):
            text, label = dataset[indices]
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = cross_entropy(model(text), label)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), common.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture(scope="module")
def expected() -> Parameters:
    with one_thread(torch.device("cpu")):
        return one_device()


def distance(a: Parameters, b: Parameters) -> float:
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def command(script: str, *arguments: str) -> list[str]:
    return [str(ROOT / "examples" / script), *arguments, "--epochs", str(EPOCHS), "--out", "out.safetensors"]


def ended_well(folder: Path, *arguments: str) -> Parameters:
    """The parameters that a run left behind, which printed one line about its result and nothing that frightens."""
    mark = str(folder)
    ended = finish(start(arguments, folder, mark), folder, mark, timeout=110)
    assert (ended.code, ended.leftover) == (0, []), ended.err
    assert not [word for word in ("arning", "Traceback", "deprecated", THREADS_LEFT) if word in ended.err], ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("loss ")]
    assert float(line.split()[1].rstrip(",")) < 0.8  # that of guessing is ln 3 = 1.0986
    return load_file(folder / "out.safetensors")


def by_itself(folder: Path, script: str, *arguments: str) -> Parameters:
    """A script that starts its ranks."""
    return ended_well(folder, *command(script, *arguments))


def torchrun() -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]


def by_torchrun(folder: Path, script: str, *arguments: str) -> Parameters:
    """Two ranks of torchrun's."""
    return ended_well(folder, *torchrun(), *command(script, *arguments))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.thorough
def test_spawn(tmp_path: Path, expected: Parameters) -> None:
    found = by_itself(tmp_path, "spawn.py", "--shares", "6", "2")
    assert distance(found, expected) < ROUNDING
    assert distance(common.build_model().state_dict(), expected) > 0.1  # what training moved


@pytest.mark.thorough
def test_torchrun(tmp_path: Path, expected: Parameters) -> None:
    found = by_torchrun(tmp_path, "torchrun.py", "--measure", "8")
    assert distance(found, expected) < ROUNDING


@pytest.mark.thorough
@pytest.mark.slow
def test_amp(tmp_path: Path, expected: Parameters) -> None:
    """In float32 (autocast off, the GradScaler on) the parameters of all others. In bfloat16, which rounds gradients to 3
    digits, no farther from one device in bfloat16 than twice what that is from float32."""
    found = by_torchrun(tmp_path, "amp.py", "--precision", "float32", "--shares", "5", "3")
    assert distance(found, expected) < ROUNDING
    with one_thread(torch.device("cpu")):
        rounded = one_device(torch.bfloat16)
    assert distance(rounded, expected) > 100 * ROUNDING
    found = by_torchrun(tmp_path, "amp.py", "--shares", "6", "2")
    assert distance(found, rounded) < 2 * distance(rounded, expected)


@pytest.mark.thorough
def test_accumulation_and_clipping(tmp_path: Path, expected: Parameters) -> None:
    rows = [{"cuts": [3], "sizes": [2, 2, 2], "devices": ["n0/0"]}, {"cuts": [3], "sizes": [2], "devices": ["n0/1"]}]
    make_plan(rows).save(tmp_path / "plan.json")
    found = by_torchrun(tmp_path, "accumulate_clip.py", "--plan", "plan.json")  # as --shares 6 2 --accumulate 3
    assert distance(found, expected) < ROUNDING


@pytest.mark.thorough
def test_accelerate(tmp_path: Path, expected: Parameters) -> None:
    assert distance(by_torchrun(tmp_path, "with_accelerate.py", "--shares", "6", "2"), expected) < ROUNDING


@pytest.mark.thorough
@pytest.mark.slow
def test_lightning(tmp_path: Path, expected: Parameters) -> None:
    assert distance(by_itself(tmp_path, "with_lightning.py", "--shares", "6", "2"), expected) < ROUNDING


@pytest.mark.thorough
@pytest.mark.slow
def test_hugging_face_trainer(tmp_path: Path, expected: Parameters) -> None:
    found = by_torchrun(tmp_path, "hf_trainer.py", "--shares", "6", "2", "--accumulate", "2")
    assert distance(found, expected) < ROUNDING


@pytest.mark.thorough
@pytest.mark.slow
def test_hugging_face_language_models_and_resuming(tmp_path: Path) -> None:
    mark, program = str(tmp_path), str(ROOT / "tests" / "support" / "uneven_trainers.py")
    ended = finish(start([*torchrun(), program, "saved"], tmp_path, mark), tmp_path, mark, timeout=110)
    assert ended.code == 0, ended.err
    assert THREADS_LEFT not in ended.err
    results = [json.loads(found) for found in re.findall(r'\{"away".*?\}', ended.out)]  # of two ranks, perhaps on one line
    assert len(results) == 2
    for result in results:
        assert result["away"] < 1e-5
        assert result["resumed"] < 1e-6


def test_what_the_readme_shows_stands_in_the_scripts() -> None:
    text = (ROOT / "examples" / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("```python") == 3
    for script, shown in blocks:
        lines = iter((ROOT / "examples" / script).read_text("utf-8").splitlines())
        assert [line for line in shown.splitlines() if line not in lines] == []  # all of them, in this order
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"common.py"}
    assert set(re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE)) == scripts
    assert set(re.findall(r"`\w+ [^`]*examples/(\w+\.py)[^`]*`", text)) == scripts
