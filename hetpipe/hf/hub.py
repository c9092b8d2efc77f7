"""Models by their names on Hugging Face: what of them is read; and what is said of a folder that holds adapters, too."""

from __future__ import annotations

import os
from pathlib import Path

from hetpipe.documents.sections.adapter import CONFIG_FILE
from hetpipe.files.formats import read_mapping
from hetpipe.files.hub import cached_folder
from hetpipe.files.messages import InputError, cut, shown
from hetpipe.processes.environment import place

# What a folder may hold beside config and weights, and what its trained successor needs too: all that transformers' tokenizers
# write (their `vocab_files_names`, and the templates of chats).
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates",
    "vocab*",
    "*vocab.json",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tokenizer",
    "bpe.codes",
    "dict.txt",
    "normalizer.json",
    "emoji.json",
    "word_shape.json",
    "word_pronunciation.json",
    "byte_maps.json",
    "generation_config.json",
)
_READ = (
    "config.json",
    CONFIG_FILE,
    "model*.safetensors",
    "model.safetensors.index.json",
    *COMPANIONS,
    "additional_chat_templates/*",
)


def folder_of(weights: str | Path, *, code: bool = False) -> tuple[Path, str | None]:
    """The folder that `weights` names, and the hash of its commit (see `cached_folder`). `code`: with its files in Python."""
    return cached_folder(weights, [*_READ, *(["*.py"] if code else [])], quiet=place().local_rank > 0)


def refuse_adapters(folder: Path, named: str) -> None:
    """InputError if a folder named as a base holds adapters: transformers would add them to the model, or there is none."""
    if not os.path.isfile(folder / CONFIG_FILE):
        return
    named, more = cut(named, 200), ""
    what = f"holds adapters ({CONFIG_FILE}), and no model"
    if os.path.isfile(folder / "config.json"):
        what = f"holds adapters beside the model ({CONFIG_FILE}): transformers would add them, and a model read here is without"
        more = (
            f". To train what both make, merge them first (peft's merge_and_unload); for the model alone, take {CONFIG_FILE} "
            "out of the folder"
        )
    raise InputError(
        f"{named} {what}. To go on from them write 'adapter: {{weights: {named}}}' (hetpipe finetune: --adapter "
        f"{named}), with model.args.weights the base{_base_in(folder / CONFIG_FILE)}{more}"
    )


def _base_in(file: Path) -> str:
    """Which one that is, as far as the file says it."""
    try:
        config = read_mapping(file)
    except InputError:
        return ""
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return f" that they name, {shown(base)}" if isinstance(base, str) and base else ", which they do not name"
