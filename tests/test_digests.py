"""Whether what a checkpoint holds is what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetpipe.checkpoints.digests import digest_of
from hetpipe.checkpoints.stores.folder import STATE_FILE
from hetpipe.checkpoints.training_state import TrainerState, state_text
from hetpipe.files.messages import InputError
from tests.support.jobs import STATE
from tests.support.saving import older_version
from tests.test_checkpoint import steps
from tests.test_resume import ADAM, loaded, saved_by


def one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def half_of_the_tensors(file: Path) -> None:
    """Zeros, as a file system leaves them whose machine lost its power."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    middle = (begin + len(content)) // 2
    file.write_bytes(content[:middle] + bytes(len(content) - middle))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (one_bit, r"\S+ has other content: its digest is [0-9a-f]{16}…, and [0-9a-f]{16}… was written"),
    "half": (half_of_the_tensors, r"\S+ has other content: its digest is [0-9a-f]{16}…, and [0-9a-f]{16}… was written"),
    "the end": (lambda file: file.write_bytes(file.read_bytes()[:-10]), r"\S+ has \d+ bytes, and \d+ were written"),
    "all": (Path.unlink, r"\S+ cannot be read: No such file or directory"),
    "another": (
        lambda file: file.with_name("b.safetensors").write_bytes(file.read_bytes()),
        r"b\.safetensors was not written with the checkpoint",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_and_nothing_of_it_is_loaded(tmp_path: Path, kind: str) -> None:
    saved = saved_by(tmp_path, ADAM)
    (file,) = saved.glob("*.safetensors")
    harm, fault = DAMAGE[kind]
    harm(file)
    words = rf"^checkpoint {saved} is not as it was written; remove it to resume from the one before:\n  {fault}$"
    with pytest.raises(InputError, match=words):
        loaded(saved, ADAM)


def test_a_checkpoint_of_before_there_were_digests_is_loaded(tmp_path: Path) -> None:
    saved = saved_by(tmp_path, ADAM)
    older_version(saved)
    steps(*loaded(saved, ADAM), 1)


def test_a_state_that_was_changed_is_refused(tmp_path: Path) -> None:
    saved = saved_by(tmp_path, ADAM)
    file = saved / STATE_FILE
    state = json.loads(file.read_text())
    file.write_text(json.dumps({key: state[key] for key in reversed(state)}))  # the same in another order
    assert TrainerState.load(file).step == 2
    file.write_text(json.dumps({**state, "loss": 0.25}))
    with pytest.raises(InputError) as caught:
        loaded(saved, ADAM)
    assert str(caught.value).startswith(f"{file} is not as it was written: its digest is ")
    assert str(caught.value).endswith(
        f"{state['digest'][:16]}… was written; remove this checkpoint to resume from the one before"
    )


def test_the_digest_is_of_the_values_that_json_gives_back() -> None:
    odd = {**STATE, "step": 4, "scheduler_state": {"best": float("inf"), "rates": (0.1, 1e-300), "last_epoch": 3, "ü": {}}}
    text = json.loads(state_text(odd))
    assert text["digest"] == digest_of(text)
    assert digest_of({**text, "step": 5}) != text["digest"]
    assert torch.inf == text["scheduler_state"]["best"]


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", ".hidden", ""])
def test_only_files_of_the_folder_have_digests(name: str) -> None:
    entry = {"size_bytes": 1, "blake2b": "0" * 64}
    with pytest.raises(InputError, match="files"):
        TrainerState.parse({"format": "hetpipe.checkpoint/1", "step": 4, **STATE, "files": {name: entry}}, "x")
