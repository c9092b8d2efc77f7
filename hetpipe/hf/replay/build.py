"""From a folder or a type of transformers to a chain."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from hetpipe.files.messages import InputError, nearest, one_line, shown
from hetpipe.hf.configs import configure, empty_model
from hetpipe.hf.folder import WeightFolder
from hetpipe.hf.replay.anatomy import EXTRAS, anatomy_of
from hetpipe.hf.replay.compare import compare
from hetpipe.hf.replay.layers import chain
from hetpipe.hf.replay.tiny import tiny
from hetpipe.hf.replay.trace import CannotCutError, form_of

import transformers  # isort: skip

ROUNDING = 1e-6  # by which sums in another order may differ, of the largest
REFUSED = {
    **dict.fromkeys(("layerdrop", "decoder_layerdrop"), "layers would be left out at random"),
    "output_router_logits": "the loss that balances experts is none of the chain's: it would be dropped",
}
_ALIKE = set[tuple[str, str]]()  # types and configurations that were compared


def build(
    *,
    weights: str | None = None,
    type: str | None = None,
    attention: str | None = None,
    extras: Sequence[str] = ("attention_mask",),
    **config: Any,
) -> nn.Sequential:
    """A model on the meta device: int64 [b, t], or a tuple of this and the `extras`, to logits [b, t, v].

    Args:
        weights: a folder that `save_pretrained` wrote; its configuration and values are used.
        type: of a model without one, which is drawn anew: transformers' `model_type`, `qwen3`.
        attention: sdpa, or eager; by default transformers chooses.
        extras: what a sample may have beside its tokens, in this order: attention_mask, position_ids.
        config: keys of its configuration in the place of the folder's or the defaults.

    Raises:
        InputError: there is no such type, its configuration asks for what a chain does not do, it cannot be cut into layers,
            and why, or small layers of it do not compute what transformers' own do.
    """
    if (weights is None) == (type is None):
        raise InputError("causal_lm: give either weights, a folder of save_pretrained, or type, as in type: qwen3")
    for name in extras:
        if name not in EXTRAS:
            raise InputError(f"causal_lm: unknown extra {name!r}{nearest(name, EXTRAS)}; known: {', '.join(EXTRAS)}")
    kind = str(WeightFolder(weights).config.get("model_type") if weights is not None else type)
    classes = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in classes:
        raise InputError(f"causal_lm: transformers {transformers.__version__} has no causal language model of type {shown(kind)}"
                         f"{nearest(kind, list(classes))}")  # fmt: skip
    kind_of_config = transformers.CONFIG_MAPPING[kind]
    settings, folder = configure("causal_lm", kind_of_config, {"": {}}, None, weights, attention, config)
    model_class, settings = causal_lm_of(settings)
    for key, reason in REFUSED.items():
        if getattr(settings, key, None):
            raise InputError(f"causal_lm: {key} is {shown(getattr(settings, key))}, which is not supported: {reason}")
    model = empty_model(model_class, settings, folder)
    try:
        small = tiny(model_class, settings)
        anatomy = anatomy_of(lambda: model_class(copy.deepcopy(settings)), form_of(model_class(copy.deepcopy(small))), extras)
    except CannotCutError as error:
        raise InputError(f"causal_lm: a model of type {kind!r} cannot be cut into layers: {error}") from None
    except InputError as error:
        raise InputError(f"causal_lm: a model of type {kind!r} is not cut into layers: {error}") from None
    _check_alike(kind, model_class, small)
    return chain(model, anatomy, folder, extras)


def causal_lm_of(config: Any) -> tuple[Any, Any]:
    """The class of the causal language model of a configuration, and what it is made of: of a configuration for text and images
    the part for text, where the model is of that alone, as transformers' own AutoModelForCausalLM has it."""
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    parts = [getattr(config, name, None) for name in type(config).sub_configs]
    return model_class, next((part for part in parts if type(part) is model_class.config_class), config)


def _check_alike(kind: str, model_class: Any, small: Any) -> None:
    """A chain of small layers computes what transformers' own model does. InputError where it does not, or where that cannot be
    found out."""
    key = kind, small.to_json_string(use_diff=False)
    if key in _ALIKE:
        return
    try:
        found = compare(model_class, small)
    except Exception as error:  # whatever transformers says of so small a configuration
        raise InputError(f"causal_lm: whether a chain of type {kind!r} computes what transformers does could not be tried on a "
                         f"small configuration: {one_line(error)}") from error  # fmt: skip
    if max(found) > ROUNDING:
        raise InputError(
            f"causal_lm: a chain of type {kind!r} computes something else than transformers does: logits differ by "
            f"{found.logits:.1e}, gradients by {found.gradients:.1e} of the largest"
        )
    _ALIKE.add(key)
