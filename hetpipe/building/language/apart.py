"""Whether a model sees only what it should of a row of tokens, found on a small one of its kind: no padding behind a sample, no
sample beside it in a packed row. Some of transformers do see it, without a word: they look ahead, or their masks, their slopes
or their states go on from one sample to the next."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.device import one_thread
from hetpipe.layers.model import Tensors, as_tuple

LENGTHS = (5, 7)  # of two samples in a row
ROUNDING = 1e-4  # by which sums in another order may differ, of the largest


def refuse_mixing(model_class: Any, config: Any) -> None:
    """InputError if a small causal language model of transformers, of this configuration, gives other logits for two samples in a
    row, whose positions begin anew, than for each by itself."""
    with _small(model_class, config) as (model, words):
        tokens = [torch.randint(words // 2, words, (1, length)) for length in LENGTHS]
        places = [torch.arange(length)[None] for length in LENGTHS]
        alone = [model(input_ids=own, position_ids=at, use_cache=False).logits for own, at in zip(tokens, places, strict=True)]
        row = model(input_ids=torch.cat(tokens, 1), position_ids=torch.cat(places, 1), use_cache=False).logits
    if not (difference := _difference(row, torch.cat(alone, 1))) < ROUNDING:
        raise InputError(
            f"the data gives positions, which begin anew where samples are packed into a row, and a model of type "
            f"{config.model_type!r} does not tell such apart: with small layers, logits differ by {difference:.1e} of the "
            "largest from those of single samples. Take data with pack: false"
        )


def refuse_looking_ahead(model_class: Any, config: Any) -> None:
    """InputError if a small causal language model of transformers, of this configuration, gives other logits for a sample with
    other tokens behind it."""
    if not (difference := seen_ahead(model_class, config)) < ROUNDING:
        raise InputError(
            f"the data pads samples without a mask, which only a causal model does not see, and a model of type "
            f"{config.model_type!r} is none: with small layers, logits of a sample differ by {difference:.1e} of the largest by "
            "what is behind it. Take data with mask: true"
        )


def refuse_strange(config: Any, data: Any) -> None:
    """InputError if data has words, or is longer, than a causal language model of transformers of this configuration knows.
    (Data that does not say what it has is not looked at.)"""
    words, positions, own = getattr(data, "words", None), getattr(data, "positions", None), config.get_text_config()
    if words is not None and words > own.vocab_size:
        raise InputError(
            f"the tokenizer gives numbers up to {words - 1} (that of padding among them), and the model of type "
            f"{config.model_type!r} knows {own.vocab_size} words (vocab_size): take the tokenizer of the model, or a model with "
            "as many words"
        )
    most = getattr(own, "max_position_embeddings", None)
    if positions is not None and isinstance(most, int) and positions > most > 0:
        raise InputError(
            f"samples are {positions} tokens long, and the model of type {config.model_type!r} has positions for {most} "
            "(max_position_embeddings): give the data a smaller length, or the model more in its args, where it can do with more"
        )


def extras_of(layers: nn.Sequential) -> tuple[str, ...] | None:
    """What a model takes beside tokens, by name; None where its layers do not say so."""
    every = (getattr(layer, "extras", None) for layer in layers)
    return next((own for own in every if isinstance(own, tuple)), None)


def masked_first(inputs: Tensors, names: Sequence[str] | None) -> Tensor:
    """The order of a batch's rows, int64 [b], that puts those first for which a model of transformers makes a mask: whose
    positions begin anew, or in which a mask leaves tokens out. A micro-batch with such a row has a mask for all of its rows, each
    of the square of its length, and a micro-batch without one has none, so it is by such rows that a model must be measured.
    `names`: as in DataSplits."""
    rows, masked = as_tuple(inputs), torch.zeros(len(as_tuple(inputs)[0]), dtype=torch.bool)
    for name, given in zip(names or (), rows, strict=False):
        if name == "position_ids" and given.ndim == 2:
            masked |= (given.diff() != 1).any(1)
        elif name == "attention_mask" and given.ndim == 2:
            masked |= (given == 0).any(1)
    return masked.logical_not().to(torch.int64).argsort(stable=True)


def seen_ahead(model_class: Any, config: Any) -> float:
    """By how much, of the largest, logits of a small model differ that has other tokens behind them."""
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
