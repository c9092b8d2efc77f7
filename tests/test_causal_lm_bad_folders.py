"""Folders that are damaged, incomplete or of something else: one clear line each, before a step is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetpipe.layers.weights import materialise
from hetpipe.models import causal_lm
from tests.support.hub import QWEN, qwen

import transformers  # isort: skip

FILE = "model-00002-of-00003.safetensors"


def sharded(folder: Path) -> Path:
    torch.manual_seed(3)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN)).save_pretrained(folder, max_shard_size="50KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def truncate(folder: Path) -> None:
    file = shards(folder)[-1]
    file.write_bytes(file.read_bytes()[:-100])


def empty_shard(folder: Path) -> None:
    shards(folder)[0].write_bytes(b"")


def other_header(folder: Path) -> None:
    shards(folder)[0].write_bytes(b"\xff" * 4096)


def missing_shard(folder: Path) -> None:
    shards(folder)[0].unlink()


def missing_tensor(folder: Path) -> None:
    rewrite(folder / "model.safetensors.index.json", lambda c: c["weight_map"].pop("model.layers.1.mlp.up_proj.weight"))


def in_another_shard(folder: Path) -> None:
    """The index says so, and the file does not have it."""

    def change(content: dict[str, Any]) -> None:
        names = content["weight_map"]
        others = sorted(set(names.values()) - {names["model.norm.weight"]})
        names["model.norm.weight"] = others[0]

    rewrite(folder / "model.safetensors.index.json", change)


def outside(folder: Path) -> None:
    target = {"model.norm.weight": "../elsewhere.safetensors"}
    rewrite(folder / "model.safetensors.index.json", lambda c: c["weight_map"].update(target))


def other_config(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "config.json", lambda c: c.update({key: value}))


def more_layers(folder: Path) -> None:
    rewrite(folder / "config.json", lambda c: c.update(num_hidden_layers=4, layer_types=["full_attention"] * 4))


def quantised(folder: Path) -> None:
    """One tensor, in numbers of 8 bits."""
    file = shards(folder)[0]
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})


def no_type(folder: Path) -> None:
    rewrite(folder / "config.json", lambda c: c.pop("model_type"))


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (truncate, r"cannot read '\S+' from .*model-0\S+\.safetensors: "),
    (empty_shard, r"cannot read 'model\S+' from .*model-00001\S+\.safetensors: "),
    (other_header, r"cannot read 'model\S+' from .*model-00001\S+\.safetensors: "),
    (missing_shard, r"lacks \['model-00001-of-\d+\.safetensors'\], which its model.safetensors.index.json names"),
    (missing_tensor, r"has no 'model.layers.1.mlp.up_proj.weight': it does not hold the weights of a Qwen3ForCausalLM with this"),
    (in_another_shard, r"cannot read 'model.norm.weight' from .*safetensors: "),
    (outside, r"weight_map says that 'model.norm.weight' is in '../elsewhere.safetensors'; only files in this folder itself are"),
    (other_config("hidden_size", 64), r"'\S+' has shape \(\S+, 32\), and the model's configuration asks for \(\S+, 64\)"),
    (other_config("vocab_size", 300), r"'\S+' has shape \(256, 32\), and the model's configuration asks for \(300, 32\)"),
    (other_config("num_hidden_layers", 4), r"config.json: transformers refuses it: .*`num_hidden_layers` \(4\) must be equal"),
    (more_layers, r"has no 'model.layers.3.\S+': it does not hold the weights"),
    (other_config("model_type", "qwen99"), r"has no causal language model of type 'qwen99'"),
    (other_config("model_type", "vit"), r"has no causal language model of type 'vit'"),
    (quantised, r"'model\S+' is torch.float8_e4m3fn, and the model has floating-point numbers of 16 bits or more there: "),
    (other_config("quantization_config", {"quant_method": "fp8"}), r"its weights are quantised \('fp8'\), which are no numbers"),
    (no_type, r"has no causal language model of type 'None'"),
]


@pytest.mark.parametrize(("spoil", "message"), FAULTS, ids=[str(number) for number in range(len(FAULTS))])
def test_it_is_told_in_one_line(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "folder")
    spoil(folder)
    with pytest.raises(Exception, match=message) as caught:
        materialise(causal_lm.build(weights=str(folder)))
    assert type(caught.value).__name__ == "InputError"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_what_the_model_has_no_place_for_is_told(tmp_path: Path) -> None:
    """Llama has no norms of queries and keys; an old file may hold rotary frequencies, of which nothing is said."""
    from safetensors.torch import load_file, save_file

    folder = qwen(tmp_path / "folder")
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.rotary_emb.inv_freq": torch.ones(4)}, file, {"format": "pt"})
    causal_lm.build(weights=str(folder))
    other_config("model_type", "llama")(folder)
    message = r"LlamaForCausalLM with this configuration has no place for 'model.layers.0.self_attn.k_norm.weight' \(6 such\)"
    with pytest.warns(UserWarning, match=message):
        causal_lm.build(weights=str(folder))
