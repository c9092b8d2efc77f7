"""A transformer of diffusers as a chain of layers."""

from __future__ import annotations

from torch import nn

from hetpipe.building.datasets import Called
from hetpipe.diffusion.folder import PART, TransformerFolder
from hetpipe.files.messages import InputError
from hetpipe.layers.replay.chain import chain

RETURN_DICT = "return_dict"


def build(weights: str, called: Called, part: str = PART) -> nn.Sequential:
    """A transformer of diffusers as a chain of its blocks, which takes a sample's tensors as data `latents` have them, and gives
    what the transformer predicts. Each rank reads the weights of its own layers.

    Args:
        weights: its folder, or that of a pipeline, or a pipeline's name on Hugging Face.
        called: with what it is called; a job's data say it.
        part: which transformer of the pipeline.
    """
    folder = TransformerFolder.of(weights, part)
    if called.made_for not in (None, folder.type_name):
        raise InputError(
            f"{folder.path} is a {folder.type_name}, and the data are made for a {called.made_for}, which may be told time "
            "otherwise: name the same folder in model.args.weights and in data.args.weights"
        )
    values = dict(called.values)
    if RETURN_DICT in folder.arguments:
        values[RETURN_DICT] = False
    return chain(folder.empty(), values, called.alone, called.sizes, folder.path)[0]
