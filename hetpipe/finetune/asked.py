"""What `hetpipe finetune` was told."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.documents.guesses import guesses
from hetpipe.documents.sections.adapter import ALL_LINEAR, NO_LORA, parse_lora
from hetpipe.documents.sections.loss import PREFERENCES, REWARD
from hetpipe.files.messages import InputError, nearest, shown

DEFAULT = "r=16"  # of --lora
TOKENIZER = "tokenizer.json"  # of a folder that holds one
SFT = "sft"  # of --method: examples are learned
METHODS = (SFT, *PREFERENCES)
SETTINGS = "--set adapter."  # of what an adapter has


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments and options; None where one was left out."""

    model: str
    data: tuple[str, ...]
    out: str = "finetuned"
    lora: str | None = None
    adapter: str | None = None
    base: str | None = None
    length: int | None = None
    global_batch: int | None = None
    epochs: int | None = None
    rate: float | None = None
    precision: str | None = None
    tokenizer: str | None = None
    turns: str | None = None
    template: str | None = None
    thinking: str | None = None
    columns: str | None = None
    method: str = SFT
    log_to: tuple[str, ...] = ()
    evaluated: str | None = None
    early_stop: int | None = None
    tensor_parallel: tuple[int, ...] = ()
    cluster: str | None = None
    emulate: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            answer = guesses().losses.get(self.method)
            raise InputError(
                f"--method {shown(self.method)}{f': {answer}' if answer is not None else nearest(self.method, METHODS)}"
            )
        if self.prefers and self.turns is not None:
            raise InputError(
                f"--turns {self.turns} is for chats, and --method {self.method} compares the last answers: leave it out"
            )
        if self.cluster is not None and self.emulate:
            raise InputError(
                f"--cluster {self.cluster} and --emulate {self.emulate[0]} both describe the devices. Leave one of the two out"
            )
        if self.adapter is not None and self.lora is not None:
            raise InputError(
                f"--adapter {self.adapter} and --lora {self.lora} both describe the adapters. Leave one of "
                f"the two out (for another dropout: {SETTINGS}dropout=0.05)"
            )
        if self.adapter_keys is None and self.base is not None:
            raise InputError(
                f"--base {self.base} is for frozen weights, but with --lora {NO_LORA} all weights train. Leave one of the two out"
            )
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate >= 0):
            raise InputError(f"--lr {self.rate}: write a number of at least 0, such as 2e-4")

    @property
    def prefers(self) -> bool:
        """Whether better answers are learned against worse ones."""
        return self.method in PREFERENCES

    @property
    def evaluated_part(self) -> float | None:
        """Which part of the data is held out, where --eval is a number. InputError if it is none from 0 to below 1."""
        try:
            part = float(self.evaluated or "")
        except ValueError:
            return None
        if not 0 <= part < 1:
            raise InputError(f"--eval {self.evaluated}: write a file, or the part of the data that is held out, such as 0.1")
        return part

    @property
    def adapter_keys(self) -> dict[str, Any] | None:
        """Return the keys of the section `adapter`; None where all parameters train."""
        if self.adapter is not None:
            return {"weights": self.adapter}
        if (self.lora or "").strip() == NO_LORA:
            return None
        whole = {"train_also": ["head"]} if self.method == REWARD else {}
        return {"kind": "lora", "targets": ALL_LINEAR, **parse_lora(self.lora if self.lora is not None else DEFAULT), **whole}

    @property
    def words(self) -> str:
        """The folder of the tokenizer, or its name: that of the adapters that go on, where their folder has one."""
        if self.tokenizer is None and self.adapter is not None and os.path.isfile(Path(self.adapter, TOKENIZER)):
            return self.adapter
        return self.tokenizer or self.model.partition("@")[0]

    @property
    def of_texts(self) -> dict[str, Any]:
        """Options that were given and are for texts only."""
        given: dict[str, Any] = {"length": self.length, "tokenizer": self.tokenizer, **self.of_records, "columns": self.columns}
        given["method"] = self.method if self.method != SFT else None
        return {key: value for key, value in given.items() if value is not None}

    @property
    def of_records(self) -> dict[str, Any]:
        """Arguments of chats and of questions with their answers, which plain text has none of."""
        given = {"turns": self.turns, "template": self.template, "thinking": self.thinking}
        return {key: value for key, value in given.items() if value is not None}

    @property
    def named_columns(self) -> dict[str, str] | None:
        """What the data call their keys and roles."""
        return parse_columns(self.columns) if self.columns is not None else None


def parse_columns(text: str) -> dict[str, str]:
    """`prompt=question,completion=answer` as a mapping.

    >>> parse_columns("prompt=ask, completion=reply")
    {'prompt': 'ask', 'completion': 'reply'}
    """
    pairs = [tuple(piece.strip() for piece in part.partition("=")) for part in text.split(",")]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise InputError(
                f"cannot read --columns {shown(text)}: write hetpipe's name, =, and the name in the data, as in "
                "prompt=question,completion=answer"
            )
    return {key: name for key, _, name in pairs}
