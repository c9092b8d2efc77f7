"""Tensors in files that any reader of safetensors takes: the library's own bytes, a piece after the other, and back."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from hetpipe.checkpoints import checkpoint, digests
from hetpipe.checkpoints.digests import HashedReader, RunningDigest
from hetpipe.checkpoints.state_tensors import shares
from hetpipe.checkpoints.stores import tensor_files
from hetpipe.checkpoints.stores.layout import TYPES
from hetpipe.checkpoints.stores.tensor_files import PartTensors, fill, save_tensors, take_tensors, write_tensors
from hetpipe.files.messages import InputError
from tests.test_checkpoint import ALONE, net, steps
from tests.test_resume import ADAM, loaded, saved_by


def every_kind() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {f"of {name}": torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in TYPES.items()}
    wide = torch.randn(6, 8)
    found |= {"turned": wide.T, "a part": wide[1:3, ::2], "odd": wide[0, ::2], "one of a row": wide[0, ::2][:1]}
    found |= {"shared": wide.view(48), "a number": torch.tensor(0.5), "none": wide[:0]}
    return found | {'"ü\n\x1f\x7f': torch.ones(1, dtype=torch.float16), "parameter": nn.Parameter(torch.ones(2))}


def as_the_library(tensors: dict[str, Tensor]) -> bytes:
    """The library takes no shared memory."""
    return safetensors.torch.save({k: t.detach().contiguous().clone() for k, t in tensors.items()}, metadata={"format": "pt"})


def in_memory(content: bytes) -> PartTensors:
    return PartTensors(lambda _: io.BytesIO(content), ["a"])


@pytest.mark.parametrize("piece", [1, 7, 1 << 22])
def test_the_bytes_are_the_librarys_and_come_back(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", piece)
    monkeypatch.setattr(digests, "PIECE_BYTES", piece)
    tensors, file = every_kind(), io.BytesIO()
    with RunningDigest() as digest:
        write_tensors(tensors, file, digest)
        said = digest.written()
    content = file.getvalue()
    assert content == as_the_library(tensors)
    assert digests.damage(lambda _: io.BytesIO(content), {"a": said}) == []
    assert said.size_bytes == len(content)
    save_tensors(tensors, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as opened:
        assert set(opened.keys()) == set(tensors)
        for key, tensor in tensors.items():
            there, back = opened.get_tensor(key), in_memory(content).read(key)
            assert there.dtype == back.dtype == tensor.dtype
            assert there.shape == back.shape == tensor.shape
            assert as_the_library({"a": there}) == as_the_library({"a": back}) == as_the_library({"a": tensor})


def test_there_may_be_no_tensors_at_all() -> None:
    file = io.BytesIO()
    write_tensors({}, file)
    assert file.getvalue() == safetensors.torch.save({}, metadata={"format": "pt"})
    assert dict(in_memory(file.getvalue())) == {}


def test_a_type_that_files_do_not_hold_is_told_before_anything_is_written() -> None:
    file = io.BytesIO()
    with pytest.raises(TypeError, match=r"^'a' is of type torch.complex128, which safetensors files do not hold$"):
        write_tensors({"b": torch.ones(1), "a": torch.ones(1, dtype=torch.complex128)}, file)
    assert file.getvalue() == b""


def test_what_is_filled_may_be_a_view() -> None:
    content = io.BytesIO()
    write_tensors({"a": torch.arange(12.0).view(3, 4)}, content)
    whole = torch.zeros(4, 6)
    in_memory(content.getvalue()).read_into({"a": whole[:, ::2].T})
    assert torch.equal(whole[:, ::2].T, torch.arange(12.0).view(3, 4))
    assert not bool(whole[:, 1::2].any())


def test_a_state_is_never_in_memory_a_second_time(tmp_path: Path) -> None:
    """Python's and numpy's allocations while 64 MiB are written, hashed and read back: a few pieces."""
    tensors = {str(i): torch.ones(1 << 20) for i in range(16)}
    tracemalloc.start()
    with (tmp_path / "a").open("wb") as file, RunningDigest() as digest:
        write_tensors(tensors, file, digest)
        said = digest.written()
    with (tmp_path / "a").open("rb") as content, RunningDigest() as digest:
        take_tensors(HashedReader(content, said.size_bytes, digest), lambda there: {"3": torch.empty(there["3"].shape)})
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 * digests.PIECE_BYTES < 64 << 20


def test_tensors_are_read_beside_their_digest() -> None:
    content = io.BytesIO()
    tensors = every_kind()
    write_tensors(tensors, content)
    bytes_ = content.getvalue()
    with RunningDigest() as whole:
        whole.feed(memoryview(bytes_))
        said = whole.written()
    taken = dict[str, Tensor]()

    def take(_: str, reader: HashedReader) -> None:
        taken.update(
            take_tensors(
                reader,
                lambda there: {
                    key: torch.empty(place.shape, dtype=place.dtype) for key, place in there.items() if not key.startswith("of F")
                },
            )
        )

    assert digests.damage(lambda _: io.BytesIO(bytes_), {"a": said}, take) == []
    assert taken.keys() == {key for key in tensors if not key.startswith("of F")}
    assert as_the_library(taken) == as_the_library({key: tensors[key] for key in taken})
    harmed = bytes_[:-3] + bytes([bytes_[-3] ^ 1]) + bytes_[-2:]
    assert "has other content" in digests.damage(lambda _: io.BytesIO(harmed), {"a": said}, take)[0]


def test_a_checkpoint_that_was_damaged_changes_nothing(tmp_path: Path) -> None:
    """The optimizer's tensors are read beside the digest: neither they nor the model's are anyone's before it is right."""
    saved = saved_by(tmp_path, ADAM)
    (file,) = saved.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = net(seed=9)
    other = ADAM(again.parameters())
    steps(again, other, 1)
    before = {key: value.clone() for key, value in again.state_dict().items()}
    state = json.dumps(other.state_dict(), default=str)
    with pytest.raises(InputError, match="is not as it was written"):
        checkpoint.load(saved, again, other, ALONE)
    assert all(torch.equal(value, before[key]) for key, value in again.state_dict().items())
    assert json.dumps(other.state_dict(), default=str) == state


def test_each_byte_is_read_once_but_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, read, real = saved_by(tmp_path, ADAM), list[int](), digests.read_into

    def noted(content: Any, memory: memoryview) -> None:
        read.append(memory.nbytes)
        real(content, memory)

    monkeypatch.setattr(digests, "read_into", noted)
    monkeypatch.setattr(tensor_files, "read_into", noted)
    whole, _ = loaded(saved, ADAM)
    (file,) = saved.glob("*.safetensors")
    assert sum(read) == file.stat().st_size + sum(t.numel() * t.element_size() for t in whole.state_dict().values())


def header(**change: object) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change
    text = json.dumps({"a": entry, "__metadata__": {"x": "y"}}).encode()
    return len(text).to_bytes(8, "little") + text


HARMED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "0 bytes have no room for a header of 0"),
    "a long header": (lambda: b"\xff" * 16, "16 bytes have no room for a header of 18446744073709551615"),
    "no text": (lambda: b"\1" + bytes(7) + b"\xff", "its header is no JSON"),
    "no mapping": (lambda: b"\2" + bytes(7) + b"[]", "its header is no mapping"),
    "no type": (lambda: header(dtype="F31") + bytes(8), "'a' is of the type 'F31'"),
    "a strange type": (lambda: header(dtype=["F32"]) + bytes(8), "'a' is of the type"),
    "a strange key": (lambda: header(more=1) + bytes(8), "'a' is described by"),
    "a negative size": (lambda: header(shape=[-2]) + bytes(8), r"'a' has the shape \[-2\]"),
    "another place": (lambda: header(data_offsets=[4, 12]) + bytes(12), r"'a' lies at \[4, 12\], but should lie at \[0, 8\]"),
    "another size": (lambda: header(shape=[3]) + bytes(8), r"'a' lies at \[0, 8\], but should lie at \[0, 12\]"),
    "a byte less": (lambda: header() + bytes(7), "its tensors end at"),
    "a byte more": (lambda: header() + bytes(9), "its tensors end at"),
}


@pytest.mark.parametrize("kind", HARMED)
def test_what_is_no_file_of_tensors_is_told(kind: str) -> None:
    make, message = HARMED[kind]
    with pytest.raises(InputError, match=message):
        in_memory(make())


def test_a_part_that_ends_early_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="it ends 4 bytes early"):
        fill(torch.empty(2), lambda memory: digests.read_into(io.BytesIO(bytes(4)), memory))


def test_ranks_share_what_several_of_them_hold() -> None:
    sizes = [{"a": 4, "b": 4, "c": 1}, {"a": 4, "b": 4}, {"d": 0}]
    assert shares(sizes) == [["a", "c"], ["b"], ["d"]]
    assert shares([{}]) == [[]]
