"""What `hetpipe finetune` was told."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.files.formats import read_yaml
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.spec.sections.adapter import AdapterSection

NONE, DEFAULT = "none", "r=16"  # of --lora; none: all parameters train
IN_LORA = ("r", "alpha", "dropout", "rank_stabilized", "use_dora")
TOKENIZER = "tokenizer.json"  # of a folder that holds one
SETTINGS = "--set adapter."  # what else an adapter has is said by it


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
    cluster: str | None = None
    emulate: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.cluster is not None and self.emulate:
            raise InputError(
                f"--cluster {self.cluster} and --emulate {self.emulate[0]} both say what the devices are: leave one "
                "of the two out"
            )
        if self.adapter is not None and self.lora is not None:
            raise InputError(
                f"--adapter {self.adapter} says what the adapters are, and so does --lora {self.lora}: leave one of "
                f"the two out (another dropout: {SETTINGS}dropout=0.05)"
            )
        if self.adapter_keys is None and self.base is not None:
            raise InputError(
                f"--base {self.base} is of a model that stays as it is, and with --lora {NONE} all of it trains: "
                "leave one of the two out"
            )
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate >= 0):
            raise InputError(f"--lr {self.rate}: write a number of at least 0, such as 2e-4")

    @property
    def adapter_keys(self) -> dict[str, Any] | None:
        """Return the keys of the section `adapter`; None where all parameters train."""
        if self.adapter is not None:
            return {"weights": self.adapter}
        lora = parse_lora(self.lora if self.lora is not None else DEFAULT)
        return {"kind": "lora", **lora, "targets": "all-linear"} if lora else None

    @property
    def words(self) -> str:
        """The folder of the tokenizer, or its name: that of the adapters that go on, where their folder has one."""
        if self.tokenizer is None and self.adapter is not None and os.path.isfile(Path(self.adapter, TOKENIZER)):
            return self.adapter
        return self.tokenizer or self.model.partition("@")[0]

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
                f"--columns {shown(text)}: write our name, =, and that of the data, as in prompt=question,completion=answer"
            )
    return {key: name for key, _, name in pairs}


def parse_lora(text: str) -> dict[str, Any]:
    """`r=16,alpha=32` as keys of the section `adapter`; alpha is 2 r unless it is said.

    >>> parse_lora("r=8,dropout=0.05"), parse_lora("none")
    ({'r': 8, 'alpha': 16, 'dropout': 0.05}, {})
    """
    if text.strip() == NONE:
        return {}
    found: dict[str, Any] = {"r": AdapterSection().r, "alpha": None}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in set(AdapterSection.model_fields) - set(IN_LORA):
            raise InputError(f"--lora {shown(text)}: write {SETTINGS}{key}={value or '…'} instead")
        if key not in IN_LORA:
            raise InputError(f"--lora {shown(text)}: unknown key {shown(key)}{nearest(key, [*IN_LORA, NONE])}")
        if not equals or not value:
            raise InputError(f"--lora {shown(text)}: {key} has no value; write r=16, or r=16,alpha=32,dropout=0.05")
        found[key] = read_yaml(value, f"the value of {key} in --lora {shown(text)}")
    r = found["r"]
    if found["alpha"] is None:
        found["alpha"] = 2 * r if isinstance(r, int | float) else AdapterSection().alpha  # which says what is wrong with r
    return found
