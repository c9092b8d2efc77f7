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


def chats(file: Path, count: int = 200) -> str:
    """Chats of unequal lengths, whose answers are words of the question, by their path."""
    drawn, words = random.Random(0), WORDS.split()
    asked = [drawn.sample(words, drawn.randint(2, 9)) for _ in range(count)]
    return lines(file, [chat_of(f"Which is the first of: {' '.join(own)}", f"The first is {own[0]}.") for own in asked])
