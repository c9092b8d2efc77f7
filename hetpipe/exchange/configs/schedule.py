"""The steps of a run, its optimizer and the schedule of its rate, as the Trainer of transformers has them, on which both trainers
stand."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import Any, NamedTuple

from hetpipe.exchange.configs.found import Asked
from hetpipe.exchange.configs.given import Given
from hetpipe.files.messages import InputError

EXACT = "the same"
STATE = "its state is held in float32 here, which takes more memory (the plan counts it)"
# Their optimizer → torch's class, and what is different
OPTIMIZERS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("AdamW", EXACT)),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw"), ("AdamW", STATE)),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit", "ao_adamw_8bit", "ao_adamw_4bit"), ("AdamW", STATE)),
    "sgd": ("SGD", EXACT),
    "adagrad": ("Adagrad", EXACT),
    "rmsprop": ("RMSprop", EXACT),
}
BETAS = (0.9, 0.999)
RISE = "begins at 1/n of the rate (theirs: at 0) and rises in equal parts to the whole"


class Run(NamedTuple):
    """The length of a run in `steps`, of which an epoch has so many (None: not known)."""

    steps: int | None
    steps_per_epoch: int | None


def global_batch(given: Given, asked: Asked, parts: Mapping[str, int], split: int = 1) -> int:
    """The samples of a step: all `parts` (key → value) times the number of devices, `split` of which share a sample."""
    said = " × ".join(f"{key} ({value})" for key, value in parts.items())
    if asked.devices is None:
        raise InputError(
            f"--devices is missing: on how many GPUs, over all machines, did {given.source} run? A step had {said} × that number "
            "of samples. The launcher's --nproc-per-node times its --nnodes says it, or CUDA_VISIBLE_DEVICES, or nvidia-smi -L; "
            "the log says the product itself, as 'Total train batch size'"
        )
    if asked.devices % split:
        raise InputError(
            f"--devices is {asked.devices}, but {given.source} lets {split} devices share each sample. Give a multiple of it"
        )
    for key in parts:
        given.notes[key] = f"{said} × {asked.devices // split} (--devices {asked.devices}); each device's share is the plan's"
    found = prod(parts.values()) * (asked.devices // split)
    given.put("train.global_batch", found)
    return found


def length(given: Given, asked: Asked, batch: int, records: int | None) -> Run:
    """Write `train.steps`, or `train.epochs`. `records`: that train in an epoch, if that is known."""
    key = given.table.epochs
    epochs, most = given.number(key) or 1.0, given.count("max_steps") or 0
    each = None if records is None else max(1, ceil(records / batch))
    steps = most if most > 0 else asked.steps
    if steps is not None:
        given.put("train.steps", steps)
        if asked.steps not in (None, steps):
            given.notes["max_steps"] = f"it says the length, not --steps {asked.steps}"
        if most > 0:
            given.overrule(key, "max_steps")
        else:
            given.notes[key] = f"--steps says the length: their {epochs:g} epochs are {steps} steps (train.steps)"
        return Run(steps, each or (None if most > 0 else max(1, round(steps / epochs))))
    if epochs == int(epochs) and epochs > 0:
        given.put("train.epochs", int(epochs))
        return Run(None if each is None else each * int(epochs), each)
    if each is None or not 0 < epochs < float("inf"):
        raise given.fault(key, f"A job has whole epochs, or steps. {how_many(given)}")
    given.put("train.steps", ceil(epochs * each))
    given.notes[key] = f"train.steps: {ceil(epochs * each)}, for {records} records"
    return Run(ceil(epochs * each), each)


def how_many(given: Given) -> str:
    """How to find the number of steps: in the log of a run, or by the command that reads the data."""
    data, train = given.job["data"].get("args", {}), given.job["train"]
    files = data.get("file", data.get("files", "FILES"))
    files = files if isinstance(files, str) else " ".join(map(str, files))
    length = data.get("length", data.get("context", "LENGTH"))
    epochs = given.number(given.table.epochs) or 1.0
    options = (
        f"--length {length} --global-batch {train['global_batch']} --epochs {int(epochs) if epochs == int(epochs) else 1} "
        f"--set data.args.test_fraction={data.get('test_fraction', 0)} --dry-run"
    )
    return (
        "Give --steps N, the number that their log says as 'Total optimization steps'. Without a log, rows and steps are in the "
        f"table that this prints: hetpipe finetune {given.job['model']['args']['weights']} {files} {options}. Or leave out "
        "packing: samples of chats in files are counted here"
    )


def put_optimizer(given: Given, *, whole: bool) -> None:
    """Write the optimizer. `whole`: all parameters train, so that norms and biases do, too."""
    key = given.table.optimizer
    name = str(given.text(key)).lower()
    found, note = OPTIMIZERS.get(name, ("AdamW", ""))
    given.put("train.optimizer.name", found)
    if name in OPTIMIZERS:
        given.notes[key] = note
    else:
        given.lost[key] = (
            "no such optimizer here, so the job has AdamW with the same rate. Choose one of torch.optim, and its rate"
        )
    given.put_plain(("train",))
    if found == "AdamW":
        betas = [given.number("adam_beta1"), given.number("adam_beta2")]
        if betas != [None, None]:
            given.put("train.optimizer.betas", [own if own is not None else b for own, b in zip(betas, BETAS, strict=True)])
        if (eps := given.number("adam_epsilon")) is not None:
            given.put("train.optimizer.eps", eps)
    if whole and (given.number("weight_decay") or 0) > 0:
        given.notes["weight_decay"] = "all parameters decay; theirs leaves out biases and norms"
    clip = given.number("max_grad_norm")
    clip = 1.0 if clip is None else clip
    if clip > 0:
        given.put("train.clip_norm", clip)
    else:
        given.notes["max_grad_norm"] = "gradients are not clipped"


def put_schedule(given: Given, run: Run, warmup: int | None) -> None:
    """Write the schedule of the rate, behind its warm-up (None: a part of steps that are not known)."""
    key = given.table.scheduler
    name, options = str(given.text(key)), _options(given)
    known = name in ("linear", "cosine", "polynomial", "constant", "constant_with_warmup", "cosine_with_min_lr")
    known = known or (name == "cosine_with_restarts" and options.get("num_cycles", 1) == 1)
    if not known:
        given.lost[key] = (
            "no such schedule here, so the rate stays what it is after the warm-up. Write train.scheduler as you like"
        )
    goes_down = known and not name.startswith("constant")
    if run.steps is None and (goes_down or warmup is None):
        raise InputError(
            f"{given.source}: {key} is {name}, which needs the number of steps, and that is not known before the data are read "
            f"(they are packed into rows, plain text, or not on this machine). {how_many(given)}"
        )
    if name == "constant":
        given.notes[key] = "one rate, without a schedule"
        return
    rise = {"warmup_steps": warmup} if warmup else {}
    if rise:
        for each in ("warmup_steps", "warmup_ratio"):
            given.notes[each] = f"n is {warmup} steps; it {RISE}"
    if not goes_down:
        if rise:
            given.put("train.scheduler", {"name": "LinearLR", **rise})
        return
    assert run.steps is not None
    left = max(1, run.steps - (warmup or 0))
    given.put("train.scheduler", {**_shape(given, name, options, left), **rise})
    given.notes.setdefault(
        key, f"to its end in {run.steps} steps" + (" (counted in the files)" if "steps" not in given.job["train"] else "")
    )


def _shape(given: Given, name: str, options: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A schedule of torch that goes down over so many steps."""
    rate = given.number("learning_rate") or 0.0
    if name in ("linear", "polynomial"):
        power = options.get("power", 1.0) if name == "polynomial" else 1.0
        return {"name": "PolynomialLR", "total_iters": steps, "power": power}
    least = options.get("min_lr", options.get("min_lr_rate", 0.0) * rate) if name == "cosine_with_min_lr" else 0.0
    if "cosine_min_lr_ratio" in given.table.taken and (ratio := given.number("cosine_min_lr_ratio")) is not None:
        least = ratio * rate
    return {"name": "CosineAnnealingLR", "T_max": steps, **({"eta_min": float(f"{least:.12g}")} if least else {})}


def _options(given: Given) -> dict[str, Any]:
    """lr_scheduler_kwargs, whose values are numbers."""
    found = given.value("lr_scheduler_kwargs") or {}
    if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
        raise given.fault("lr_scheduler_kwargs", "Write a mapping of numbers, such as {min_lr: 1.0e-6}")
    return found


def put_precision(given: Given, *, half: str | None, lora: bool) -> None:
    """Write what products are computed in (None: float32), and how a model beside adapters is held."""
    if half is not None:
        given.put("train.precision", half)
    if "tf32" in given.table.taken and given.said("tf32") and given.flag("tf32"):
        given.put("train.arithmetic.tf32", True)
    if lora and half is not None and "base" not in given.job["adapter"]:
        given.put("adapter.base", "fp16" if half == "fp16" else "bf16")
        given.also.update(dict.fromkeys(("bf16", "fp16", "pure_bf16", "bfloat16", "float16"), "adapter.base"))
