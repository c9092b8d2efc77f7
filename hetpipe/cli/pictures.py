"""Transformers for pictures and videos in `hetpipe what-if`: their layers are counted, by a job of random latents."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpipe.diffusion.popular import Popular, popular
from hetpipe.documents.profiles.counted import CountedModel
from hetpipe.documents.sections.adapter import NO_LORA, parse_lora
from hetpipe.files.messages import InputError, listed


def picture_model(name: str) -> Popular | None:
    """The transformer of this name, or in this folder; None where there is no such. InputError where what its samples are is not
    known."""
    if (found := popular().get(name)) is not None:
        return found
    files = [Path(name) / "config.json", Path(name) / "transformer" / "config.json"]
    if not any(file.is_file() and '"_class_name"' in file.read_text("utf-8", errors="replace") for file in files):
        return None
    from hetpipe.diffusion.folder import TransformerFolder  # and torch

    folder = TransformerFolder.of(name)
    like = next((one for one in popular().values() if one.type == folder.type_name), None)
    if like is None:
        kinds = sorted({one.type for one in popular().values()})
        raise InputError(f"{folder.said} is a {folder.type_name}; what a sample is, is known of\n{listed(kinds)}")
    config = {key: value for key, value in folder.config.items() if not key.startswith("_")}
    told = bool(config.get("guidance_embeds", like.guidance is not None))
    return like.model_copy(update={"source": folder.said, "config": config, "guidance": 1.0 if told else None})


def counted_model(name: str, found: Popular, lora: str | None, base: str, side: int | None) -> CountedModel:
    """Its layers, with these adapters."""
    from hetpipe.building.build import build_data, build_model  # and torch
    from hetpipe.documents.job import Job
    from hetpipe.measuring.precision.counted import counted

    said: dict[str, Any] = {
        "format": "hetpipe.job/1",
        "model": {"name": "diffusion", "args": {"type": found.type, **found.config}},
        "data": {
            "name": "random_latents",
            "args": {"type": found.type, "shapes": found.at(side), "samples": 1, "guidance": found.guidance},
        },
        "loss": {"name": "denoising"},
        "train": {"global_batch": 1, "steps": 1, "precision": "bf16"},  # what is frozen can then be held so
    }
    words = found.words(side)
    if lora is not None and lora.strip() != NO_LORA:
        held = "bf16" if base == "as-is" else base  # as hetpipe finetune holds it
        said["adapter"] = {"kind": "lora", **parse_lora(lora), "base": held}
        words = f"{words}, adapters {lora} over a base in {held}"
    job = Job.parse(said, f"what-if {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says which kernels it would not use
        try:
            return counted(replace(build_model(job, build_data(job)), name=name), found.source, words)
        except InputError as error:
            raise InputError(
                f"{name} cannot be counted, with samples as well-known models of its type have them: {error}"
            ) from None
