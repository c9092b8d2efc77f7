"""Jobs on chats: a decoder of transformers over unequal replicas trains as on one device, whatever sizes its batches are padded
to, and packed as not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

os.environ["HF_HUB_OFFLINE"] = "1"

from hetpipe.building.build import build_data, build_model
from hetpipe.building.lengths import few_sizes, shorter_batches, size_shares
from hetpipe.documents.job import Job
from hetpipe.documents.profile import Profile
from hetpipe.layers.model import row_shapes
from hetpipe.training.session import open_session
from tests.support.chats import WORDS, chat_of, lines, refusal, tokenizer
from tests.support.jobs import Folder
from tests.support.jobs import train as train_section
from tests.support.runs import assert_same, reference, trained

QWEN: dict[str, Any] = {
    "name": "causal_lm",
    "args": {
        "type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}
PLAN = [{"cuts": [2, 2, 1], "sizes": [2, 1, 2]}, {"cuts": [5], "sizes": [2]}]
TRAIN = train_section(global_batch=7, steps=8, evaluate_samples="all", optimizer={"name": "SGD", "lr": 0.3})


def job(folder: Folder, *, fused: bool = False, **options: Any) -> Path:
    """A job on 30 chats of unequal lengths, over three stages beside one."""
    words = WORDS.split()
    chats = [chat_of(" ".join(words[: 1 + i % 7]), " ".join(words[i % 5 : i % 5 + 1 + i * i % 29])) for i in range(30)]
    data = {
        "name": "chat",
        "args": {
            "file": lines(folder.path / "chats.jsonl", chats),
            "length": 96,
            "test_fraction": 0.2,
            "tokenizer": tokenizer(folder.path / "tokenizer"),
            **options,
        },
    }
    loss = {"name": "cross_entropy", "weight": "tokens", "fused": fused}
    return folder.ready((3, 1), PLAN, model=QWEN, data=data, train=TRAIN, loss=loss)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        pytest.param({"mask": True, "fused": True}, marks=pytest.mark.thorough),
        {"pack": True, "length": 64, "fused": True},
    ],
    ids=str,
)
def test_chats_train_over_unequal_replicas_as_on_one_device(tmp_path: Path, options: dict[str, Any]) -> None:
    """The one device's batches are all padded to the largest size."""
    file = job(Folder(tmp_path), **options)
    truth = reference(file, "loss.fused=false")
    assert_same(trained(file), truth)
    assert truth.losses[-1] < 0.95 * truth.losses[0]


def test_a_profile_of_chats_has_the_seconds_of_their_mix(tmp_path: Path) -> None:
    read = Job.read(job(Folder(tmp_path)))
    found = build_data(read)
    data: Any = found.train
    shares = size_shares(data, read.train)
    assert len(shares) >= 2
    assert sum(shares.values()) == pytest.approx(1)
    model = build_model(read, found)
    shorter = shorter_batches(data, read.train)
    assert [row_shapes(b.inputs) for b in model.shorter] == [row_shapes(b.inputs) for b in shorter]
    assert [row_shapes(b.targets) for b in shorter] == [row_shapes(b.inputs) for b in shorter]
    assert row_shapes(model.inputs) == ((data.sizes[-1],),)
    mean = sum(b.share * row_shapes(b.inputs)[0][0] for b in model.mix(1))
    assert mean == pytest.approx(sum(size * share for size, share in shares.items()))
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.layers[0].output_bytes_per_sample == 16 * 8 * data.sizes[-1]


def test_three_sizes_stand_for_all() -> None:
    found = few_sizes({4: 0.5, 8: 0.25, 16: 0.125, 32: 0.125}, 32)
    assert found == pytest.approx({4: 0.5, 8: 0.25 + 0.125 * 2 / 3, 32: 0.125 + 0.125 / 3})
    assert few_sizes({8: 1.0}, 32) == {8: 1.0, 32: 0.0}
    assert few_sizes({32: 1.0}, 32) == {32: 1.0}


def test_rows_of_samples_that_move_each_others_positions_are_refused(tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    args: dict[str, Any] = {
        **QWEN["args"],
        "type": "phi3",
        "pad_token_id": 0,
        "rope_parameters": longrope,
        "original_max_position_embeddings": 24,
        "max_position_embeddings": 96,
    }
    del args["head_dim"]
    content = yaml.safe_load(job(Folder(tmp_path), pack=True).read_text()) | {"model": {"name": "causal_lm", "args": args}}
    content = {key: content[key] for key in ("format", "model", "data", "loss", "train")}

    def opened(**changes: Any) -> None:
        args = {**content["data"]["args"], **changes}
        open_session(Job.parse({**content, "data": {"name": "chat", "args": args}}, "the job"))

    assert "as soon as one of them has more than 24 tokens (its positions are of the type longrope)" in refusal(opened)
    opened(pack=False)
    opened(length=24, too_long="drop")
