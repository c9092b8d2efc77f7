"""A configuration of axolotl (`axolotl train config.yml`) as a job."""

from __future__ import annotations

from typing import Any

from hetpipe.exchange.configs.adapter import put_adapter, targets_of
from hetpipe.exchange.configs.datasets import sets_of
from hetpipe.exchange.configs.found import Asked, refuse
from hetpipe.exchange.configs.given import Given
from hetpipe.exchange.configs.logs import put_checkpoints, put_curves, put_evaluation, put_folders, steps_or_epoch
from hetpipe.exchange.configs.records import SPREAD, count, instead, joined, of_pairs, of_texts
from hetpipe.exchange.configs.schedule import Run, global_batch, length, put_optimizer, put_precision, put_schedule
from hetpipe.files.messages import InputError

TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "refuse"}
SPLIT = ("sequence_parallel_degree", "context_parallel_size", "tensor_parallel_size")  # devices that share a sample
NOTES = {  # what differs of the losses that hetpipe has
    "dpo": "the reference is the model as the run begins",
    "simpo": "without the likelihood of the better answer, which trl adds unless cpo_alpha is 0",
    "orpo": "the likelihood is the mean over an answer's tokens (theirs: over those of all answers and questions of a batch)",
}
LATEST_WARMUP = 100  # steps, of a warm-up that is not said
CURVES = {
    "wandb": {"project": "wandb_project", "entity": "wandb_entity", "name": "wandb_name"},
    "mlflow": {"tracking_uri": "mlflow_tracking_uri", "experiment": "mlflow_experiment_name"},
    "tensorboard": {},
}


def convert_axolotl(given: Given, asked: Asked) -> None:
    """Write the job of a configuration."""
    loss = _loss(given)
    prefers = loss["name"] != "cross_entropy"
    model = given.required("base_model", "the model")
    if given.said("adapter") and given.text("adapter") not in ("lora", "qlora"):
        raise given.fault(
            "adapter", "hetpipe trains adapters of the kinds lora and qlora, or all parameters. Write one, or leave it out"
        )
    lora = given.said("adapter")
    given.job["model"] = {"name": "causal_lm", "args": {"weights": model}}
    if lora:
        _put_adapter(given)
        _fit_adapter(given, loss["name"])
    evaluated = _put_data(given, asked, model, prefers=prefers)
    given.job["loss"] = loss
    if asked.cluster is not None:
        given.job["cluster"] = asked.cluster
    batch = global_batch(given, asked, _parts(given), _split(given))
    run = length(given, asked, batch, count(given.job["data"]))
    if not given.said("learning_rate"):
        raise InputError(f"{given.source}: learning_rate is missing, and axolotl has no default. Write it")
    put_optimizer(given, whole=not lora)
    put_schedule(given, run, _warmup(given, run))
    put_precision(given, half=_half(given), lora=lora)
    _put_rest(given, run, evaluated, lora=lora)


def _loss(given: Given) -> dict[str, Any]:
    """The section `loss`. InputError for a kind of training that hetpipe does not have."""
    if given.said("process_reward_model") and given.flag("process_reward_model"):
        raise refuse(given, "process_reward_model", "the training of a reward model of single steps")
    if given.said("reward_model") and given.flag("reward_model"):
        return {"name": "reward"}
    if not given.said("rl"):
        return {"name": "cross_entropy", "weight": "tokens", "fused": "auto"}
    name = str(given.text("rl"))
    if name not in NOTES:
        raise refuse(given, "rl", "training on a reward, or on preferences in another way")
    given.notes["rl"] = NOTES[name]
    own, key = given.keys.get("trl"), "rl_beta" if given.said("rl_beta") else "orpo_alpha"
    if isinstance(own, dict) and own:
        given.lost["trl"] = "of its keys none is taken over. Write rl_beta for its beta"
    beta = given.number(key) if given.said(key) else 0.1
    return {"name": name, "beta": beta, **({"gamma": given.number("simpo_gamma")} if name == "simpo" else {})}


def _fit_adapter(given: Given, loss: str) -> None:
    """What a loss over preferences needs of adapters: trl turns dropout off, and a reward model learns its head."""
    adapter = given.job["adapter"]
    if loss != "cross_entropy":
        adapter["dropout"] = 0.0
        given.notes["lora_dropout"] = "off, as in trl's training on preferences"
    if loss == "reward" and "weights" not in adapter:
        adapter["train_also"] = [*(part for part in adapter.get("train_also", ()) if part != "head"), "head"]


def _put_adapter(given: Given) -> None:
    """The section `adapter`."""
    resumes = given.said("lora_model_dir")
    if not resumes and not (given.said("lora_r") and given.said("lora_alpha")):
        raise InputError(f"{given.source}: adapter is {given.keys['adapter']}, but lora_r or lora_alpha is missing. Write both")
    key = "lora_target_linear" if given.said("lora_target_linear") and given.flag("lora_target_linear") else "lora_target_modules"
    names = ["all-linear"] if key == "lora_target_linear" or resumes else given.names(key)
    keys: dict[str, Any] = {
        "r": given.positive("lora_r"),
        "alpha": given.number("lora_alpha"),
        "dropout": given.number("lora_dropout"),
        "targets": targets_of(given, key, names, ("all-linear",)),
        "base": "nf4" if given.flag("load_in_4bit") else "int8" if given.flag("load_in_8bit") else None,
    }
    keys |= {
        ours: True for key, ours in (("peft_use_rslora", "rank_stabilized"), ("peft_use_dora", "use_dora")) if given.flag(key)
    }
    put_adapter(given, keys, "lora_model_dir", "lora_modules_to_save")


def _put_data(given: Given, asked: Asked, model: str, *, prefers: bool) -> dict[str, Any] | None:
    """The section `data`. Return the arguments of the data of `test_datasets`, if there are any."""
    base = _sample_args(given, model)
    if asked.data is not None:
        for key in ("datasets", "test_datasets"):
            given.overrule(key, "--data")
        given.job["data"] = instead(asked.data, base)
        return None
    if not given.said("datasets"):
        named = "or name the data: --data '{name: chat, args: {file: chats.jsonl}}'"
        raise given.fault("datasets", f"Write the data sets (texts: of the type completion), {named}")
    name, args = joined(sets_of(given, "datasets", prefers=prefers), given.source)
    if prefers:
        base = of_pairs(base)
    if name == "text":
        given.also["sequence_len"] = "data.args.context"
        given.job["data"] = {"name": name, "args": {**args, **of_texts(base)}}
        return None
    given.job["data"] = {"name": name, "args": {**args, **base}}
    if not given.said("test_datasets"):
        return None
    _, other = joined(sets_of(given, "test_datasets", prefers=prefers), given.source)
    return {"args": {key: value for key, value in other.items() if args.get(key) != value}}


def _sample_args(given: Given, model: str) -> dict[str, Any]:
    """Arguments of the data that say what becomes of a record."""
    held = given.number("val_set_size") or 0.0
    if held >= 1:
        given.lost["val_set_size"] = "it counts samples, data.args.test_fraction is a part of them. Write it, or evaluate.data"
        held = 0.0
    elif held > 0:
        given.notes["val_set_size"] = SPREAD
    pack = given.flag("sample_packing")
    given.notes["eval_sample_packing"] = "evaluation packs as training does (the loss is the same, a mean over tokens)"
    found: dict[str, Any] = {
        "tokenizer": given.text("tokenizer_config") or model,
        "length": given.positive("sequence_len"),
        "pack": pack,
        "too_long": TOO_LONG[given.one_of("excess_length_strategy", [*TOO_LONG])],
        "test_fraction": held,
    }
    text = given.text("chat_template_jinja")
    if text is not None and "{" in text:
        given.lost["chat_template_jinja"] = "write the template into a file, and name it as data.args.template"
    elif text is not None:
        found["template"] = text
    return found


def _parts(given: Given) -> dict[str, int]:
    """What a device takes in a step: micro_batch_size × gradient_accumulation_steps, or batch_size."""
    if given.said("batch_size") and not given.said("gradient_accumulation_steps"):
        for key in ("micro_batch_size", "gradient_accumulation_steps"):
            given.overrule(key, "batch_size")
        return {"batch_size": given.positive("batch_size") or 1}
    return {key: given.positive(key) or 1 for key in ("micro_batch_size", "gradient_accumulation_steps")}


def _split(given: Given) -> int:
    found = 1
    for key in SPLIT:
        found *= (given.positive(key) if given.said(key) else 1) or 1
    return found


def _warmup(given: Given, run: Run) -> int | None:
    """Steps of the warm-up: as said; else 3 % of the run, and no more than 100. One step becomes two there."""
    if given.said("warmup_steps"):
        steps = given.number("warmup_steps") or 0.0
        found = int(steps) if steps >= 1 or steps == 0 else None if run.steps is None else int(steps * run.steps)
    elif run.steps is None:
        return None
    elif given.said("warmup_ratio"):
        found = int((given.number("warmup_ratio") or 0.0) * run.steps)
    else:
        found = min(int(0.03 * run.steps), LATEST_WARMUP)
    return 2 if found == 1 else found


def _half(given: Given) -> str | None:
    """What products are computed in: bf16: auto is what each card has."""
    by = next((key for key in ("fp16", "float16", "bfloat16") if given.said(key) and given.flag(key)), None)
    if by is not None:
        given.overrule("bf16", by)
        return "bf16" if by == "bfloat16" else "fp16"
    word = str(given.value("bf16")).lower()
    if word == "auto":
        given.notes["bf16"] = "on each type of device the fastest that is safe (bf16, fp16 or float32)"
        return "auto"
    on = word in ("full", "true") or given.flag("bf16")
    if on:
        given.notes["bf16"] = "parameters that train are held in float32 (theirs in bf16)"
    return "bf16" if on else None


def _put_rest(given: Given, run: Run, evaluated: dict[str, Any] | None, *, lora: bool) -> None:
    """Evaluations, checkpoints, curves and folders."""
    put_folders(given, str(given.text("output_dir")), lora=lora)
    lines = given.positive("logging_steps") if given.said("logging_steps") else None
    given.put("log.every_steps", lines or max(min(int(0.005 * (run.steps or 0)), 10), 1))
    held = evaluated is not None or given.job["data"]["args"].get("test_fraction")
    put_evaluation(given, run, *_how_often(given, "eval", held=bool(held)), evaluated)
    put_checkpoints(given, run, *_how_often(given, "save", held=True))
    tools = {}
    for tool, names in CURVES.items():
        args = {ours: given.text(key) for ours, key in names.items() if given.said(key)}
        if args or (given.said(f"use_{tool}") and given.flag(f"use_{tool}")):
            tools[tool] = args
    put_curves(given, tools)


def _how_often(given: Given, what: str, *, held: bool) -> tuple[str, int | None]:
    """The strategy of evaluations (eval) or checkpoints (save), and how many there are in an epoch, if that is said."""
    steps, often, key = f"{what}_steps", f"{what}s_per_epoch", f"{what}_strategy"
    if what == "eval" and not given.said(key):
        key = "evaluation_strategy"
    if not held:
        return "no", None
    for said in (steps, often):
        if given.said(said):
            given.overrule(key, said)
            return ("steps", None) if said == steps else ("epoch", given.positive(often))
    return steps_or_epoch(given, key, str(given.text(key) or "epoch")), None
