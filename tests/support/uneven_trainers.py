"""Run under torchrun by test_examples.py: what examples/README.md says of the Hugging Face Trainer, on two ranks."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hetpipe.uneven import ShareSampler, process_group

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
common, hf_trainer = import_module("common"), import_module("hf_trainer")


def arguments(folder: str, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        folder,
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **options,
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=30,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def language_model(folder: str) -> float:
    """How far an epoch with ignored tokens ends from one device's, relative to how far that moved; without compute_loss_func."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(30, (9, 7), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -100)
    model, alone, start = llama(), llama(), flat(llama())
    hf_trainer.UnevenTrainer(
        model,
        arguments(folder, max_grad_norm=0, save_strategy="no"),
        train_dataset=[{"input_ids": i, "labels": k} for i, k in zip(ids, labels, strict=True)],
        data_collator=default_collate,
        optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
        shares=[6, 2],
    ).train()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1.0)
    for batch in ShareSampler(9, [8], rank=0):
        optimizer.zero_grad()
        alone(input_ids=ids[batch], labels=labels[batch]).loss.backward()
        optimizer.step()
    return float((flat(model) - flat(alone)).norm() / (flat(alone) - start).norm())


def classifier(folder: str, checkpoint: str | None) -> Tensor:
    """The parameters after an epoch of 26 steps, with a checkpoint at step 17; or after going on from it."""
    model = common.build_model()
    hf_trainer.UnevenTrainer(
        model,
        arguments(folder, save_strategy="steps", save_steps=17),
        train_dataset=common.text_classification(),
        data_collator=hf_trainer.collate,
        compute_loss_func=hf_trainer.loss_over_all_ranks,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None),
        shares=[6, 2],
    ).train(resume_from_checkpoint=checkpoint)
    return flat(model)


@process_group()
def main() -> None:
    away, whole = language_model(sys.argv[1]), classifier(sys.argv[1], None)
    resumed = classifier(sys.argv[1], os.path.join(sys.argv[1], "checkpoint-17"))
    print(json.dumps({"away": away, "resumed": float((whole - resumed).abs().max())}))


if __name__ == "__main__":
    main()
