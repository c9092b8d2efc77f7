"""The job as far as the command alone says it, and with what is known of the model and of the data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple, get_args

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job, apply_settings
from hetpipe.documents.number_types import TYPE_OF
from hetpipe.documents.precisions import parse_precision
from hetpipe.documents.sections.adapter import Base
from hetpipe.documents.sections.evaluate import HELD_OUT
from hetpipe.documents.sections.log import JSON_LINES
from hetpipe.documents.sections.loss import REWARD
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.kinds import PICTURES, TEXTS, Found, task_of
from hetpipe.language.packing import pack

SOURCE = "the job of this command"
LENGTH = 2048  # tokens of a sample or row at most, unless they are asked for
PREFERRED_RATES = {"lora": 5e-6, "full": 5e-7}  # Tunstall et al. 2023, Zephyr, section 4.3; ten times that for adapters
REWARD_RATES = {"lora": 1e-4, "full": 1e-5}  # a reward model learns a head anew
WARMUP = 0.03  # of the steps
CLIP = 1.0
LENGTH_KEY = {"chat": "length", "instructions": "length", "text": "context", "preferences": "length"}
CHECKPOINTS, LOG, CLUSTER_FILE, JOB_FILE = "checkpoints", "run", "cluster.yaml", "job.yaml"  # in the folder of a run
ADAPTER, MODEL = "adapter", "model"  # there, too: what is exported
EVALUATIONS = 10  # of a run, unless it is said how often


def draft(asked: Asked, found: Found, cluster: Cluster | None, *, cards: bool) -> dict[str, Any]:
    """The job but for what hangs on the model and the data. `cluster`: None where the devices are those that are here; `cards`:
    whether these, or those that a cluster file does not emulate, are GPUs. Settings of the command are in it."""
    adapter, precision = asked.adapter_keys, precision_of(asked.precision, cluster, cards=cards)
    task, evaluate = task_of(found.kind), _evaluation(asked, found)
    data = ARGUMENTS[task.model](asked, found)
    if asked.evaluated is not None:
        data[HELD_OUT] = asked.evaluated_part or 0
    rates = REWARD_RATES if asked.method == REWARD else PREFERRED_RATES if asked.prefers else task.rates
    rate = asked.rate if asked.rate is not None else rates["lora" if adapter else "full"]
    train: dict[str, Any] = {"epochs": asked.epochs or 1, "optimizer": {"name": "AdamW", "lr": rate}, "clip_norm": CLIP}
    if asked.global_batch is not None:
        train["global_batch"] = asked.global_batch
    if precision is not None:
        train["precision"] = precision
    job: dict[str, Any] = {"format": "hetpipe.job/1", "model": {"name": task.model, "args": {"weights": asked.model}}}
    if adapter is not None:
        job["adapter"] = {**adapter, "base": asked.base or base_of(precision, cluster)}
    job["data"] = {"name": found.kind, "args": data}
    job["loss"] = {"name": asked.method} if asked.prefers else dict(task.loss)
    if asked.cluster is not None or asked.emulate:
        job["cluster"] = asked.cluster or f"{asked.out}/{CLUSTER_FILE}"
    if asked.tensor_parallel:
        job["profiler"] = {"tensor_parallel": sorted(set(asked.tensor_parallel))}
    job["train"] = train
    if evaluate is not None:
        job["evaluate"] = evaluate
    job |= {"checkpoint": {"folder": f"{asked.out}/{CHECKPOINTS}"}, "log": _log(asked)}
    job["export"] = {"folder": f"{asked.out}/{ADAPTER if adapter is not None else MODEL}"}
    found_job = apply_settings(job, asked.settings)
    if not all(isinstance(found_job.get(section), dict) for section in ("model", "data", "loss", "train")):
        Job.parse(found_job, SOURCE)  # says what is wrong
    if asked.epochs is None and (found_job["train"] or {}).get("steps") is not None:
        found_job["train"].pop("epochs", None)  # --set train.steps=50 says the length
    return found_job


def _of_latents(asked: Asked, found: Found) -> dict[str, Any]:
    """The arguments of a folder of latents. InputError for options that are for texts."""
    for option, value in asked.of_texts.items():
        raise InputError(f"--{option} {value} is for texts, and {found.files['folder']} holds latents: leave it out")
    return {**found.files, "weights": asked.model}


def _of_texts(asked: Asked, found: Found) -> dict[str, Any]:
    """The arguments of texts and records."""
    if found.kind == "text" and asked.of_records:
        option = next(iter(asked.of_records))
        raise InputError(
            f"--{option} {asked.of_records[option]} is for chats, and for questions with their answers. The data "
            f"are plain text, of which everything is learned. Leave --{option} out"
        )
    data: dict[str, Any] = {**found.files, "tokenizer": asked.words, **asked.of_records}
    if asked.named_columns is not None:
        data["columns"] = asked.named_columns
    if asked.length is not None:
        data[LENGTH_KEY[found.kind]] = asked.length
    return data


ARGUMENTS = {TEXTS.model: _of_texts, PICTURES.model: _of_latents}  # of data, by the model that they train


def _log(asked: Asked) -> dict[str, Any]:
    """The section `log`."""
    folder = {"folder": f"{asked.out}/{LOG}"}
    return {**folder, "to": [JSON_LINES, *asked.log_to]} if asked.log_to else folder


def _evaluation(asked: Asked, found: Found) -> dict[str, Any] | None:
    """The section `evaluate`; None where nothing is said of it."""
    if asked.evaluated is None and asked.early_stop is None:
        return None
    section: dict[str, Any] = {"patience": asked.early_stop} if asked.early_stop is not None else {}
    if asked.evaluated is not None and asked.evaluated_part is None:
        section["data"] = {"args": {next(iter(found.files)): asked.evaluated}}
    return section


def precision_of(given: str | None, cluster: Cluster | None, *, cards: bool) -> str | dict[str, str] | None:
    """In what matrix products are computed: as given; else the fastest that each card has; else float32 (None), as on CPUs and on
    emulated devices but where the slowdown of each is said for several."""
    if given is not None:
        return parse_precision(given)
    if cluster is None:
        return "auto" if cards else None
    emulated = [kind.emulate for kind in cluster.device_types.values()]
    if all(emulate is None for emulate in emulated):
        return "auto" if cards else None
    return "auto" if all(emulate is not None and emulate.precisions is not None for emulate in emulated) else None


def base_of(precision: str | Mapping[str, str] | None, cluster: Cluster | None) -> Base:
    """How what does not train is held: in half precision where every device computes in it."""
    tables = [kind.emulate.precisions for kind in cluster.device_types.values() if kind.emulate is not None] if cluster else []
    half = {name for name in TYPE_OF if name != "fp32"}
    if precision == "auto":
        return "as-is" if any(table is None or not half & set(table) for table in tables) else "bf16"
    if isinstance(precision, Mapping):
        said = {precision.get(kind, "fp32") for kind in (cluster.device_types if cluster is not None else ("",))}
    else:
        said = {precision or "fp32"}
    if not said <= half:
        return "as-is"
    return "fp16" if said == {"fp16"} else "bf16"


def check_base(base: str | None) -> None:
    """InputError if there is no such way to hold a model."""
    if base is not None and base not in get_args(Base):
        raise InputError(f"--base {shown(base)}{nearest(base, get_args(Base))}")


def open_keys(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What neither the command nor its settings say: (section, key)."""
    args, train = job["data"].get("args") or {}, job["train"]
    length = LENGTH_KEY.get(job["data"].get("name"))
    told = {"length": ("length", "pack"), "context": ("context",)}.get(length or "", ())
    if job["data"].get("name") == "preferences":
        told = ("length",)
    found = [("data", key) for key in told if key not in args]
    return found + [("train", key) for key in ("global_batch", "scheduler") if key not in train]


def schedule(steps: int) -> dict[str, Any]:
    """A warm-up over the first 3 % of the steps, then down to nothing by a cosine."""
    warmup = ceil(WARMUP * steps)
    return {"name": "CosineAnnealingLR", "T_max": max(1, steps - warmup), "warmup_steps": warmup}


class ModelFacts(NamedTuple):
    """What is known of a model: `positions`, how many tokens it takes (None: any number, or not known), and whether it tells
    samples in a row apart. `switch` is the length behind which the positions of all samples in a micro-batch change (None:
    they never do)."""

    positions: int | None = None
    apart: bool = False
    switch: int | None = None


class DataFacts(NamedTuple):
    """What is known of the data: how many samples train and how many are held out, the tokens of the former, how many of
    these are learned, and the longest sample of all (None: not known). `lengths` are those of the samples that train, where
    they differ; `groups` is how many samples there are of each shape, where a batch holds samples of one."""

    train: int
    test: int
    tokens: int | None = None
    learned: int | None = None
    longest: int | None = None
    lengths: Sequence[int] | None = None
    groups: Sequence[int] | None = None

    def rows(self, length: int | None) -> Sequence[int]:
        """How many samples of each shape the run sees in an epoch; packed into rows of this length, where there is one."""
        if self.groups is not None:
            return self.groups
        return [self.train if length is None or self.lengths is None else len(pack(self.lengths, length))]

    def crosses(self, switch: int | None) -> bool:
        """Whether some samples are longer than this, and others are not."""
        return switch is not None and self.lengths is not None and min(self.lengths) <= switch < max(self.lengths)


def filled(found: Mapping[str, Any], model: ModelFacts, data: DataFacts | None) -> dict[str, Any]:
    """The draft with a value for each key that it leaves open: samples are of 2048 tokens at most, and of no more than the model
    has positions for; rows are packed where the model tells samples apart, and as long as the longest sample; a step has 32 of
    them, or all that there are; the schedule goes over all steps; a run that evaluates does so ten times."""
    content, left = copy.deepcopy(dict(found)), set(open_keys(found))
    args, train = content["data"].setdefault("args", {}), content["train"]
    length = LENGTH_KEY.get(content["data"].get("name"), "")
    if ("data", length) in left:
        args[length] = min(LENGTH, model.positions or LENGTH)
    if ("data", "pack") in left:
        crosses = data is not None and data.crosses(model.switch)
        args["pack"] = model.apart and not crosses and not {"sizes", "mask"} & set(args)
    if ("data", length) in left and data is not None and data.longest is not None:
        args[length] = min(args[length], data.longest)
    rows = data.rows(args[length] if args.get("pack") else None) if data is not None else None
    if ("train", "global_batch") in left:
        batch = task_of(content["data"].get("name", "")).batch
        train["global_batch"] = min(batch, sum(rows or [batch]) or batch)
    begin = _begin_alone(train.get("scheduler"))
    if begin is not None:
        train["scheduler"] = {**schedule(steps_of(train, rows) - begin), "from_step": begin} if rows is not None else None
    elif ("train", "scheduler") in left and rows is not None:
        train["scheduler"] = schedule(steps_of(train, rows))
    if isinstance(evaluate := content.get("evaluate"), dict):
        evaluate.setdefault("every_steps", max(1, steps_of(train, rows) // EVALUATIONS) if rows is not None else 1)
    return content


def _begin_alone(scheduler: object) -> int | None:
    """At which step a schedule begins of which nothing else is said."""
    begin = scheduler.get("from_step") if isinstance(scheduler, Mapping) and set(scheduler) == {"from_step"} else None
    return begin if isinstance(begin, int) else None


def steps_of(train: Mapping[str, Any], rows: Sequence[int]) -> int:
    """Steps of a section `train`, where an epoch has so many samples of each shape."""
    if train.get("steps") is not None:
        return int(train["steps"])
    return int(train["epochs"]) * sum(-(-own // int(train["global_batch"])) for own in rows)
