"""A folder with a small model of random values and its tokenizer, and chats in which there is something to learn."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from tests.support.chats import WORDS, chat_of, lines, tokenizer

CARDS = "3090:1GiB:2,1080ti:1GiB:4"


def small_model(folder: Path, **changes: Any) -> str:
    """A Qwen3 as save_pretrained writes it, by its path."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**(sizes | changes))).save_pretrained(folder)
    return tokenizer(folder)


def exact_model(folder: Path, kind: str = "GPT2LMHeadModel") -> str:
    """A GPT-2 as save_pretrained writes it, by its path: in float64 no part of it rounds to float32, as norms of others do."""
    import torch
    import transformers

    config: Any = transformers.GPT2Config(
        vocab_size=400, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(transformers, kind)(config).save_pretrained(folder)
    return tokenizer(folder, pad_token="<unk>")


def chats(file: Path, count: int = 200) -> str:
    """Chats of unequal lengths, whose answers are words of the question, by their path."""
    drawn, words = random.Random(0), WORDS.split()
    asked = [drawn.sample(words, drawn.randint(2, 9)) for _ in range(count)]
    return lines(file, [chat_of(f"Which is the first of: {' '.join(own)}", f"The first is {own[0]}.") for own in asked])
