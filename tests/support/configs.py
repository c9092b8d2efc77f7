"""Configurations of LLaMA-Factory and axolotl, one for each method that they share, and the jobs that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetpipe.documents.job import Job
from hetpipe.exchange.configs import Asked, Converted, convert
from hetpipe.files.messages import InputError
from tests.support.chats import lines
from tests.support.commands import Command
from tests.support.finetuning import chats, small_model

LORA = """
model_name_or_path: tiny
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
dataset: talks
template: qwen3_nothink
cutoff_len: 64
preprocessing_num_workers: 4
output_dir: saves/lora
logging_steps: 1
save_steps: 20
plot_loss: true
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1e-3
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 1000000
resume_from_checkpoint: null
"""
QLORA = """
model_name_or_path: org/model
quantization_bit: 4
quantization_method: bnb
double_quantization: false
stage: sft
finetuning_type: lora
lora_target: all
additional_target: embed_tokens,lm_head
use_rslora: true
dataset: talks,asks
template: llama3
neat_packing: true
mask_history: true
val_size: 0.1
eval_strategy: steps
eval_steps: 50
report_to: [wandb, swanlab]
run_name: mine
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
max_steps: 400
lr_scheduler_type: constant_with_warmup
warmup_steps: 20
fp16: true
output_dir: saves/qlora
"""
FULL = """
model_name_or_path: org/model
stage: sft
finetuning_type: full
deepspeed: ds_z3.json
gradient_checkpointing: true
flash_attn: fa2
dataset: asks
template: qwen
max_samples: 3
output_dir: saves/full
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
weight_decay: 0.03
adam_beta2: 0.95
max_grad_norm: 1.0e-3
optim: adamw_torch_fused
bf16: true
save_strategy: epoch
save_total_limit: 2
"""
AXOLOTL_LORA = """
base_model: tiny
load_in_8bit: false
strict: false
datasets:
  - path: asks.jsonl
    ds_type: json
    type: alpaca
dataset_prepared_path: prepared
val_set_size: 0.1
output_dir: ./outputs/lora
adapter: lora
lora_model_dir:
sequence_len: 64
sample_packing: false
pad_to_sequence_len: true
lora_r: 4
lora_alpha: 8
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
wandb_project:
gradient_accumulation_steps: 1
micro_batch_size: 4
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-3
train_on_inputs: false
bf16: false
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_steps: 1
evals_per_epoch: 2
saves_per_epoch: 1
weight_decay: 0.0
special_tokens: {pad_token: <pad>}
"""
AXOLOTL_QLORA = """
base_model: org/model
model_type: AutoModelForCausalLM
load_in_4bit: true
chat_template: llama3
eot_tokens: [<end>]
datasets:
  - path: org/chats
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {user: [customer, human], assistant: [gpt]}
    roles_to_train: [assistant]
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 1
max_steps: 90
optimizer: paged_adamw_32bit
learning_rate: 0.0002
bf16: auto
wandb_project: mine
use_tensorboard: true
"""
AXOLOTL_FULL = """
base_model: org/model
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
datasets:
  - {path: org/texts, type: chat_template}
test_datasets:
  - {path: org/texts, type: chat_template, split: test}
sequence_len: 4096
batch_size: 8
micro_batch_size: 2
num_epochs: 2
cosine_min_lr_ratio: 0.1
learning_rate: 2e-5
weight_decay: 0.1
bf16: true
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true}
context_parallel_size: 2
eval_steps: 0.25
save_steps: 100
"""
CONFIGS = {"llamafactory": (LORA, QLORA, FULL), "axolotl": (AXOLOTL_LORA, AXOLOTL_QLORA, AXOLOTL_FULL)}
INFO: dict[str, dict[str, Any]] = {
    "talks": {
        "file_name": "talks.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "asks": {"file_name": "asks.jsonl", "columns": {"prompt": "ask", "response": "reply", "system": "rules"}},
    "better": {"file_name": "better.json", "ranking": True},
    "seen": {"file_name": "seen.json", "columns": {"messages": "messages", "images": "images"}},
}


def made(trainer: str, text: str, devices: int | None = 2, **asked: Any) -> Converted:
    Path("config.yaml").write_text(text)
    return convert(trainer, Path("config.yaml"), Asked(devices, **asked))


def changed(text: str, **keys: Any) -> str:
    return yaml.safe_dump({**yaml.safe_load(text), **keys})


def refused(trainer: str, text: str, **asked: Any) -> str:
    with pytest.raises(InputError) as caught:
        made(trainer, text, **asked)
    return str(caught.value)


def keys(found: Converted, name: str) -> list[str]:
    return [line.key for line in getattr(found, name)]


def note(found: Converted, key: str) -> str:
    return next(line.note for lines in found.lists.values() for line in lines if line.key == key)


def data_home(folder: Path) -> Path:
    """Write the data that the configurations name into a folder."""
    (folder / "data").mkdir()
    (folder / "data/dataset_info.json").write_text(json.dumps(INFO))
    chats(folder / "data/talks.jsonl", 24)
    lines(folder / "data/asks.jsonl", [{"ask": f"{i}?", "reply": f"{i}."} for i in range(7)])
    for name in ("asks.jsonl", "held.jsonl"):
        lines(folder / name, [{"instruction": f"Say {i}", "input": "", "output": f"{i}."} for i in range(20)])
    return folder


def trained_steps(run: Command, trainer: str, text: str, **model: Any) -> int:
    """Convert a configuration in the current folder, and train the job to its adapter. Returns how many steps it took."""
    small_model(Path("tiny"), **model)
    Path("run.yaml").write_text(text)
    assert run("convert", trainer, "run.yaml", "--devices", "2").code == 0
    ended = run("train", "job.yaml", "--json")
    assert ended.code == 0, ended.err
    job = Job.read("job.yaml")
    assert job.export is not None
    assert (Path(job.export.folder) / "adapter_model.safetensors").is_file()
    return int(json.loads(ended.out)["steps"])
