"""A configuration of LLaMA-Factory (`llamafactory-cli train config.yaml`) as a job."""

from __future__ import annotations

from math import ceil
from typing import Any

from hetpipe.exchange.configs.adapter import put_adapter, targets_of
from hetpipe.exchange.configs.dataset_info import sets_of
from hetpipe.exchange.configs.found import Asked, refuse
from hetpipe.exchange.configs.given import Given
from hetpipe.exchange.configs.logs import known_tools, put_checkpoints, put_curves, put_evaluation, put_folders, steps_or_epoch
from hetpipe.exchange.configs.records import SPREAD, count, instead, joined, of_pairs, of_texts
from hetpipe.exchange.configs.schedule import Run, global_batch, length, put_optimizer, put_precision, put_schedule
from hetpipe.files.messages import nearest

REFUSED = {"ppo": "training on a reward (PPO)", "kto": "preference training (KTO)"}
STAGES = ("sft", "pt", "dpo", "rm")
PREFERRED = {"sigmoid": "dpo", "simpo": "simpo", "orpo": "orpo"}  # their name of a loss → ours
BITS = {4: "nf4", 8: "int8"}


def convert_llamafactory(given: Given, asked: Asked) -> None:
    """Write the job of a configuration."""
    stage = str(given.text("stage"))
    if stage in REFUSED:
        raise refuse(given, "stage", REFUSED[stage])
    if stage not in STAGES:
        raise given.fault("stage", f"It is not known{nearest(stage, [*STAGES, *REFUSED])}")
    if given.said("do_train") and not given.flag("do_train"):
        raise given.fault("do_train", "This configuration does not train. To read what a model writes, use hetpipe generate")
    kind = str(given.text("finetuning_type"))
    if kind not in ("lora", "full"):
        raise given.fault("finetuning_type", "hetpipe trains adapters (lora) or all parameters (full). Write one of the two")
    lora = kind == "lora"
    model = given.required("model_name_or_path", "the model")
    given.job["model"] = {"name": "causal_lm", "args": {"weights": model}}
    if lora:
        _put_adapter(given)
    evaluated = _put_data(given, asked, model, stage)
    given.job["loss"] = _loss(given, stage)
    if asked.cluster is not None:
        given.job["cluster"] = asked.cluster
    parts = {key: given.positive(key) or 1 for key in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    run = length(given, asked, global_batch(given, asked, parts), count(given.job["data"]))
    put_optimizer(given, whole=not lora)
    put_schedule(given, run, _warmup(given, run))
    half = "fp16" if given.flag("fp16") else "bf16" if given.flag("bf16") or (lora and given.flag("pure_bf16")) else None
    if given.flag("pure_bf16") and not lora:
        given.put("train.dtype", "bfloat16")
    put_precision(given, half=half, lora=lora)
    if by := next((key for key in ("fp16", "pure_bf16") if given.flag(key)), None):
        given.overrule("bf16", by)
    if half is None and not given.flag("pure_bf16"):
        given.notes["bf16"] = "products are computed in float32. For half precision write train.precision: bf16 (or auto)"
    _put_rest(given, run, evaluated, lora=lora)


def _put_adapter(given: Given) -> None:
    """The section `adapter`."""
    rank, alpha = given.positive("lora_rank") or 8, given.number("lora_alpha") if given.said("lora_alpha") else None
    bits = given.count("quantization_bit")
    if bits not in (None, *BITS):
        raise given.fault("quantization_bit", "hetpipe holds a base in 4 bits (nf4) or 8 (int8). Write 4 or 8")
    keys: dict[str, Any] = {
        "r": rank,
        "alpha": alpha or 2 * rank,
        "dropout": given.number("lora_dropout"),
        "targets": targets_of(given, "lora_target", given.names("lora_target"), ("all", "all-linear")),
        "base": BITS.get(bits or 0),
    }
    keys |= {ours: True for key, ours in (("use_rslora", "rank_stabilized"), ("use_dora", "use_dora")) if given.flag(key)}
    if len(given.names("adapter_name_or_path")) > 1:
        raise given.fault("adapter_name_or_path", "hetpipe goes on from one adapter. Merge the others into the model first")
    put_adapter(given, keys, "adapter_name_or_path", "additional_target")


def _loss(given: Given, stage: str) -> dict[str, Any]:
    """The section `loss`; what it needs of adapters is written, too."""
    adapter = given.job.get("adapter", {})
    if stage == "rm":
        given.notes["stage"] = (
            "a linear layer gives the score, as in transformers' classifiers (theirs has a bias, which no lead has)"
        )
        if "kind" in adapter and "weights" not in adapter:
            adapter["train_also"] = [*(part for part in adapter.get("train_also", ()) if part != "head"), "head"]
        return {"name": "reward"}
    if stage != "dpo":
        return {"name": "cross_entropy", "weight": "tokens", "fused": "auto"}
    name = given.text("pref_loss") or "sigmoid"
    if name not in PREFERRED:
        raise given.fault("pref_loss", f"hetpipe has {', '.join(PREFERRED)}. Write one of these")
    if "dropout" in adapter:
        adapter["dropout"] = 0.0
        given.notes["lora_dropout"] = "off, as in their training on preferences"
    if "weights" in adapter:
        given.notes["adapter_name_or_path"] += ". The reference is the model with these adapters (theirs: without)"
    gamma = {"gamma": given.number("simpo_gamma")} if name == "simpo" else {}
    return {"name": PREFERRED[name], "beta": given.number("pref_beta"), **gamma}


def _put_data(given: Given, asked: Asked, model: str, stage: str) -> dict[str, Any] | None:
    """The section `data`. Return the arguments of the data of `eval_dataset`, if there are any."""
    base = _sample_args(given, model)
    if asked.data is not None:
        for key in ("dataset", "dataset_dir", "eval_dataset"):
            given.overrule(key, "--data")
        given.job["data"] = instead(asked.data, base)
        return None
    given.required("dataset", "the names of the data sets")
    name, args = joined(sets_of(given, "dataset", stage), given.source)
    if name == "instructions":
        given.notes["dataset"] = "instruction and input are joined by a blank line (theirs: by a line feed)"
    if name == "text":
        given.also["cutoff_len"], given.notes["cutoff_len"] = "data.args.context", "texts are joined, and cut into windows"
        given.job["data"] = {"name": name, "args": {**args, **of_texts(base)}}
        return None
    if name == "preferences":
        base = of_pairs(base)
        for key in ("packing", "neat_packing", "mask_history"):
            given.notes[key] = "pairs are padded, and their last answers compared"
    if given.said("max_samples"):
        if len(given.names("dataset")) == 1:
            args["limit"] = given.positive("max_samples")
        else:
            given.lost["max_samples"] = "it counts the records of each data set, data.args.limit those of all. Cut the files"
    given.job["data"] = {"name": name, "args": {**args, **base}}
    if not given.said("eval_dataset"):
        return None
    _, other = joined(sets_of(given, "eval_dataset", stage), given.source)
    return {"args": {key: value for key, value in other.items() if args.get(key) != value}}


def _sample_args(given: Given, model: str) -> dict[str, Any]:
    """Arguments of the data that say what becomes of a record."""
    pack = given.flag("packing") or given.flag("neat_packing")
    held = given.number("val_size") or 0.0
    if given.flag("neat_packing") and not given.flag("packing"):
        given.overrule("packing", "neat_packing")
    elif pack and not given.flag("neat_packing"):
        given.notes["packing"] = given.notes["neat_packing"] = (
            "samples of a row do not see each other here (as with neat_packing)"
        )
    given.notes["cutoff_len"] = "a sample that is longer is cut at its end; theirs shortens question and answer"
    if held >= 1:
        given.lost["val_size"] = "it counts samples, data.args.test_fraction is a part of them. Write it, or evaluate.data"
        held = 0.0
    elif held > 0:
        given.notes["val_size"] = SPREAD
    found: dict[str, Any] = {"tokenizer": model, "length": given.positive("cutoff_len"), "pack": pack, "test_fraction": held}
    if given.flag("mask_history"):
        found["turns"] = "last"
    if given.said("enable_thinking") and not given.flag("enable_thinking"):
        found["thinking"] = "off"
        given.notes["enable_thinking"] = "answers are learned without their thoughts"
    given.notes.setdefault("enable_thinking", "each answer is learned as the record has it, with its thought or without")
    return found


def _warmup(given: Given, run: Run) -> int | None:
    """Steps of the warm-up: warmup_steps, also as a part of the run, else a part that is rounded up."""
    steps = given.number("warmup_steps") if given.said("warmup_steps") else 0.0
    part = given.number("warmup_ratio") if given.said("warmup_ratio") else 0.0
    if steps is not None and steps >= 1:
        return int(steps)
    part = steps or part or 0.0
    return 0 if part == 0 else None if run.steps is None else ceil(part * run.steps)


def _put_rest(given: Given, run: Run, evaluated: dict[str, Any] | None, *, lora: bool) -> None:
    """Evaluations, checkpoints, curves and folders."""
    put_folders(given, str(given.text("output_dir") or "saves"), lora=lora)
    given.put("log.every_steps", given.positive("logging_steps"))
    key = "eval_strategy" if given.said("eval_strategy") else "evaluation_strategy"
    strategy = steps_or_epoch(given, key, str(given.text(key) or "no"))
    held = evaluated is not None or given.job["data"]["args"].get("test_fraction")
    put_evaluation(given, run, strategy if held else "no", None, evaluated)
    saving = "save_strategy"
    put_checkpoints(given, run, steps_or_epoch(given, saving, str(given.text(saving) or "steps")))
    tools = known_tools(given, "report_to", given.names("report_to"))
    name = {"name": given.text("run_name")} if given.said("run_name") else {}
    put_curves(given, {tool: name if tool in ("wandb", "trackio") else {} for tool in tools})
