"""A small configuration of the same kind as a given one, of which transformers itself builds and runs a model: few layers, one of
each sort, and small sizes; switches, scales and caps stay as they are.

What a size counts is told by its name. Sizes that belong together (the width is heads times the width of a head) have to fit
together afterwards, so that several rules are tried: all divided by a factor, all as small as a number, fewer layers only."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from hetpipe.files.messages import InputError, one_line
from hetpipe.layers.trials.apart import Limit

LAYERS, MOST_LAYERS, WORDS, TOKENS = 3, 8, 64, 12  # of the small model; more than three layers where these are of several sorts
MOST_PARAMETERS = 30_000_000  # of a model that is still small enough to be tried
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ROLES = {
    "other": r"_ids?$|_idx$|_index$|period|offset|interval|kernel|channels|image|patch|_every|bucket",
    "layers": r"^(num|n)_(hidden_|decoder_|encoder_)?(layers?|blocks)$|^(de|en)coder_layers$|^depth$",
    "words": r"vocab",
    "positions": r"max_position|n_positions|^n_ctx$|max_seq_len|max_(target|source)_positions|context_length",
    "window": r"window|attention_chunk_size|^local_attention$",
    "dense": r"^first_k_dense|^num_dense_layers$",
    "groups": r"^n_group$|^topk_group$|^num_expert_group$",
    "common": r"shared_experts$",
    "chosen": r"top_?k(_experts)?$|experts_per_tok(en)?$|^moe_k$",
    "experts": r"^(moe_)?(n|num)_(routed_|local_)?experts$|^zero_expert_num$",
    "state": r"d_state$|state_size$|rank$",
    "head": r"head.*(dim|size)|^d_(head|kv)$|d_head$|kv_channels|rotary_dim|headdim",
    "heads": r"heads?$|n_?groups$|num_query_groups",
    "width": r"(size|dim|width|inner|d_model|n_embd|d_ff|d_ssm)$|hidden_size",
}
_ROLE = re.compile("|".join(f"(?P<{role}>{pattern})" for role, pattern in _ROLES.items()))
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "model_dim", "embed_dim", "emb_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
_COUNTS = {"words": WORDS, "positions": 64, "window": 8, "dense": 1, "groups": 1, "chosen": 2, "experts": 4, "state": 16}
Sizes = Mapping[str, Callable[[int], int]]  # role → the small size in the place of one


def tiny(model_class: Any, config: Any) -> Any:
    """The configuration. InputError where transformers builds or runs no such model."""
    failure = None
    for values in _candidates(config):
        try:
            small = type(config).from_dict(copy.deepcopy(values))
            _run(model_class, small)
            return small
        except Exception as error:  # whatever transformers says of so small a configuration
            failure = failure or error
    assert failure is not None
    raise InputError(f"transformers runs no small model of this configuration: {one_line(failure)}") from failure


def limits_of(config: Any, small: Any, reach: tuple[int, int]) -> list[Limit]:
    """The windows and numbers of positions of a configuration than which some samples are longer and others are not, of samples
    of from so few to so many tokens; with what they are in its small one."""
    values, own = (dict(_of_tokens(each.to_dict())) for each in (config, small))
    return [Limit(key, value, own[key]) for key, value in values.items() if key in own and reach[0] <= value < reach[1]]


def _of_tokens(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _of_tokens(value, f"{path}{key}.")
        elif _role(key) in ("positions", "window") and _is_size(value) and not key.endswith("layers"):
            yield f"{path}{key}", value


def _run(model_class: Any, config: Any) -> None:
    """Forward and backward, with values. An exception says what does not fit."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"its smallest model that fits together has {size:,} parameters")
        model = model_class(copy.deepcopy(config)).eval()
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False).logits.sum().backward()


def _candidates(config: Any) -> Iterator[dict[str, Any]]:
    """Its values by each rule; at last with sizes that it leaves open, or places for more tokens than it has."""
    whole = config.to_dict() | {"return_dict": True}  # by which logits are found, as in the chain
    roomy = _with_places(whole)
    for values in (whole, _filled(whole), *([roomy] if roomy != whole else [])):
        for rule in (_divided, _fewer_heads, _fixed, _as_they_are):
            yield _small(copy.deepcopy(values), rule)


def _small(values: dict[str, Any], rule: Callable[[dict[str, Any]], Sizes]) -> dict[str, Any]:
    """A configuration, or a part of one (of text, of images)."""
    _fewer_layers(values)
    _shrink(values, {role: partial(min, most) for role, most in _COUNTS.items()} | dict(rule(values)))
    for key, value in values.items():
        if _is_part(value):
            values[key] = _small(value, rule)
        elif key in _TOKEN_IDS and value is not None:
            values[key] = _TOKEN_IDS[key]
    return values


def _shrink(values: dict[str, Any], sizes: Sizes) -> None:
    for key, value in values.items():
        change = sizes.get(_role(key))
        if isinstance(value, dict) and not _is_part(value):
            _shrink(value, sizes)
        elif change is not None and _is_size(value):
            values[key] = max(1, change(value))
        elif change is not None and isinstance(value, list) and all(map(_is_size, value)):
            values[key] = [max(1, change(each)) for each in value]


def _divided(values: dict[str, Any]) -> Sizes:
    """Heads by one factor, what belongs to a head by another, and widths by both."""
    told, implied = _of_role(values, "head"), _implied(values)
    by, hidden = _heads_by(values), _first(values, _HIDDEN)
    if told or implied:
        most = max(*told, *implied, 0)
        return _by(by, _divisor(math.gcd(*(told or implied)), lambda d: most // d >= 8 and hidden % (by * d * 4) == 0))
    return _by(by, max(1, max(_of_role(values, "width"), default=1) // by // 32))


def _fewer_heads(values: dict[str, Any]) -> Sizes:
    """Heads and widths by one factor: what belongs to a head, which may be cut into sections, stays as it is."""
    return _by(_heads_by(values), 1)


def _heads_by(values: dict[str, Any]) -> int:
    heads = [count for count in _of_role(values, "heads") if count > 1]
    return _divisor(math.gcd(*heads), lambda d: min(heads) // d >= 2 and max(heads) // d >= 4) if heads else 1


def _by(heads: int, head: int) -> Sizes:
    """Widths are multiples of four: products of several matrices at once need it."""
    return {"heads": lambda v: v // heads, "head": lambda v: v // head, "width": lambda v: 4 * math.ceil(v / heads / head / 4)}


def _fixed(values: dict[str, Any]) -> Sizes:
    """Each as small as a number."""
    most = max(_of_role(values, "heads"), default=0)
    return {"heads": lambda v: min(v, 4 if v == most else 2), "head": lambda v: min(v, 8), "width": lambda v: min(v, 32)}


def _as_they_are(values: dict[str, Any]) -> Sizes:
    """Fewer layers, words and experts only."""
    return {}


def _divisor(of: int, fits: Callable[[int], bool]) -> int:
    return max((d for d in range(1, of + 1) if of % d == 0 and fits(d)), default=1)


def _implied(values: Mapping[str, Any]) -> list[int]:
    """The width of a head where it is the whole width divided by heads."""
    hidden, heads = _first(values, _HIDDEN), _first(values, _HEADS)
    return [hidden // heads] if hidden and heads and hidden % heads == 0 else []


def _first(values: Mapping[str, Any], keys: Iterable[str]) -> int:
    return next((values[key] for key in keys if _is_size(values.get(key))), 0)


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """With sizes where it has none: as many heads of keys as of queries, of their width, four experts of which two are chosen."""
    heads, head = _first(values, _HEADS), next(iter(_implied(values)), None)
    open_sizes = {"heads": heads or None, "head": head, "experts": 4, "chosen": 2, "common": 1}
    return {
        key: _filled(value) if _is_part(value) else open_sizes.get(_role(key)) if value is None else value
        for key, value in values.items()
    }


def _with_places(values: dict[str, Any]) -> dict[str, Any]:
    """With positions for the tokens of a run."""
    return {
        key: _with_places(value)
        if _is_part(value)
        else max(value, TOKENS)
        if _role(key) == "positions" and _is_size(value)
        else value
        for key, value in values.items()
    }


def _fewer_layers(values: dict[str, Any]) -> None:
    """Those that stay are the first two of each sort, and then others in their order; whatever is said of each layer is said of
    them."""
    count = max((value for key, value in values.items() if _role(key) == "layers" and _is_size(value)), default=0)
    if not count:
        return
    each = [key for key, value in values.items() if isinstance(value, list) and len(value) == count and key != "architectures"]
    numbered = [key for key, value in values.items() if _numbers_layers(key, value, count) and key not in each]
    by_layer = [key for key, value in values.items() if _says_of_layers(value)]
    sorts = list[str]()
    for layer in range(count):
        told = [{int(n): what for n, what in values[key].items()}.get(layer) for key in by_layer]
        sorts.append(repr([*(values[key][layer] for key in each), *(layer in values[key] for key in numbered), *told]))
    first, second, more = ([i for i in range(count) if min(sorts[:i].count(sorts[i]), 2) == before] for before in range(3))
    kept = sorted([*first, *second, *more][: min(max(LAYERS, len(first) + len(second)), MOST_LAYERS)])
    for key, value in values.items():
        if _role(key) == "layers" and _is_size(value):
            values[key] = min(value, len(kept))
        elif key in each:
            values[key] = [value[layer] for layer in kept]
        elif key in numbered:
            values[key] = [new for new, old in enumerate(kept) if old in value]
        elif key in by_layer:
            values[key] = {new: what for new, old in enumerate(kept) for n, what in value.items() if int(n) == old}


def _numbers_layers(key: str, value: Any, count: int) -> bool:
    """Whether a list names layers by their numbers."""
    return (
        "layer" in key
        and isinstance(value, list)
        and bool(value)
        and all(map(_is_number, value))
        and sorted({int(v) for v in value}) == value
        and value[-1] < count
    )


def _says_of_layers(value: Any) -> bool:
    """Whether it is a dictionary from the numbers of layers to what is another in these."""
    return isinstance(value, dict) and bool(value) and all(_is_number(k) and isinstance(v, dict) for k, v in value.items())


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and value.isdecimal())


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _role(key: str) -> str:
    found = _ROLE.search(str(key))
    return str(found.lastgroup) if found else "other"


def _of_role(values: Mapping[str, Any], role: str) -> list[int]:
    """All sizes of this role, outside of parts."""
    found = list[int]()
    for key, value in values.items():
        if isinstance(value, dict) and not _is_part(value):
            found += _of_role(value, role)
        elif _role(key) == role:
            found += [each for each in (value if isinstance(value, list) else [value]) if _is_size(each)]
    return found
