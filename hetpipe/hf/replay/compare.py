"""Whether a chain is transformers' own model, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.hf.chain import HFLayer
from hetpipe.hf.replay.anatomy import EXTRAS, anatomy_of
from hetpipe.hf.replay.layers import chain
from hetpipe.hf.replay.tiny import TOKENS, WORDS
from hetpipe.hf.replay.trace import form_of
from hetpipe.layers.device import one_thread
from hetpipe.layers.transforms import tensors_of

SAMPLES = 3


class Difference(NamedTuple):
    """The greatest of logits and of gradients, relative to the greatest value; zero where all are the same bits."""

    logits: float
    gradients: float

    @property
    def none(self) -> bool:
        """Whether there is none."""
        return self == (0.0, 0.0)


def compare(model_class: Any, config: Any) -> Difference:
    """A chain of this configuration against transformers' own, with the same values: plain, with a mask of padding, with
    positions that begin anew. CannotCutError where it is no chain."""
    with warnings.catch_warnings(), one_thread(torch.device("cpu")), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        reference = model_class(copy.deepcopy(config)).eval()
        anatomy = anatomy_of(lambda: model_class(copy.deepcopy(config)), form_of(reference))
        found = []
        for name, given in _inputs(min(WORDS, config.get_text_config(decoder=True).vocab_size)).items():
            with torch.device("meta"):
                model = model_class(copy.deepcopy(config))
            layers = chain(model, anatomy, None, [name] if name else [])
            found.append(_difference(reference, _filled(layers, reference), given))
    return Difference(*(max(each) for each in zip(*found, strict=True)))


def _inputs(words: int) -> dict[str, dict[str, Tensor]]:
    tokens = torch.randint(min(3, words - 1), words, (SAMPLES, TOKENS))
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    positions = torch.arange(TOKENS).expand(SAMPLES, -1).clone()
    positions[1, 5:] -= 5
    found = {"": {}, EXTRAS[0]: {EXTRAS[0]: mask}, EXTRAS[1]: {EXTRAS[1]: positions}}
    return {name: {"input_ids": tokens, **more} for name, more in found.items()}


def _filled(layers: nn.Sequential, reference: nn.Module) -> nn.Sequential:
    """With the reference's values."""
    theirs = tensors_of(reference)
    for layer in layers:
        assert isinstance(layer, HFLayer)
        for own, name in layer.library_names.items():
            path, _, last = own.rpartition(".")
            module, value = layer.get_submodule(path), theirs[name].detach().clone()
            if (old := module._parameters.get(last)) is not None:
                module._parameters[last] = nn.Parameter(value, requires_grad=old.requires_grad)
            else:
                module._buffers[last] = value
    return layers.eval()


def _difference(reference: Any, layers: nn.Sequential, given: Mapping[str, Tensor]) -> Difference:
    tokens, *extras = given.values()
    wanted = reference(**given, use_cache=False).logits
    found = layers((tokens, *extras) if extras else tokens)
    weights = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
    own = dict[str, Tensor]()
    reference.zero_grad()
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    theirs = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False) if p.grad is not None}
    for layer in layers:
        assert isinstance(layer, HFLayer)
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                key = layer.origin.first_names[layer.library_names[name]]
                own[key] = own[key] + parameter.grad if key in own else parameter.grad
    strange = own.keys() - theirs.keys()
    lacking = {id(reference.get_parameter(name)) for name in theirs} - {id(reference.get_parameter(name)) for name in own}
    if strange or lacking:
        return Difference(0.0, float("inf"))
    return Difference(_relative(found, wanted), max((_relative(own[name], theirs[name]) for name in own), default=0.0))


def _relative(found: Tensor, wanted: Tensor) -> float:
    if torch.equal(found, wanted):
        return 0.0
    error, scale = (found - wanted).abs().max(), wanted.abs().max()
    return float(error / scale) if scale > 0 and error == error else float("inf")
