"""Whether a model tells samples in a row apart by positions that begin anew. Some of transformers do not, without a word: their
masks, their slopes or their states go on from one sample to the next."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from hetpipe.files.messages import InputError
from hetpipe.layers.device import one_thread

LENGTHS = (5, 7)  # of two samples in a row
ROUNDING = 1e-4  # by which sums in another order may differ, of the largest


def refuse_mixing(model_class: Any, config: Any) -> None:
    """InputError if a small causal language model of transformers, of this configuration, gives other logits for two samples in a
    row than for each by itself."""
    with warnings.catch_warnings(), one_thread(torch.device("cpu")), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = model_class(copy.deepcopy(config)).eval()
        words = int(model.get_input_embeddings().weight.shape[0])
        tokens = [torch.randint(words // 2, words, (1, length)) for length in LENGTHS]
        places = [torch.arange(length)[None] for length in LENGTHS]
        alone = [model(input_ids=own, position_ids=at, use_cache=False).logits for own, at in zip(tokens, places, strict=True)]
        row = model(input_ids=torch.cat(tokens, 1), position_ids=torch.cat(places, 1), use_cache=False).logits
    wanted = torch.cat(alone, 1)
    difference = float((row - wanted).abs().max() / wanted.abs().max())
    if not difference < ROUNDING:
        raise InputError(
            f"the data gives positions, which begin anew where samples are packed into a row, and a model of type "
            f"{config.model_type!r} does not tell such apart: with small layers, logits differ by {difference:.1e} of the "
            "largest from those of single samples. Take data with pack: false"
        )
