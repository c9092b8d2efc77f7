"""What is wrong with a command, as far as it is known before anything is imported, downloaded or read: told at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.sections.adapter import CONFIG_FILE, WEIGHTS_FILE
from hetpipe.files.hub import NAME, cached_folder
from hetpipe.files.messages import InputError, shown
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.draft import SOURCE, ModelFacts, check_base, draft, filled
from hetpipe.finetune.emulated import parse_emulated
from hetpipe.finetune.kinds import PICTURES, Found, kind_of, task_of
from hetpipe.hf.hub import folder_of, refuse_adapters
from hetpipe.language.writing.template import NONE, read_template
from hetpipe.processes.environment import place

PIPELINE = "model_index.json"  # of a folder of diffusers


class Looked(NamedTuple):
    """What the data are; the cluster, if it is said, and its file's content, where cards are emulated."""

    found: Found
    cluster: Cluster | None
    emulated: dict[str, Any] | None


def look(asked: Asked) -> Looked:
    """InputError where the data, the model or another file is not there, a record is of no kind that is known, or an option is
    wrong."""
    check_base(asked.base)
    emulated = parse_emulated(asked.emulate) if asked.emulate else None
    cluster = Cluster.parse(emulated, "--emulate") if emulated is not None else None
    if asked.cluster is not None:
        cluster = Cluster.load(asked.cluster)
    found = kind_of(asked.data, asked.named_columns, preferences=asked.prefers)
    if asked.template not in (None, NONE):
        read_template(asked.template)
    Job.parse(filled(draft(asked, found, cluster, cards=False), ModelFacts(), None), SOURCE)
    _check_model(asked, found)
    if asked.adapter is not None:
        _check_adapter(asked.adapter)
    words = asked.tokenizer
    if words is not None and not NAME.fullmatch(words) and not os.path.isdir(os.path.expanduser(words)):
        raise InputError(f"there is no folder {shown(words)} with a tokenizer (from {Path.cwd()})")
    return Looked(found, cluster, emulated)


def _check_model(asked: Asked, found: Found) -> None:
    """InputError where there is none, or one that such data do not train."""
    pictures = task_of(found.kind) is PICTURES
    named = NAME.fullmatch(asked.model) is not None
    model = Path(os.path.expanduser(asked.model)) if pictures else folder_of(asked.model)[0]
    if not os.path.isdir(model) and not (pictures and named):
        raise InputError(f"there is no folder {shown(asked.model)}, and no model on Hugging Face can have that name (owner/name)")
    if not pictures and os.path.isfile(model / PIPELINE):
        raise InputError(
            f"{asked.model} is a pipeline of diffusers, and trains on a folder of latents: make it of pictures and captions as "
            "the page on diffusion transformers shows, and name it in the place of the data"
        )
    refuse_adapters(model, asked.model)


def _check_adapter(named: str) -> None:
    folder, _ = cached_folder(named, (CONFIG_FILE, WEIGHTS_FILE), quiet=place().local_rank > 0)
    if not os.path.isfile(folder / CONFIG_FILE):
        what = f"it holds no {CONFIG_FILE}" if folder.exists() else "there is no such folder"
        raise InputError(
            f"--adapter {shown(named)}: {what} (from {Path.cwd()}). Name a folder of peft, such as finetuned/adapter"
        )
