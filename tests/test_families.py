"""A new family of transformers is one description in one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.checkpoints import checkpoint
from hetpipe.files.messages import InputError
from hetpipe.hf import families
from hetpipe.hf.chain import HFLayer
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.device import one_thread
from hetpipe.layers.weights import materialise
from hetpipe.planning import registry
from hetpipe.whatif.models import find_model
from tests.support.zoo import WORDS, batch
from tests.test_checkpoint import ALONE

from transformers import PersimmonForCausalLM, PreTrainedModel  # isort: skip  # offline, as tests.support.zoo sets it

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}


@pytest.fixture(autouse=True)
def _one_file_more(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tests/support/families/persimmon.py, as if it lay beside those of hetpipe."""
    more = Path(__file__).parent / "support" / "families"
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(more)])
    with one_thread(torch.device("cpu")):
        yield
    sys.modules.pop("hetpipe.hf.families.persimmon", None)


def reference_and_layers(folder: Path) -> tuple[PreTrainedModel, nn.Sequential]:
    """transformers' own, and the chain from the folder that it saved."""
    build = registry.model("persimmon")
    first: Any = build(**TINY)[0]
    torch.manual_seed(3)
    reference = PersimmonForCausalLM(first.origin.model.config)
    reference.save_pretrained(folder)
    layers = build(weights=str(folder))
    materialise(layers)
    return reference, layers


def test_it_is_a_model_of_jobs_with_the_bits_of_transformers(tmp_path: Path) -> None:
    assert "persimmon" in registry.model_names()
    reference, layers = reference_and_layers(tmp_path)
    assert [name for name, _ in layers.named_children()] == ["embed", "layer0", "layer1", "layer2", "head"]
    inputs, targets, arguments = batch("llama")
    for mode in (True, False):
        for model in (reference, layers):
            model.train(mode).zero_grad()
        torch.manual_seed(5)
        wanted = reference(**arguments, use_cache=False)
        wanted.loss.backward()
        torch.manual_seed(5)
        logits = layers(inputs)
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        assert torch.equal(logits, wanted.logits)
        for layer in layers:
            assert isinstance(layer, HFLayer)
            for name, parameter in layer.named_parameters():
                gradient = reference.get_parameter(layer.library_names[name]).grad
                assert gradient is not None
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, gradient), name


def test_its_trained_weights_go_back_to_a_folder(tmp_path: Path) -> None:
    _, layers = reference_and_layers(tmp_path / "folder")
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    layers(batch("llama")[0]).square().mean().backward()
    optimizer.step()
    saved = checkpoint.save(tmp_path / "saved", 1, layers, optimizer, {}, ALONE, keep=1)
    empty = registry.model("persimmon")(weights=str(tmp_path / "folder"))
    found = PersimmonForCausalLM.from_pretrained(export_weights(empty, saved, tmp_path / "out"))
    for layer in layers:
        assert isinstance(layer, HFLayer)
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, found.get_parameter(layer.library_names[name]))


def test_what_if_knows_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, layers = reference_and_layers(tmp_path)
    found = find_model(str(tmp_path))
    assert (found.family, found.vocabulary, found.source) == ("gpt", WORDS, "its config.json, model type persimmon")
    assert (found.sizes.layers, found.sizes.hidden, found.sizes.head_parameters) == (3, 32, 32 * WORDS)
    counted = sum(p.numel() for p in layers[1].parameters())
    assert found.sizes.layer_parameters == pytest.approx(counted, rel=0.06)  # but for biases
    monkeypatch.setattr(families, "__path__", families.__path__[:1])
    with pytest.raises(InputError, match=r"models of type 'persimmon' are not known; known: bert, bloom, camembert, cohere, "):
        find_model(str(tmp_path))
