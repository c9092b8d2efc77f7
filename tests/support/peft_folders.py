"""Folders of small models and of their adapters, as transformers and peft write them, and what peft makes of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hetpipe import adapt
from hetpipe.layers.model import as_tuple
from hetpipe.layers.recipe import make_stage
from hetpipe.models import causal_lm
from tests.support.adapted import SIZES, tokens
from tests.support.zoo import WORDS

import transformers  # isort: skip  # offline, as tests.support.zoo sets it

_OTHERS: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "tied": ("Llama", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SIZES),
    "phi3": ("Phi3", SIZES | _OTHERS | {"original_max_position_embeddings": 32}),
    "gpt2": ("GPT2", _OTHERS | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}),
}


def base_of(name: str, folder: Path, seed: int = 4) -> Path:
    """A small model of a kind."""
    torch.manual_seed(seed)
    kind, sizes = BASES[name]
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**sizes)).save_pretrained(folder)
    return folder


def plain(base: Path, dtype: torch.dtype = torch.float64) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


def peft_folder(base: Path, folder: Path, **config: Any) -> Path:
    """Adapters beside a model, as peft makes and saves them; what trains was moved a little."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of tied matrices and of what it saves unasked
        made = get_peft_model(plain(base, torch.float32), LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **config}))
        draw = torch.Generator().manual_seed(2)
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
        made.save_pretrained(str(folder))
    return folder


def changed(
    folder: Path, config: Callable[[dict[str, Any]], object] = dict, tensors: Callable[[dict[str, Tensor]], object] = dict
) -> Path:
    """The folder, with something done to what its files hold."""
    file, held = folder / "adapter_config.json", load_file(folder / "adapter_model.safetensors")
    said = json.loads(file.read_text())
    config(said)
    tensors(held)
    file.write_text(json.dumps(said))
    save_file(held, folder / "adapter_model.safetensors")
    return folder


def with_peft(model: nn.Module, folder: Path, **options: Any) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, folder, **options)


def chain_of(model: Path, folder: Path | str, **options: Any) -> nn.Sequential:
    """The model as a chain, with the adapters of a folder, on the meta device."""
    return adapt(causal_lm.build(weights=str(model), extras=[]), weights=str(folder), **options).to(torch.float64)


def logits_by_stages(make: Callable[[], nn.Sequential], cut: int = 2) -> Tensor:
    """Of a chain in two stages, each built for itself as a rank builds it."""
    given: tuple[Tensor, ...] = (tokens(),)
    for first in (True, False):
        layers = make()
        stage = (make_stage(layers, 0, cut) if first else make_stage(layers, cut, len(layers))).eval()
        with torch.no_grad():
            given = as_tuple(stage(*given))
    return given[0]
