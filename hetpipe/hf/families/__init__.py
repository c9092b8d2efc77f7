"""Families of transformers, a description a file. The name of the file is the family's: transformers' `model_type`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from hetpipe.hf.family import Family
from hetpipe.hf.sizes import Kind

# those of which there is no description in `families`
GATED = ("mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo", "olmo2", "granite", "smollm3", "cohere")
UNGATED = ("starcoder2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "gpt_bigcode")
ENCODERS = ("bert", "roberta", "electra", "camembert", "xlm-roberta")


def family_names() -> list[str]:
    """All that are described."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__))


def family(name: str) -> Family:
    """The description of that name."""
    found: Family = import_module(f"{__name__}.{name}").FAMILY
    return found


def known_kinds() -> dict[str, Kind]:
    """What the layers of each `model_type` are like."""
    rest: dict[str, Kind] = {**dict.fromkeys(GATED, "llama"), **dict.fromkeys(UNGATED, "gpt"), **dict.fromkeys(ENCODERS, "bert")}
    return rest | {name: family(name).kind for name in family_names()}
