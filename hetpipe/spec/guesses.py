"""Keys that people try because other trainers have them, by the section in which they try them, and what to write instead. What
stands in quotes with braces is a part of a file as it is written (`tests/test_guesses.py` reads each)."""

from __future__ import annotations

from collections.abc import Mapping

Guesses = dict[str, str]


def _all(*groups: tuple[str, str]) -> Guesses:
    """Keys that are written with spaces between, and their answer."""
    return {key: answer for keys, answer in groups for key in keys.split()}


_BATCH = (
    "write 'train: {global_batch: 64}', the samples of one optimizer step over all devices; each device's share, and its "
    "micro-batches, are what the plan decides"
)
_ACCUMULATION = (
    "nothing else accumulates: write 'train: {global_batch: 64}', the samples of one optimizer step, which the plan cuts into "
    "micro-batches whose gradients are summed"
)
_HALF = (
    "write 'train: {precision: bf16}', or fp16 (Volta, Turing), which is mixed precision with float32 parameters; "
    "'train: {precision: auto}' measures what is fastest on each type of device, and 'train: {dtype: bfloat16}' trains "
    "parameters and all else in bfloat16"
)
_STEPS, _EPOCHS = "write 'train: {steps: 50}'", "write 'train: {epochs: 3}'"
_RATE = "it is an argument of the optimizer: write 'train: {optimizer: {name: AdamW, lr: 3.0e-4, weight_decay: 0.01}}'"
_OPTIMIZER = "write 'train: {optimizer: {name: AdamW, lr: 3.0e-4}}'"
_SCHEDULE = "write 'train: {scheduler: {name: CosineAnnealingLR, T_max: 1000, warmup_steps: 100}}'"
_WARMUP = f"it is a part of the scheduler: {_SCHEDULE}"
_CLIP = "write 'train: {clip_norm: 1.0}'"
_SAVE = "write 'checkpoint: {folder: checkpoints/NAME, every_steps: 100, keep: 3}'"
_RESUME = (
    "a run goes on from the newest checkpoint by itself, unless the job says "
    "'checkpoint: {folder: checkpoints/NAME, resume: false}'"
)
_LOG = "write 'log: {folder: runs/NAME, every_steps: 10}'"
_EVALUATE = (
    "the loss of the test samples is measured when training has ended: 'train: {evaluate_samples: all}' takes all; while it goes "
    "on that is not there yet"
)
_RECOMPUTE = "the plan recomputes where memory needs it; 'plan: {allow_recompute: false}' forbids it"
_OFFLOAD = (
    "the plan offloads activations where that is faster than to recompute them, if nodes of the cluster have a host_memory; "
    "'plan: {allow_offload: false}' forbids it"
)
_DEVICES = (
    "all GPUs of this machine are used (CUDA_VISIBLE_DEVICES hides some); 'cluster: cluster.yaml' names others, and torchrun "
    "starts a job on several machines"
)
_TRACKERS = (
    "it is not there yet: 'log: {folder: runs/NAME}' gets metrics.jsonl, a line of JSON every few steps, and a report; a package "
    "of yours can bring a logger (docs/how-to/observe.md)"
)
_COMPILE = "it is not there yet; a layer may be compiled by the function that builds the model"
_ADAPTERS = "it is a section of its own: write 'adapter: {kind: lora, r: 16, alpha: 32, targets: all-linear}'"
_QUANTIZED = "write 'adapter: {kind: lora, r: 16, base: nf4}', or int8: what is held in so few bits trains adapters only"
_WEIGHTS = "it is an argument of the model: write 'model: {name: gpt2, args: {weights: path/to/folder}}'"
_SIZES = "it is an argument of the model: write 'model: {name: gpt, args: {layers: 8, width: 256}}'"
_DATA = (
    "it is an argument of the data: write 'data: {name: text, args: {context: 128}}', or for your own "
    "'data: {target: \"rows:load\"}'"
)
_WORKERS = "write 'data: {target: \"rows:load\", workers: 2}', processes of each rank that read samples ahead of the step"
_SHUFFLE = "samples are shuffled anew for each epoch, by 'train: {seed: 0}'; nothing is dropped"
_PLANNED = "the planner decides it; for a plan of your own write 'plan: {file: plan.json}'"

_SPEED = (
    "speeds are measured by 'hetpipe profile'; for a slow device to try plans with write "
    "'device_types: {slow: {memory: 2 GiB, emulate: {slowdown: 4.0}}}'"
)

_TRAINING = _all(
    ("bf16 fp16 amp mixed_precision half use_amp autocast", _HALF),
    ("grad_scaler scaler init_scale loss_scaling", "write 'train: {precision: fp16, loss_scale: {initial: 65536}}'"),
    ("gradient_accumulation_steps accumulate_grad_batches gradient_accumulation accumulation_steps grad_accum", _ACCUMULATION),
    ("batch_size train_batch_size micro_batch_size microbatch_size global_batch_size", _BATCH),
    ("per_device_train_batch_size per_gpu_batch_size train_micro_batch_size_per_gpu", _BATCH),
    ("lr learning_rate weight_decay momentum betas eps", _RATE),
    ("optim optimizer_name", _OPTIMIZER),
    ("max_steps num_steps total_steps max_iters iterations num_train_steps", _STEPS),
    ("num_epochs num_train_epochs max_epochs", _EPOCHS),
    ("eval_steps eval_every evaluate_every eval_strategy evaluation_strategy val_check_interval eval_batch_size", _EVALUATE),
    ("save_steps save_every save_strategy save_total_limit checkpoint_every checkpointing", _SAVE),
    ("resume resume_from_checkpoint resume_from", _RESUME),
    ("logging_steps log_every log_every_n_steps log_interval logging_dir", _LOG),
    ("warmup warmup_steps warmup_ratio num_warmup_steps", _WARMUP),
    ("lr_scheduler lr_scheduler_type schedule", _SCHEDULE),
    ("max_grad_norm grad_clip gradient_clip_val gradient_clipping clip_grad_norm max_norm", _CLIP),
    ("gradient_checkpointing activation_checkpointing recompute", _RECOMPUTE),
    ("offload activation_offloading cpu_offload", _OFFLOAD),
    ("gpus num_gpus n_gpus devices num_devices nodes num_nodes world_size nproc_per_node", _DEVICES),
    ("num_workers dataloader_num_workers pin_memory", _WORKERS),
    ("shuffle drop_last", _SHUFFLE),
    ("compile torch_compile", _COMPILE),
    ("output_dir", f"{_LOG}, and for checkpoints 'checkpoint: {{folder: checkpoints/NAME}}'"),
)
TRAIN: Guesses = _TRAINING | _all(
    ("gradient_sums", "sums of gradients are exact"),
    ("checkpoint log", f"it is a section of its own: {_SAVE}, and 'log: {{folder: runs/NAME}}'"),
)
JOB: Guesses = _TRAINING | _all(
    ("optimizer", _OPTIMIZER),
    ("scheduler", _SCHEDULE),
    ("steps", _STEPS),
    ("epochs", _EPOCHS),
    ("seed", "write 'train: {seed: 0}'"),
    ("global_batch", "write 'train: {global_batch: 64}'"),
    ("clip_norm", _CLIP),
    ("dtype", "write 'train: {dtype: bfloat16}'"),
    ("precision", _HALF),
    ("training trainer", "the section is called 'train'"),
    ("dataset datasets train_data", "the section is called 'data'"),
    ("checkpoints saving", _SAVE),
    ("logging logger", _LOG),
    ("wandb tensorboard mlflow report_to", _TRACKERS),
    ("lora peft adapters", _ADAPTERS),
    ("strategy accelerator distributed parallelism", _PLANNED),
    ("evaluation eval validation", _EVALUATE),
    ("exporting export_dir save_model", "write 'export: {folder: adapter}'"),
)
LOG: Guesses = _all(
    ("wandb tensorboard mlflow to report_to project", _TRACKERS),
    ("every interval steps logging_steps", _LOG),
    ("dir path output_dir", _LOG),
    ("level", "set the environment variable HETPIPE_LOG=debug for tracebacks"),
)
CHECKPOINT: Guesses = _all(
    ("every interval save_steps steps save_every", _SAVE),
    ("dir path output_dir", _SAVE),
    ("limit save_total_limit max_to_keep keep_last", _SAVE),
    ("resume_from", _RESUME),
)
EXPORT: Guesses = _all(
    ("dir path output_dir", "write 'export: {folder: adapter}'"),
    ("merge_adapter merged", "write 'export: {folder: model, merge: true}'"),
)
MODEL: Guesses = _all(
    ("lora adapter adapters peft", _ADAPTERS),
    ("load_in_4bit load_in_8bit quantization quantize", _QUANTIZED),
    ("weights pretrained from_pretrained path checkpoint", _WEIGHTS),
    ("layers width hidden_size num_layers size heads context vocab_size num_labels", _SIZES),
    ("dtype torch_dtype precision", _HALF),
)
ADAPTER: Guesses = _all(
    ("rank lora_r lora_rank dim", "it is called r: 'adapter: {r: 16}'"),
    ("lora_alpha scaling", "it is called alpha: 'adapter: {alpha: 32}'"),
    ("lora_dropout", "it is called dropout: 'adapter: {dropout: 0.05}'"),
    (
        "target_modules target_module lora_target lora_target_modules modules",
        "it is called targets: 'adapter: {targets: all-linear}', or 'adapter: {targets: [q_proj, v_proj]}'",
    ),
    (
        "adapter_name_or_path adapter_path peft_model_id pretrained path folder checkpoint resume_from",
        "write 'adapter: {weights: path/to/folder}', a folder of peft whose adapters go on",
    ),
    ("modules_to_save trainable", "write 'adapter: {train_also: [embed, head, norms]}'"),
    ("use_rslora rslora", "it is called rank_stabilized: 'adapter: {rank_stabilized: true}'"),
    ("dora", "it is called use_dora: 'adapter: {use_dora: true}'"),
    (
        "load_in_4bit load_in_8bit quantization quantize bits bnb_4bit_quant_type quant_type",
        "it is called base: 'adapter: {base: nf4}', or int8",
    ),
)
DATA: Guesses = _all(
    ("path file folder split dataset context length max_length tokenizer limit_bytes", _DATA),
    ("batch_size", _BATCH),
    ("num_workers", _WORKERS),
    ("shuffle drop_last", _SHUFFLE),
)
LOSS: Guesses = _all(
    (
        "chunked liger fused_cross_entropy linear_cross_entropy cut_cross_entropy fused_linear_cross_entropy",
        "write 'loss: {name: cross_entropy, fused: auto}', which computes the logits of a large vocabulary a chunk at a time",
    ),
    ("label_smoothing reduction", "write a loss of your own, a mean: 'loss: {target: \"losses:smooth\"}'"),
)
PLAN: Guesses = _all(
    ("stages num_stages pipeline_stages pp tp dp tensor_parallel data_parallel", _PLANNED),
    ("replicas micro_batch_size microbatches chunks balance", _PLANNED),
    ("recompute gradient_checkpointing", _RECOMPUTE),
    ("offload cpu_offload activation_offloading", _OFFLOAD),
    ("precision", "write 'train: {precision: {a100: bf16, t4: fp16}}': devices train in what is planned for them"),
    ("time_limit", "write 'plan: {time_limit_seconds: 60}'"),
    ("max_price", "write 'plan: {max_price_per_hour: 10}'"),
    ("deadline", "write 'plan: {deadline_seconds_per_step: 2.0}'"),
)
PROFILER: Guesses = _all(
    ("precisions precision", "write 'train: {precision: auto}', which is measured, too; or use 'hetpipe profile --precision'")
)
CLUSTER: Guesses = _all(
    ("gpus devices num_gpus", "write 'nodes: [{name: n0, devices: {a100: 4}}]', and what an a100 is in 'device_types'"),
    ("hosts machines", "write 'nodes: [{name: n0, host: HOST, devices: {a100: 4}}]'"),
    ("network bandwidth latency interconnect", "write 'link: {bandwidth: 3 GB/s, latency: 30 us}' for what joins nodes"),
)
NODE: Guesses = _all(
    ("gpus gpu num_gpus device", "write 'nodes: [{name: n0, devices: {a100: 4}}]'"),
    ("hostname address ip", "write 'nodes: [{name: n0, host: HOST, devices: {a100: 4}}]'"),
    ("bandwidth", "write 'nodes: [{name: n0, devices: {a100: 4}, link: {bandwidth: 12 GB/s, latency: 10 us}}]'"),
    ("memory ram host_ram", "write 'nodes: [{name: n0, devices: {a100: 4}, host_memory: 64 GiB}]', which stages may offload to"),
)
DEVICE_TYPE: Guesses = _all(
    ("vram mem memory_gb memory_bytes", "write 'device_types: {a100: {memory: 40 GiB}}'"),
    ("speed slowdown flops tflops", _SPEED),
    ("price cost", "write 'device_types: {a100: {memory: 40 GiB, price_per_hour: 4.10}}'"),
)
LINK: Guesses = _all(
    ("speed gbps bandwidth_gbps bandwidth_bytes_per_second", "write 'link: {bandwidth: 12 GB/s, latency: 10 us}'"),
    ("latency_seconds latency_us delay", "write 'link: {bandwidth: 12 GB/s, latency: 10 us}'"),
)
# Of a class of torch.optim: what it calls them
OPTIMIZER: Mapping[str, str] = {"learning_rate": "lr", "wd": "weight_decay", "beta1": "betas", "beta2": "betas", "epsilon": "eps"}
