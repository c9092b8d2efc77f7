"""The folder that a job's section `export` names: written whenever the run has ended, in the place of what a run has exported
there, and of nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.resume import identity
from hetpipe.documents.job import Job
from hetpipe.documents.sections.export import MARK
from hetpipe.files.messages import InputError
from hetpipe.planning import registry
from hetpipe.processes.world import alone
from hetpipe.training.results.exported import export_run, install
from tests.support.jobs import STATE

WEIGHTS = "model.safetensors"


def job(**export: Any) -> Job:
    return Job.parse(
        {
            "format": "hetpipe.job/1",
            "model": {"name": "mlp", "args": {"layers": 2, "width": 4, "inputs": 3, "outputs": 2}},
            "data": {"name": "text"},
            "train": {"global_batch": 2, "steps": 1},
            "checkpoint": {"folder": "out/checkpoints"},
            "export": {"folder": "out/model", **export},
        },
        "this test",
    )


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job whose run has left a checkpoint."""
    monkeypatch.chdir(tmp_path)
    own = job()
    layers = registry.model("mlp")(**own.model.args)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    checkpoint.save("out/checkpoints", 1, layers, optimizer, {**STATE, "job": identity(own)}, alone(), keep=1)
    return own


def test_what_is_damaged_is_written_anew_and_what_others_put_there_stays(ended: Job) -> None:
    """A run that was finished said that the weights were there, and they were not."""
    assert export_run(ended) == (Path("out/model"), 1)
    wanted = load_file(f"out/model/{WEIGHTS}")
    Path("out/model/README.md").write_text("mine")
    Path("out/model/notes").mkdir()
    Path("out/model/notes/1").write_text("one")
    for damage in (Path.unlink, lambda file: file.write_bytes(b"short")):
        damage(Path("out/model", WEIGHTS))
        export_run(ended)
        assert load_file(f"out/model/{WEIGHTS}").keys() == wanted.keys()
        assert {path.name for path in Path("out/model").iterdir()} == {WEIGHTS, MARK, "README.md", "notes"}
    assert Path("out/model/notes/1").read_text() == "one"
    assert {path.name for path in Path("out").iterdir()} == {"checkpoints", "model"}


def test_a_file_that_is_not_exported_any_more_goes(ended: Job) -> None:
    export_run(ended)
    mark = Path("out/model", MARK)
    mark.write_text(mark.read_text().replace(f'"{WEIGHTS}"', f'"{WEIGHTS}", "adapter_config.json"'))
    Path("out/model/adapter_config.json").write_text("{}")
    export_run(ended)
    assert not Path("out/model/adapter_config.json").exists()


def test_through_a_link(ended: Job, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Path("out/model").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        export_run(ended)
        assert Path("out/model").is_symlink()
        assert (tmp_path / "elsewhere" / WEIGHTS).is_file()


def test_a_folder_of_others_is_refused_before_and_after_training(ended: Job) -> None:
    """A job whose export.folder was its base's lost the base."""
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    own = job(folder="base")
    tries: list[Callable[[], object]] = [own.check_folders, lambda: export_run(own)]
    for tried in tries:
        with pytest.raises(
            InputError,
            match=r"export.folder is 'base', which is replaced as a whole, but it holds 'config.json' "
            r"and no hetpipe_export.json, which a run leaves beside its export. Name another folder, or ",
        ):
            tried()
    assert Path("base/config.json").exists()
    with pytest.raises(InputError, match=r"but out/checkpoints, which the run also writes, lies in it. Name a separate folder"):
        job(folder="out").check_folders()
    Path("file").write_text("")
    with pytest.raises(InputError, match="export.folder is 'file', which is a file. Name a folder"):
        job(folder="file").check_folders()


def test_killed_while_it_takes_the_place(tmp_path: Path) -> None:
    """Between two renames: what others have put there is beside it then."""
    written, target, before = tmp_path / ".model", tmp_path / "model", tmp_path / ".model.before"
    for left in (target, before):
        written.mkdir()
        (written / WEIGHTS).write_text("new")
        left.mkdir()
        (left / "README.md").write_text("mine")
        install(written, target)
        assert {path.name for path in target.iterdir()} == {WEIGHTS, "README.md"}
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        shutil.rmtree(target)
