"""hetpipe/building/datasets.py: what samples hold, and the messages of unreadable data."""

from pathlib import Path

import pytest
import torch

from hetpipe.building.data import fetch
from hetpipe.building.datasets import Samples, cifar10, random_classification
from hetpipe.files.messages import InputError
from hetpipe.language.documents import text
from tests.support.external import NEEDS_CIFAR10


def write_cifar10(folder: Path, images_per_file: int = 2, label: int = 3) -> Path:
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    for number, name in enumerate(names):
        record = bytes([label]) + bytes([number]) * 1024 + bytes([100]) * 1024 + bytes([255]) * 1024
        (folder / name).write_bytes(record * images_per_file)
    return folder


def test_text_windows_follow_each_other_and_targets_are_one_byte_later(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"fghij")
    (tmp_path / "a.txt").write_bytes(b"abcde")
    data = text(context=3, files=str(tmp_path / "*.txt"), test_fraction=0).train
    assert isinstance(data, Samples)
    samples = [(bytes(inputs.tolist()), bytes(target.tolist())) for inputs, target in (data[i] for i in range(3))]
    assert len(data) == 3
    assert samples == [(b"abc", b"bcd"), (b"de\n", b"e\nf"), (b"fgh", b"ghi")]
    assert data[0][0].dtype == torch.int64


def test_text_holds_out_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    splits = text(context=4, files=[str(tmp_path / "a.txt")], test_fraction=0.2)
    assert splits.test is not None
    assert splits.test[0][0].tolist() == [80, 81, 82, 83]
    assert int(fetch(splits.train, torch.arange(19))[1].max()) == 76  # 79 // 4 windows of bytes 0 to 79


def test_text_reads_each_file_once_and_limits_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 50)
    pattern, plain = str(tmp_path / "*.txt"), str(tmp_path / "a.txt")
    assert len(text(context=7, files=[pattern, plain], test_fraction=0).train) == 7  # type: ignore[arg-type]
    assert len(text(context=7, files=plain, test_fraction=0, limit_bytes=15).train) == 2  # type: ignore[arg-type]


def test_text_defaults_to_the_standard_library() -> None:
    splits = text(limit_bytes=200_000)
    again = text(limit_bytes=200_000)
    inputs, targets = fetch(splits.train, torch.arange(len(splits.train)))  # type: ignore[arg-type]
    assert inputs.shape == targets.shape == (1406, 128)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, fetch(again.train, torch.arange(1406))[0])
    assert b"import" in bytes(inputs.flatten().tolist())


def test_text_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"abc")
    (tmp_path / "empty.txt").write_bytes(b"")
    short = str(tmp_path / "short.txt")
    with pytest.raises(InputError, match="training part has 3 bytes, but one sample of context 3 needs 4"):
        text(context=3, files=short, test_fraction=0)
    with pytest.raises(InputError, match="test part has 1 bytes, but one sample of context 1 needs 2"):
        text(context=1, files=short, test_fraction=0.34)
    with pytest.raises(InputError, match=r"no file matches '.*none\*'"):
        text(files=[str(tmp_path / "none*")])
    with pytest.raises(InputError, match=r"is a folder. Write .*/\*\*/\*\.txt"):
        text(files=[str(tmp_path)])
    with pytest.raises(InputError, match="the 1 files are empty"):
        text(files=str(tmp_path / "empty.txt"))
    with pytest.raises(InputError, match="files is an empty list"):
        text(files=[])
    with pytest.raises(InputError, match="test_fraction must be from 0 to below 1, got 1"):
        text(test_fraction=1)
    with pytest.raises(InputError, match="context must be an integer of at least 1, got 0"):
        text(context=0)


def test_cifar10_planes_labels_and_scale(tmp_path: Path) -> None:
    splits = cifar10(str(write_cifar10(tmp_path)), normalize=False)
    image, label = splits.train[4]  # the first of data_batch_3
    assert (image.dtype, image.shape, label.dtype, int(label)) == (torch.float32, (3, 32, 32), torch.int64, 3)
    assert image[:, 0, 0].tolist() == pytest.approx([2 / 255, 100 / 255, 1.0])
    normalised = cifar10(str(tmp_path)).train[4][0]
    assert float(normalised[2, 5, 5]) == pytest.approx((1 - 0.4465) / 0.2616, rel=1e-5)
    limited = cifar10(str(tmp_path), limit=1)
    assert (len(limited.train), len(limited.test)) == (1, 1)  # type: ignore[arg-type]


def test_cifar10_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETPIPE_DATA", raising=False)
    unset = "there is no folder 'cifar-10-batches-bin': HETPIPE_DATA is not set. Set HETPIPE_DATA to the folder that holds it"
    with pytest.raises(InputError, match=f"^{unset}, or give `folder`$"):
        cifar10()
    monkeypatch.setenv("HETPIPE_DATA", str(tmp_path))
    with pytest.raises(InputError, match=f"the folder {tmp_path} of HETPIPE_DATA has none. Set HETPIPE_DATA to"):
        cifar10()
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(InputError, match="cifar-10-batches-bin lacks data_batch_1.bin"):
        cifar10()
    (tmp_path / "cifar-10-batches-bin").rmdir()
    with pytest.raises(InputError, match=r"cannot read the folder .*nowhere: No such file.*expected there: data_b"):
        cifar10(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"lacks data_batch_1.bin, .*test_batch.bin .*; found: nothing"):
        cifar10(str(tmp_path))
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(InputError, match=r"lacks data_batch_2.bin \(.*found: data_batch_1.bin, data_batch_3.bin"):
        cifar10(str(tmp_path))
    (tmp_path / "data_batch_2.bin").write_bytes(b"\0" * 3074)
    with pytest.raises(InputError, match=r"data_batch_2.bin has 3074 bytes, not a positive multiple of 3073"):
        cifar10(str(tmp_path))
    (tmp_path / "data_batch_2.bin").write_bytes(b"\0" * 3073 + b"\x0b" + b"\0" * 3072)
    with pytest.raises(InputError, match=r"data_batch_2.bin gives image 1 the label 11; labels are 0 to 9"):
        cifar10(str(tmp_path))


@NEEDS_CIFAR10
def test_cifar10_real_piece_is_normalised() -> None:
    splits = cifar10()
    images, labels = fetch(splits.train, torch.arange(5085))
    assert images.shape == (5085, 3, 32, 32)
    assert labels.bincount().tolist() == pytest.approx([508.5] * 10, rel=0.15)
    assert images.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=0.05)
    assert images.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=0.05)


def test_random_classification_is_seeded_and_learnable() -> None:
    first, again = (random_classification(64, inputs=16, classes=3, seed=5, test_samples=8) for _ in range(2))
    inputs, targets = fetch(first.train, torch.arange(64))
    assert torch.equal(inputs, fetch(again.train, torch.arange(64))[0])
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((64, 16), torch.float32, torch.int64)
    centres = torch.stack([inputs[targets == label].mean(0) for label in range(3)])
    assert first.test is not None
    held_out, labels = fetch(first.test, torch.arange(8))
    assert torch.equal(torch.cdist(held_out, centres).argmin(1), labels)
    with pytest.raises(InputError, match="random_classification: samples must be an integer of at least 1, got 0"):
        random_classification(0)


def test_samples_outside_are_refused() -> None:
    data = random_classification(4).train
    assert torch.equal(data[-1][0], data[3][0])
    with pytest.raises(IndexError, match="sample 4 of a dataset of 4"):
        data[4]
