"""The section `adapter` of the job: low-rank matrices beside a model, which may be held in few bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hetpipe.exchange.configs.given import Given

TRAINED = {"embed_tokens": "embed", "wte": "embed", "lm_head": "head", "norm": "norms"}  # a module's name → train_also
NAME = re.compile(r"[\w.]+")


def put_adapter(given: Given, keys: dict[str, Any], weights: str, train_also: str) -> None:
    """Write the section. `weights`: the key that names an adapter to go on from, which then says all but the base and dropout;
    `train_also`: the key that names what trains beside it."""
    base, alpha = keys.pop("base"), keys["alpha"]
    keys["alpha"] = int(alpha) if alpha is not None and alpha == int(alpha) else alpha
    if given.said(weights):
        keys = {"weights": given.text(weights), "dropout": keys["dropout"]}
        given.notes[weights] = "it says rank, alpha and targets; the keys for these have no effect"
    elif also := _also(given, train_also):
        keys["train_also"] = also
    given.job["adapter"] = {"kind": "lora", **keys, **({"base": base} if base is not None else {})}


def targets_of(given: Given, key: str, names: Sequence[str], every: Sequence[str]) -> str | list[str]:
    """The layers with adapters; all of them, if one of the names is one of `every`."""
    if any(name in every for name in names):
        return "all-linear"
    if not names or not all(NAME.fullmatch(name) for name in names):
        raise given.fault(
            key, "hetpipe takes names of layers, such as [q_proj, v_proj], or all of them; write those that you mean"
        )
    return list(names)


def _also(given: Given, key: str) -> list[str]:
    """What trains beside adapters; what hetpipe cannot train so is lost."""
    names = given.names(key)
    found = {name: next((ours for part, ours in TRAINED.items() if part in name.rpartition(".")[2]), None) for name in names}
    if lacking := [name for name, ours in found.items() if ours is None]:
        given.lost[key] = (
            f"beside adapters the embedding, the head and norms can train (adapter.train_also), not {', '.join(lacking)}"
        )
    return [ours for ours in dict.fromkeys(found.values()) if ours is not None]
