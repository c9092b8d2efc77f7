"""Whether a model sees only what it should of a row of tokens, found on a small one of its kind: no padding behind a sample, no
sample beside it in a packed row. Some of transformers do see it, without a word: they look ahead, or their masks, their slopes
or their states go on from one sample to the next."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hetpipe.files.messages import InputError
from hetpipe.layers.device import one_thread

LENGTHS = (5, 7)  # of two samples in a row
TOLERANCE = 1e-4  # by which sums in another order may differ, of the largest


class Limit(NamedTuple):
    """A number of tokens of which a model's configuration says something: `value`, and in the small one `small`."""

    key: str
    value: int
    small: int


def refuse_mixing(model_class: Any, config: Any, limits: Sequence[Limit] = ()) -> None:
    """InputError if a small causal language model of transformers, of this configuration, gives other logits for two samples in a
    row, whose positions begin anew, than for each by itself: for short samples, and for one on either side of each limit."""
    with _small(model_class, config) as (model, words):
        for limit in (None, *limits):
            lengths = LENGTHS if limit is None else (LENGTHS[0], limit.small + LENGTHS[1])
            tokens = [torch.randint(words // 2, words, (1, length)) for length in lengths]
            places = [torch.arange(length)[None] for length in lengths]
            alone = [
                model(input_ids=own, position_ids=at, use_cache=False).logits for own, at in zip(tokens, places, strict=True)
            ]
            row = model(input_ids=torch.cat(tokens, 1), position_ids=torch.cat(places, 1), use_cache=False).logits
            if not (difference := _difference(row, torch.cat(alone, 1))) < TOLERANCE:
                both = f", of which some have more than {limit.value} tokens ({limit.key}) and others have not" if limit else ""
                raise InputError(
                    f"the data packs samples into rows, with positions that begin anew for each, but a model of type "
                    f"{config.model_type!r} does not tell the samples of a row apart{both}: with small layers, logits differ by "
                    f"{difference:.1e} of the largest from those of single samples. Take data with pack: false"
                )


def switch_of(config: Any) -> Limit | None:
    """Return the length behind which the positions of all samples in a micro-batch change: the rotary positions of the types
    longrope and dynamic have other frequencies as soon as one sample is longer. None where there is no such length."""
    own = config.get_text_config()
    parts = getattr(own, "rope_parameters", None) or {}
    for given in (parts, *(part for part in parts.values() if isinstance(part, dict))):
        kind = given.get("rope_type")
        limits = given if kind == "longrope" else vars(own)
        most = limits.get("original_max_position_embeddings" if kind == "longrope" else "max_position_embeddings")
        if kind in ("longrope", "dynamic") and isinstance(most, int):
            return Limit(f"its positions are of the type {kind}", most, most)
    return None


def refuse_switch(config: Any, reach: tuple[int, int]) -> None:
    """InputError if samples in rows have from so few to so many tokens, and `switch_of` the model lies between."""
    limit = switch_of(config)
    if limit is not None and reach[0] <= limit.value < reach[1]:
        raise InputError(
            f"the data packs samples of {reach[0]} to {reach[1]} tokens into rows, but in a model of type {config.model_type!r} "
            f"the positions of all samples of a micro-batch change as soon as one of them has more than {limit.value} tokens "
            f"({limit.key}). So the output of a sample would depend on those beside it. Take data with pack: false, or a "
            "length of "
            f"{limit.value} at most"
        )


def note_of_switch(config: Any, shortest: int, size: int) -> str | None:
    """What is said where samples from so few tokens on are padded to as many as `size`, and `switch_of` the model lies between:
    every plan trains as transformers does on a padded batch, whose longest sample then counts for all."""
    limit = switch_of(config)
    if limit is None or not shortest <= limit.value < size:
        return None
    return (
        f"note: in a model of type {config.model_type!r} the positions of all samples of a step change as soon as one of "
        f"them is padded to more than {limit.value} tokens ({limit.key}), as in transformers: what a short one gives hangs "
        f"on the longest of its step. A length of {limit.value} at most keeps them as they are"
    )


def refuse_looking_ahead(model_class: Any, config: Any) -> None:
    """InputError if a small causal language model of transformers, of this configuration, gives other logits for a sample with
    other tokens behind it."""
    if not (difference := seen_ahead(model_class, config)) < TOLERANCE:
        raise InputError(
            f"the data pads samples without a mask. Only a causal model ignores such padding, and a model of type "
            f"{config.model_type!r} is not causal: with small layers, logits of a sample differ by {difference:.1e} of the "
            "largest "
            "by the padding behind it. Take data with mask: true"
        )


def refuse_strange(config: Any, data: Any) -> None:
    """InputError if data has words, or is longer, than a causal language model of transformers of this configuration knows.
    (Data that does not say what it has is not looked at.)"""
    words, positions, own = getattr(data, "words", None), getattr(data, "positions", None), config.get_text_config()
    if words is not None and words > own.vocab_size:
        raise InputError(
            f"the tokenizer gives token numbers up to {words - 1} (padding included), but the model of type "
            f"{config.model_type!r} knows {own.vocab_size} tokens (vocab_size). Take the tokenizer of the model, or a model with "
            "as many tokens"
        )
    most = getattr(own, "max_position_embeddings", None)
    if positions is not None and isinstance(most, int) and positions > most > 0:
        raise InputError(
            f"samples are {positions} tokens long, but the model of type {config.model_type!r} has positions for {most} "
            "(max_position_embeddings). Give the data a smaller length, or, if the model can use more positions, raise them "
            "in its args"
        )


def seen_ahead(model_class: Any, config: Any) -> float:
    """Return by how much the logits of a small model change, relative to the largest, when other tokens follow."""
    with _small(model_class, config) as (model, words):
        tokens = torch.randint(words // 2, words, (1, sum(LENGTHS)))
        other = tokens.clone()
        other[:, LENGTHS[0] :] -= words // 2
        seen = [model(input_ids=given, use_cache=False).logits[:, : LENGTHS[0]] for given in (tokens, other)]
    return _difference(*seen)


@contextmanager
def _small(model_class: Any, config: Any) -> Iterator[tuple[Any, int]]:
    """A model of random values, and how many words it knows."""
    with warnings.catch_warnings(), one_thread(torch.device("cpu")), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = model_class(copy.deepcopy(config)).eval()
        yield model, int(model.get_input_embeddings().weight.shape[0])


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())
