"""huggingface_hub's cache, built by hand as it lies on disk; and small folders of language models with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import transformers  # isort: skip

FIRST, SECOND = "1" * 40, "2" * 40  # hashes of commits
TEXT_WORDS = 256  # as many as there are bytes, which the data `text` gives
QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": TEXT_WORDS,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def cache_here(folder: Path, monkeypatch: pytest.MonkeyPatch, *, offline: bool = True) -> Path:
    """An empty cache for this process and those that it starts, and no network."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    return folder


def put(cache: Path, name: str, commit: str, source: Path, ref: str = "main") -> None:
    """The files of a folder as a commit of a model, which `ref` is then at."""
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        blob = root / "blobs" / f"{commit}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))


def qwen(folder: Path, seed: int = 3, **config: Any) -> Path:
    """A small Qwen 3, as `save_pretrained` writes it."""
    torch.manual_seed(seed)
    settings = transformers.Qwen3Config(**{**QWEN, **config})
    transformers.Qwen3ForCausalLM(settings).save_pretrained(folder)
    return folder


def tokenizer(folder: Path, words: int = TEXT_WORDS) -> Path:
    """A tokenizer beside it: `w3 w5` are 3 and 5."""
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0")
    made.chat_template = "{% for message in messages %}w1 {{ message.content }} {% endfor %}w2"
    made.save_pretrained(folder)
    return folder
