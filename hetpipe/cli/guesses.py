"""Commands and options that people try, and what to type instead: said behind the error about the usage."""

from __future__ import annotations

from collections.abc import Sequence

_TRAIN = "hetpipe train job.yaml"
_TUNE = "hetpipe finetune MODEL chats.jsonl"
_GENERATE = "to read what a trained language model writes: hetpipe generate job.yaml 'Once upon a time'"
COMMANDS = {
    "run": f"to train a job: {_TRAIN}",
    "fit": f"to train a job: {_TRAIN}",
    "start": f"to train a job: {_TRAIN}",
    "launch": f"{_TRAIN} starts the ranks of one machine; on several start torchrun on each (hetpipe train --help)",
    "fine-tune": f"it is called {_TUNE}",
    "lora": f"to fine-tune a model of transformers: {_TUNE}",
    "sft": f"to fine-tune a model of transformers: {_TUNE}",
    "resume": f"the same command goes on from the newest checkpoint: {_TRAIN}",
    "evaluate": f"the test samples are evaluated when training has ended: {_TRAIN} --set train.evaluate_samples=all",
    "eval": f"the test samples are evaluated when training has ended: {_TRAIN} --set train.evaluate_samples=all",
    "test": f"the test samples are evaluated when training has ended: {_TRAIN} --set train.evaluate_samples=all",
    "chat": f"{_GENERATE} --chat",
    "sample": f"{_GENERATE} --temperature 0.8",
    "predict": "to predict a step of a plan: hetpipe simulate --plan plan.json --profile profile.json --cluster cluster.yaml",
    "measure": "to measure a job's model: hetpipe profile job.yaml -o profile.json",
    "benchmark": "to measure a job's model: hetpipe profile job.yaml -o profile.json",
    "bench": "to measure a job's model: hetpipe profile job.yaml -o profile.json",
    "partition": "to plan: hetpipe plan --profile profile.json --cluster cluster.yaml --global-batch 64",
    "draw": "to draw a plan: hetpipe show plan.json -o plan.svg",
    "plot": "to draw a plan: hetpipe show plan.json -o plan.svg",
    "report": "to write a report: hetpipe show plan.json --profile profile.json --cluster cluster.yaml -o report.html",
    "version": "hetpipe --version",
    "help": "hetpipe --help",
}
_OF_A_JOB = "it stands in the job, and can be changed from here: "
_DEVICES = (
    "the devices are those of the job's cluster file, or all GPUs of this machine (CUDA_VISIBLE_DEVICES hides some); several "
    "machines need torchrun on each"
)
OPTIONS: dict[str, dict[str, str]] = {
    "train": {
        "--steps": f"{_OF_A_JOB}{_TRAIN} --set train.steps=50",
        "--max-steps": f"{_OF_A_JOB}{_TRAIN} --set train.steps=50",
        "--epochs": f"{_OF_A_JOB}{_TRAIN} --set train.steps= --set train.epochs=3",
        "--lr": f"{_OF_A_JOB}{_TRAIN} --set train.optimizer.lr=3e-4",
        "--learning-rate": f"{_OF_A_JOB}{_TRAIN} --set train.optimizer.lr=3e-4",
        "--batch-size": f"{_OF_A_JOB}{_TRAIN} --set train.global_batch=64",
        "--global-batch": f"{_OF_A_JOB}{_TRAIN} --set train.global_batch=64",
        "--seed": f"{_OF_A_JOB}{_TRAIN} --set train.seed=1",
        "--cluster": f"{_OF_A_JOB}{_TRAIN} --set cluster=cluster.yaml",
        "--profile": f"{_OF_A_JOB}{_TRAIN} --set profile=profile.json",
        "--partitioner": f"{_OF_A_JOB}{_TRAIN} --set plan.partitioner=auto",
        "--output": f"{_OF_A_JOB}{_TRAIN} --set log.folder=runs/NAME",
        "-o": f"{_OF_A_JOB}{_TRAIN} --set log.folder=runs/NAME",
        "--output-dir": f"{_OF_A_JOB}{_TRAIN} --set log.folder=runs/NAME",
        "--resume": f"the same command goes on from the newest checkpoint: {_TRAIN}",
        "--config": f"the job is an argument: {_TRAIN}",
        "--job": f"the job is an argument: {_TRAIN}",
        "--bf16": f"{_OF_A_JOB}{_TRAIN} --set train.precision=bf16",
        "--fp16": f"{_OF_A_JOB}{_TRAIN} --set train.precision=fp16",
        "--precision": f"{_OF_A_JOB}{_TRAIN} --set train.precision=auto",
        "--gpus": _DEVICES,
        "--num-gpus": _DEVICES,
        "--devices": _DEVICES,
        "--nproc-per-node": _DEVICES,
    },
    "plan": {
        "--job": "a plan is made of a profile: hetpipe profile job.yaml -o profile.json measures the job's model",
        "--batch-size": "it is the samples of a whole step: --global-batch 64",
        "--gpus": "which devices there are stands in a file: --cluster cluster.yaml",
        "--model": "what a model takes stands in a profile: hetpipe profile job.yaml -o profile.json",
    },
    "profile": {
        "--cluster": "it stands in the job, and can be changed from here: hetpipe profile job.yaml --set cluster=cluster.yaml",
        "--model": "it stands in the job, and can be changed from here: hetpipe profile job.yaml --set model.name=gpt",
        "--job": "the job is an argument: hetpipe profile job.yaml -o profile.json",
    },
    "finetune": {
        "--model": f"model and data are arguments: {_TUNE}",
        "--data": f"model and data are arguments: {_TUNE}",
        "--dataset": f"model and data are arguments: {_TUNE}",
        "--batch-size": "it is the samples of a whole step: --global-batch 32",
        "--steps": "in the place of --epochs: --set train.steps=50",
        "--max-steps": "in the place of --epochs: --set train.steps=50",
        "--learning-rate": "it is called --lr",
        "--max-length": "it is called --length",
        "--max-seq-length": "it is called --length",
        "--output-dir": "it is called --output",
        "--out": "it is called --output",
        "--full": "it is called --lora none",
        "--qlora": "it is called --base nf4",
        "--load-in-4bit": "it is called --base nf4",
        "--rank": "it is a part of --lora r=16",
        "--lora-r": "it is a part of --lora r=16",
        "--lora-alpha": "it is a part of --lora r=16,alpha=32",
        "--targets": "it stands in the job: --set adapter.targets=[q_proj,v_proj]",
        "--seed": "it stands in the job: --set train.seed=1",
        "--gpus": "by default all GPUs of this machine are used; a file says which others: --cluster cluster.yaml",
        "--plan-only": "it is called --dry-run",
        "--resume": "the same command goes on from the newest checkpoint",
    },
    "generate": {
        "--max-new-tokens": "it is called --tokens",
        "--max-tokens": "it is called --tokens",
        "--prompt": "the prompt is an argument: hetpipe generate job.yaml 'Once upon a time'",
        "--checkpoint": "it is an argument, in the place of the job: hetpipe generate checkpoints/NAME 'Once upon a time'",
    },
    "show": {"--plan": "the plan is an argument: hetpipe show plan.json"},
    "what-if": {
        "--model": "the model is an argument: hetpipe what-if llama-tiny --gpus 3090,1080ti",
        "--batch-size": "it is the samples of a whole step: --global-batch 64",
        "--cluster": "cards are named: --gpus 3090,1080ti",
    },
}
# Of commands that take no argument of this kind
ARGUMENTS = {
    "plan": "hetpipe plan takes no job: hetpipe profile job.yaml -o profile.json measures its model, and hetpipe plan --profile "
    "profile.json --cluster cluster.yaml --global-batch 64 plans; hetpipe train job.yaml does both",
    "simulate": "hetpipe simulate --plan plan.json --profile profile.json --cluster cluster.yaml",
    "what-if": "cards are named by options: hetpipe what-if llama-tiny --gpus 3090,1080ti --add 5060ti",
}


def instead(words: Sequence[str]) -> str:
    """What to type instead of this command line, which was refused; empty where nobody knows."""
    if not words:
        return ""
    command, rest = words[0], [word.partition("=")[0] for word in words[1:]]
    known = OPTIONS.get(command, {})
    tried = [known[word] for word in rest if word in known]
    if tried:
        return "; ".join(dict.fromkeys(tried))
    alone = len(rest) > (command == "what-if") and not rest[0].startswith("-")
    return COMMANDS.get(command) or (ARGUMENTS.get(command, "") if alone else "")
