"""From a folder or a type of transformers to a chain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from hetpipe.files.messages import InputError, nearest, one_line, shown
from hetpipe.hf.chain import SCORE, drawn_seed
from hetpipe.hf.configs import configure, empty_model
from hetpipe.hf.folder import WeightFolder
from hetpipe.hf.known import SIZES
from hetpipe.hf.replay.anatomy import EXTRAS, anatomy_of
from hetpipe.hf.replay.classes import classes_of, scoring, text_part
from hetpipe.hf.replay.compare import compare
from hetpipe.hf.replay.layers import chain
from hetpipe.hf.replay.skeleton import Anatomy
from hetpipe.hf.replay.tiny import tiny
from hetpipe.hf.replay.trace import CannotCutError, form_of
from hetpipe.layers.trials.apart import seen_ahead

AHEAD = 1e-4  # likewise, of logits with other tokens behind them
REPLAY_TOLERANCE = 1e-6  # by which sums in another order may differ, of the largest
REFUSED = {
    **dict.fromkeys(("layerdrop", "decoder_layerdrop"), "layers would be left out at random"),
    "output_router_logits": "the loss that balances experts is none of the chain's: it would be dropped",
    "add_cross_attention": "there is no encoder here",
}
_ALIKE = set[tuple[Any, str]]()  # classes and configurations that were compared


class Configured(NamedTuple):
    """Of a model that is not built yet: transformers' type, class and configuration, and the folder of its weights."""

    kind: str
    model: Any
    config: Any
    folder: WeightFolder | None


def configured(
    weights: str | None, type: str | None, attention: str | None, trust_remote_code: bool | None, config: Mapping[str, Any]
) -> Configured:
    """What these arguments of `build` name. InputError as there."""
    given = WeightFolder(weights, code=trust_remote_code is True) if weights is not None else None
    kind, kind_of_config, model_class, code = classes_of(given, type, trust_remote_code)
    settings, folder = configure("causal_lm", kind_of_config, {"": {}}, None, given, attention, config)
    settings = text_part(model_class, settings)
    if code is not None:
        settings.auto_map = code
    return Configured(kind, model_class, settings, folder)


def build(
    *,
    weights: str | None = None,
    type: str | None = None,
    attention: str | None = None,
    extras: Sequence[str] = ("attention_mask",),
    trust_remote_code: bool | None = None,
    labels: bool | Literal["auto"] = False,
    rows: int = 1,
    score: bool = False,
    **config: Any,
) -> nn.Sequential:
    """A model on the meta device: int64 [b, t], or a tuple of this and the `extras`, to logits [b, t, v].

    Args:
        weights: a folder that `save_pretrained` wrote, or a name on Hugging Face (`Qwen/Qwen3-0.6B`, `name@revision`); its
            configuration and values are used.
        type: of a model without one, which is drawn anew: transformers' `model_type`, `qwen3`.
        attention: sdpa, or eager; by default transformers chooses.
        extras: what a sample may have beside its tokens, in this order: attention_mask, position_ids.
        trust_remote_code: whether code that lies in the folder runs (its config.json names it in auto_map); false: transformers'
            own class is used instead.
        labels: whether the head computes the loss, for `fused_cross_entropy`, a chunk of tokens at a time: inputs then end with
            labels [b, t] (-100 is not counted), and the head gives the loss of each token and whether it was predicted, both
            [b, t]. "auto": of all logits at once where they are not the very output of a linear layer; True is refused there.
        rows: of tokens in a sample, which are never parted: inputs are then [b, rows, t], and so are outputs in their first three
            dimensions, as a loss over preferences takes them.
        score: whether it is a reward model: a linear layer drawn anew, where the weights have none, gives one number for each row
            of tokens, of the features at its last label that is not -100. Outputs are [b], or [b, rows].
        config: keys of its configuration in the place of the folder's or the defaults.

    Raises:
        InputError: there is no such type, its configuration asks for what a chain does not do, it cannot be cut into layers,
            and why, or small layers of it do not compute what transformers' own do.
    """
    if (weights is None) == (type is None):
        raise InputError(
            "causal_lm: give either weights, a folder of save_pretrained or a name on Hugging Face, or type, as in type: qwen3"
        )
    return _cut("causal_lm", configured(weights, type, attention, trust_remote_code, config), extras, labels, rows, score=score)


def builder(kind: str, *, called: str = "layer") -> Callable[..., nn.Sequential]:
    """The function `build` of the models of one type, of which some sizes have names. `called`: what checkpoints and profiles
    call each of its layers."""

    def build(
        size: str | None = None,
        *,
        weights: str | None = None,
        attention: str = "sdpa",
        extras: Sequence[str] = ("attention_mask",),
        labels: bool | Literal["auto"] = False,
        rows: int = 1,
        score: bool = False,
        **config: Any,
    ) -> nn.Sequential:
        """A `causal_lm` of this type, with its arguments. `size`: one of those that have names, if no weights are given; the
        first by default. Code that lies in a folder does not run."""
        classes = classes_of(None, kind, None)
        settings, folder = configure(kind, classes.config, SIZES[kind], size, weights, attention, config)
        seed = drawn_seed()  # before small models draw: in earlier versions nothing else did
        with torch.random.fork_rng(devices=[]):
            found = Configured(kind, classes.model, settings, folder)
            return _cut(kind, found, extras, labels, rows, score=score, called=called, seed=seed)

    return build


def _cut(
    name: str,
    configured: Configured,
    extras: Sequence[str],
    labels: bool | Literal["auto"],
    rows: int,
    *,
    score: bool,
    called: str = "layer",
    seed: int | None = None,
) -> nn.Sequential:
    """The chain; `name`: of the job's model, for messages. InputError as in `build`."""
    kind, model_class, settings, folder = configured
    for extra in extras:
        if extra not in EXTRAS:
            raise InputError(f"{name}: unknown extra {extra!r}{nearest(extra, EXTRAS)}; known: {', '.join(EXTRAS)}")
    for key, reason in REFUSED.items():
        if getattr(settings, key, None):
            raise InputError(f"{name}: {key} is {shown(getattr(settings, key))}, which is not supported: {reason}")
    model = empty_model(model_class, settings, folder)
    try:
        small = tiny(model_class, settings)
        anatomy = anatomy_of(lambda: model_class(copy.deepcopy(settings)), form_of(model_class(copy.deepcopy(small))), extras)
    except CannotCutError as error:
        raise InputError(f"{name}: a model of type {kind!r} cannot be cut into layers: {error}") from None
    except InputError as error:
        raise InputError(f"{name}: a model of type {kind!r} is not cut into layers: {error}") from None
    _check_alike(name, kind, model_class, small)
    if score:
        model_class, anatomy, labels = *_scored(model_class, settings, anatomy), "auto"
        model = empty_model(model_class, settings, folder)
    if labels is True and anatomy.logits is None:
        raise InputError(
            f"{name}: the loss of a model of type {kind!r} cannot be computed a chunk of tokens at a time: its "
            "logits are not the very output of a linear layer (a cap or a scale comes after it, say). Leave 'fused' "
            "out, or write 'loss: {name: cross_entropy, fused: auto}'"
        )
    new = (f"{SCORE}.",) if score else ()
    found = chain(model, anatomy, folder, extras, labels=bool(labels), called=called, seed=seed, new=new)
    found[-1].scores = score  # type: ignore[assignment]
    if rows != 1:
        for layer in (found[0], found[-1]):
            layer.rows = rows  # type: ignore[assignment]
    return found


def _scored(model_class: Any, settings: Any, anatomy: Anatomy) -> tuple[Any, Anatomy]:
    """The class of the model with a score in the place of its logits, and its anatomy. InputError where there is none."""
    found, logits = scoring(model_class, settings)
    settings.num_labels = 1
    head = tuple(SCORE if path == logits else path for path in anatomy.head)
    return found, replace(anatomy, head=head, logits=SCORE, words=1)


def _check_alike(name: str, kind: str, model_class: Any, small: Any) -> None:
    """A chain of small layers computes what transformers' own model does. InputError where it does not, or where that cannot be
    found out."""
    key = model_class, small.to_json_string(use_diff=False)
    if key in _ALIKE:
        return
    try:
        found = compare(model_class, small)
    except Exception as error:  # whatever transformers says of so small a configuration
        raise InputError(
            f"{name}: whether a chain of type {kind!r} computes what transformers does could not be tried on a "
            f"small configuration: {one_line(error)}"
        ) from error
    if max(found) > REPLAY_TOLERANCE:
        raise InputError(
            f"{name}: a chain of type {kind!r} computes something else than transformers does: logits differ by "
            f"{found.logits:.1e}, gradients by {found.gradients:.1e} of the largest"
        )
    if not seen_ahead(model_class, small) < AHEAD:
        raise InputError(
            f"{name}: a model of type {kind!r} sees the tokens behind each one, and would learn to copy what it is to tell: "
            "where its configuration has is_decoder, write is_decoder: true in the model's args"
        )
    _ALIKE.add(key)
