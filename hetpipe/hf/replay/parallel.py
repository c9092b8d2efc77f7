"""How transformers splits a layer of a model over several devices (`base_model_tp_plan` of its configuration), read as data; and
plans in that form for types of which it has none."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hetpipe.layers.shards.styles import COLUMN, GATHER, KINDS, ROW

_OTHER_NAMES = {"colwise_rep": GATHER}  # in earlier releases
_INNER = {f"layers.*.self_attn.{name}_proj": COLUMN for name in "qkv"} | {"layers.*.fc1": COLUMN}
_OUTER = dict.fromkeys(("layers.*.self_attn.out_proj", "layers.*.fc2"), ROW)
PLANS = dict.fromkeys(("opt", "biogpt"), _INNER | _OUTER)  # by transformers' model_type
PLAN, HEADS, QUERIES = "base_model_tp_plan", ("head_dim", "head_size"), "num_attention_heads"


def styles(config: Any, layers: str, layer: nn.Module, called: str) -> dict[str, str]:
    """The styles of the modules of a layer, which its chain holds as `called`; `layers` is the path of all of them in the model.
    Where a part of the layer (attention, MLP) has a module of a style that is not known here, all of it stays whole."""
    found, strange, config = dict[str, str](), set[str](), config.get_text_config()
    for pattern, style in (getattr(config, PLAN, None) or PLANS.get(config.model_type, {})).items():
        before, star, inside = pattern.partition(".*.")
        if not star or not f".{layers}".endswith(f".{before}"):
            continue
        style = _OTHER_NAMES.get(style, style)
        for name, module in layer.named_modules():
            if not fnmatchcase(name, inside):
                continue
            if style not in KINDS or (style.startswith((COLUMN, ROW)) and type(module) is not nn.Linear):
                strange.add(name.partition(".")[0])
            found[name] = _with_heads(style, config, layer, name, module)
    return {f"{called}.{name}": style for name, style in found.items() if name.partition(".")[0] not in strange}


def _with_heads(style: str, config: Any, layer: nn.Module, name: str, module: nn.Module) -> str:
    """With how many heads it makes, which are not parted, queries, keys and values of one head together; and, if they are fewer
    than those of queries, how many of these share one."""
    around = layer.get_submodule(name.rpartition(".")[0])
    size = next((getattr(around, count) for count in HEADS if hasattr(around, count)), None)
    if style != COLUMN or not isinstance(size, int) or not isinstance(module, nn.Linear) or module.out_features % size:
        return style
    heads, queries = module.out_features // size, getattr(config, QUERIES, 0)
    if queries and heads % queries == 0:
        heads = queries
    shared = heads < queries and queries % heads == 0
    return f"{style}/{heads}{f'x{queries // heads}' if shared else ''}"
