"""Transformers and peft do the same by hand, on one device, until the end of the first step.

python bench/start/plain.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH, LENGTH = 8, 425


def main(folder: Path) -> None:
    """Read, tokenize, load, train a step."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = list[list[int]]()
    for line in (folder / "chats.jsonl").open(encoding="utf-8"):
        made: Any = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True, return_dict=True)
        rows.append(made["input_ids"])
    every = [token for row in rows for token in row]  # packed
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    tokens = torch.tensor(every[: BATCH * LENGTH]).reshape(BATCH, LENGTH)
    for part in tokens.split(2):
        (model(input_ids=part, labels=part).loss * len(part) / BATCH).backward()
    optimizer.step()
    print(json.dumps({}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
