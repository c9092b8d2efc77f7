"""A small Qwen3 in a folder, with a tokenizer and a template, and chats.

python bench/start/inputs.py FOLDER LAYERS CHATS
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def write(folder: Path, layers: int, chats: int) -> None:
    """Write `model/` and `chats.jsonl` there."""
    texts = [json.dumps(chat) for chat in drawn(chats)]
    (folder / "chats.jsonl").write_text("\n".join(texts) + "\n", "utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[:200], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[2], pad_token=MARKS[0])
    whole.chat_template = TEMPLATE
    whole.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=len(whole),
        max_position_embeddings=1024,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


def drawn(chats: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """A question of up to 60 words and an answer of up to 80, each."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(2000)]
    for _ in range(chats):
        question, answer = (" ".join(draw.choices(words, k=draw.randint(5, most))) for most in (60, 80))
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
