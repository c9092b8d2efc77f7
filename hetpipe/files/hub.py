"""Folders by their names on Hugging Face: in huggingface_hub's cache, and of which revision."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hetpipe.files.messages import InputError, cut, shown

NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w.][\w./-]*))?")


def cached_folder(name: str | Path, patterns: Sequence[str], *, quiet: bool = False) -> tuple[Path, str | None]:
    """The folder of this name, and the hash of its commit: one that is there (which has none), or a model on Hugging Face,
    `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@main`, of which the files that fit `patterns` are downloaded into huggingface_hub's
    cache where they are not there yet (never under HF_HUB_OFFLINE=1). Each process may ask: huggingface_hub locks each file, so
    that one process of a host downloads it and the others wait. `quiet`: without a bar of progress. InputError where there is no
    such model or revision, or it may not be read."""
    path = Path(os.path.expanduser(name))
    named = NAME.fullmatch(str(name))
    if named is None or os.path.lexists(path):
        return path, None
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        return path, None
    if quiet:
        disable_progress_bars()
    try:
        found = huggingface_hub.snapshot_download(named["name"], revision=named["revision"], allow_patterns=[*patterns])
    except Exception as error:  # whatever huggingface_hub, its cache and the network say
        raise InputError(
            f"{cut(str(name), 200)} is no folder here, and {_told(error, named['name'], named['revision'])}"
        ) from error
    return Path(found), Path(found).name


def _told(error: Exception, name: str, revision: str | None) -> str:
    """Why there is none on Hugging Face."""
    from huggingface_hub import constants, errors

    which = f"revision {shown(revision)} of it" if revision is not None else "it"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} on Hugging Face is gated: ask for access on its page there, and log in (hf auth login)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"Hugging Face has no model of this name, or a private one: then log in (hf auth login), or set HF_TOKEN ({name})"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} on Hugging Face has no revision {shown(revision)}: name a branch, a tag or a commit's hash"
    if isinstance(error, errors.HFValidationError):
        return f"it is no name that a model on Hugging Face can have: {_line(error)}"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{which} is not (or not whole) in huggingface_hub's cache {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE is set, so "
            f"that nothing is downloaded: hf download {name} where there is a network"
        )
    return f"{which} could not be had from Hugging Face: {_line(error.__cause__ or error)}"


def _line(error: BaseException) -> str:
    return cut(" ".join(str(error).split()) or type(error).__name__, 300)
