"""The weights of a checkpoint of any causal language model, written as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoints import checkpoint
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.hf.folder import WeightFolder
from hetpipe.layers.device import one_thread
from hetpipe.layers.weights import materialise
from hetpipe.planning import registry
from hetpipe.processes.world import alone
from tests.support.zoo import WORDS
from tests.test_causal_lm import tiny

TYPES = ("deepseek_v3", "diffllama", "gemma2", "gpt_neox", "gpt_oss", "mixtral", "olmo2", "phi3", "qwen2_moe", "qwen3_moe")


def saved_model(folder: Path, kind: str) -> tuple[Any, Path]:
    """A small model of transformers in `folder`/source, and a checkpoint of a chain of it, trained by a step."""
    model_class, config = tiny(kind)
    torch.manual_seed(3)
    reference = model_class(config)
    reference.save_pretrained(folder / "source")
    layers = registry.model("causal_lm")(weights=str(folder / "source"))
    materialise(layers)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    return reference, checkpoint.save(folder / "saved", 1, layers, optimizer, {}, alone(), keep=1)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1 << 14], ids=["one file", "some files"])
@pytest.mark.parametrize("kind", TYPES)
def test_names_are_those_of_save_pretrained(kind: str, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's files hold each expert for itself, and the model's layers all in one tensor; a tied head is not written."""
    monkeypatch.setattr("hetpipe.hf.exports.export.SHARD_BYTES", shard_bytes)
    reference, saved = saved_model(tmp_path, kind)
    generation = {"do_sample": True, "temperature": 0.5}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(generation))
    empty = registry.model("causal_lm")(weights=str(tmp_path / "source"))
    out = export_weights(empty, saved, tmp_path / "out")
    assert all(p.is_meta for p in empty.parameters())
    assert (len([*out.glob("*.safetensors")]) > 1) == (shard_bytes < 1 << 20)
    wanted, found = WeightFolder(tmp_path / "source"), WeightFolder(out)
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found.read(name), wanted.read(name)) for name in wanted)
    assert json.loads((out / "generation_config.json").read_text()) == generation
    loaded, info = type(reference).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.randint(WORDS, (2, 7))
    with one_thread(torch.device("cpu")), torch.no_grad():
        one, other = (model.eval()(tokens, use_cache=False).logits for model in (loaded, reference))
    assert torch.equal(one, other)


def test_no_more_than_a_file_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers are turned around, and no more of them at a time than a file holds."""
    _, saved = saved_model(tmp_path, "mixtral")
    seen = list[set[str]]()

    def as_stored(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(set(tensors))
        return tensors

    monkeypatch.setattr("hetpipe.hf.exports.export.as_stored", as_stored)
    monkeypatch.setattr("hetpipe.hf.exports.export.SHARD_BYTES", 1)
    export_weights(registry.model("causal_lm")(weights=str(tmp_path / "source")), saved, tmp_path / "out")
    assert len(seen) == 5
    assert all(name.startswith("model.layers.1.") for name in seen[2])


def test_a_conversion_that_cannot_be_turned_around_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, saved = saved_model(tmp_path, "mixtral")

    def revert(model: Any, tensors: Any) -> Any:
        raise NotImplementedError("no way back")

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", revert)
    layers = registry.model("causal_lm")(weights=str(tmp_path / "source"))
    with pytest.raises(InputError, match="cannot write the weights of a MixtralForCausalLM as save_pretrained does: no way back"):
        export_weights(layers, saved, tmp_path / "out")
