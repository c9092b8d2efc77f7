"""A transformer of diffusers as a chain of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetpipe.building.datasets import Called
from hetpipe.diffusion.folder import PART, TransformerFolder
from hetpipe.files.messages import InputError
from hetpipe.layers.replay.chain import chain, chain_of
from hetpipe.layers.replay.values import Drawn

RETURN_DICT = "return_dict"


def build(called: Called, weights: str | None = None, part: str = PART, type: str | None = None, **config: Any) -> nn.Sequential:
    """A transformer of diffusers as a chain of its blocks, which takes a sample's tensors as data `latents` have them, and gives
    what the transformer predicts. Each rank reads the weights of its own layers.

    Args:
        called: with what it is called; a job's data say it.
        weights: its folder, or that of a pipeline, or a pipeline's name on Hugging Face.
        part: which transformer of the pipeline.
        type: of one without weights, which is drawn anew: the class of diffusers, `FluxTransformer2DModel`. Each rank draws
            all of it, and keeps the values of its own layers.
        config: keys of its configuration in the place of the type's defaults.
    """
    if (weights is None) == (type is None):
        raise InputError(
            "diffusion: give either weights, the folder of a transformer or of a pipeline, or type, as in type: "
            "FluxTransformer2DModel"
        )
    if weights is not None and config:
        raise InputError(f"diffusion: {next(iter(config))!r} is said by the folder of the weights: leave it out")
    folder = TransformerFolder.of(weights, part) if weights is not None else TransformerFolder.of_type(str(type), config)
    if called.made_for not in (None, folder.type_name):
        raise InputError(
            f"{folder.said} is a {folder.type_name}, and the data are made for a {called.made_for}, which may be told time "
            "otherwise: name the same in model.args and in data.args"
        )
    values = dict(called.values)
    if RETURN_DICT in folder.arguments:
        values[RETURN_DICT] = False
    if folder.path is not None:
        return chain(folder.empty(), values, called.alone, called.sizes, folder.path)[0]
    source = Drawn(folder.made, repr(sorted(folder.config.items())), int(torch.randint(1 << 31, (), device="cpu")))
    return chain_of(folder.empty(), values, called.alone, called.sizes, source)[0]
