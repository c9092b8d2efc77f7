"""gpt2 and llama once had chains of their own. Their layers, tensors and drawn values are what they were then, so that
checkpoints, profiles and plans of then go on."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.state_tensors import state_keys
from hetpipe.hf.chain import HFLayer
from hetpipe.layers.model import named_layers
from hetpipe.layers.weights import materialise
from tests.support.zoo import ZOO, batch, optimizer_of, transformers_model
from tests.test_checkpoint import ALONE

EARLIER = {  # of a parameter in transformers' model → in the chain of then
    "gpt2": (
        (r"^transformer\.h\.(\d+)\.(.*)", r"block\1.block.\2"),
        (r"^transformer\.(wte|wpe)\.(.*)", r"embed.\1.\2"),
        (r"^transformer\.(ln_f)\.(.*)", r"head.\1.\2"),
        (r"^lm_head\.(.*)", r"head.lm_head.\1"),
    ),
    "llama": (
        (r"^model\.layers\.(\d+)\.(.*)", r"layer\1.layer.\2"),
        (r"^model\.(embed_tokens)\.(.*)", r"embed.\1.\2"),
        (r"^model\.(norm)\.(.*)", r"head.\1.\2"),
        (r"^lm_head\.(.*)", r"head.lm_head.\1"),
    ),
}


def earlier(name: str, inside: str) -> str:
    """What a parameter of transformers' model was called."""
    (found,) = [re.sub(pattern, called, inside) for pattern, called in EARLIER[name] if re.match(pattern, inside)]
    return found


def chain_of_then(name: str, model: nn.Module) -> nn.Sequential:
    """Modules with the parameters of transformers' own model under the names of then, for a checkpoint of them."""
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for inside, parameter in model.named_parameters(remove_duplicate=False):
        *path, last = earlier(name, inside).split(".")
        module: Any = children.setdefault(path[0], nn.Module())
        for part in path[1:]:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(last, parameter)
    return nn.Sequential(children)


@pytest.mark.parametrize("name", EARLIER)
def test_layers_and_tensors_are_called_as_then(name: str) -> None:
    layers, layer = ZOO[name].build(**ZOO[name].config), {"gpt2": "block", "llama": "layer"}[name]
    assert [called for called, _ in named_layers(layers)] == ["embed", *(f"{layer}{index}" for index in range(3)), "head"]
    for called, each in named_layers(layers):
        assert isinstance(each, HFLayer)
        for own, _ in each.named_parameters():
            assert f"{called}.{own}" == earlier(name, each.library_names[own])


@pytest.mark.parametrize("name", EARLIER)
def test_a_run_goes_on_from_a_checkpoint_of_then(name: str, tmp_path: Path) -> None:
    """transformers' own model, trained on, has the same losses."""
    model = transformers_model(name, ZOO[name].without_dropout()).double().train()
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(5):
        if step == 2:
            saved = checkpoint.save(tmp_path, step, chain_of_then(name, model), optimizer, {"steps": step}, ALONE, keep=1)
        _, targets, arguments = batch(name, step)
        del arguments["labels"]
        loss = ZOO[name].loss().function(model(**arguments, use_cache=False).logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    layers = ZOO[name].build(**ZOO[name].without_dropout()).to(torch.float64)
    materialise(layers)
    again = optimizer_of(layers.parameters())
    checkpoint.load(saved, layers, again, ALONE, whole=layers, keeps=state_keys(optimizer_of))
    for step in range(2, 5):
        inputs, targets, _ = batch(name, step)
        loss = ZOO[name].loss().function(layers(inputs), targets)
        again.zero_grad()
        loss.backward()
        again.step()
        assert float(loss.detach()) == pytest.approx(losses[step], abs=1e-10, rel=0)


@pytest.mark.parametrize("name", EARLIER)
def test_values_are_drawn_from_the_seed_of_then(name: str) -> None:
    """Nothing that looks at the model draws before, or moves the numbers that are drawn behind it."""
    torch.manual_seed(5)
    layers = ZOO[name].build(**ZOO[name].config)
    behind = torch.rand(3)
    torch.manual_seed(5)
    first: Any = layers[0]
    assert first.origin.seed == int(torch.randint(1 << 31, ()))
    assert torch.equal(torch.rand(3), behind)
