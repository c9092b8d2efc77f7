"""Small models of transformers, batches for them, and what the ranks of `test_zoo.py` run."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import (
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
    T5ForConditionalGeneration,
)

from hetpipe.checkpoints import checkpoint
from hetpipe.documents.plan import Backend
from hetpipe.hf.chain import HFLayer
from hetpipe.layers.model import Loss, LossWeight, Tensors, cross_entropy
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.weights import empty_names
from hetpipe.models import bert, causal_lm, gpt2, llama, t5
from hetpipe.processes.whereabouts import describe_with
from hetpipe.processes.world import World
from tests.support.jobs import STATE
from tests.support.ranks import make_plan
from tests.support.resident import fill_stage
from tests.support.transparency import open_engine

LIBRARIES: tuple[Backend, ...] = ("fairscale", "torchgpipe")
WORDS, SAMPLES, LENGTH, LABELS = 64, 6, 10, 5


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """`cuts`: layers of three stages. `dropout`: the keys of the configuration that turn it off."""

    build: Callable[..., nn.Sequential]
    config: dict[str, Any]
    cuts: tuple[int, int, int]
    dropout: tuple[str, ...]
    weight: LossWeight = "tokens"

    def loss(self) -> Loss:
        return Loss(function=cross_entropy, weight=self.weight)

    def without_dropout(self) -> dict[str, Any]:
        return {**self.config, **dict.fromkeys(self.dropout, 0.0)}


ZOO = {
    "gpt2": Zoo(
        build=gpt2.build,
        cuts=(1, 3, 1),
        dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        config={"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": WORDS, "n_positions": 16},
    ),
    "llama": Zoo(
        build=llama.build,
        cuts=(2, 2, 1),
        dropout=("attention_dropout",),
        config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": WORDS,
            "max_position_embeddings": 32,
            "attention_dropout": 0.1,
        },
    ),
    "qwen3": Zoo(
        build=causal_lm.build,
        cuts=(1, 2, 2),
        dropout=("attention_dropout",),
        config={
            "type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": WORDS,
            "max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        },
    ),
    "opt": Zoo(
        build=causal_lm.build,
        cuts=(2, 1, 2),
        dropout=("dropout", "attention_dropout"),
        config={
            "type": "opt",
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 24,
            "vocab_size": WORDS,
            "max_position_embeddings": 32,
        },
    ),
    "bert": Zoo(
        build=bert.build,
        cuts=(1, 1, 3),
        dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
        weight="samples",
        config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": WORDS,
            "max_position_embeddings": 16,
            "num_labels": LABELS,
        },
    ),
    "t5": Zoo(
        build=t5.build,
        cuts=(2, 4, 2),
        dropout=("dropout_rate",),
        config={
            "d_model": 32,
            "d_ff": 48,
            "d_kv": 8,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "vocab_size": WORDS,
        },
    ),
}


KINDS: dict[str, type[PreTrainedModel]] = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "opt": OPTForCausalLM,
    "bert": BertForSequenceClassification,
    "t5": T5ForConditionalGeneration,
}


def batch(name: str, step: int = 0, *, padded: bool = True, masked: bool = True) -> tuple[Tensors, Tensor, dict[str, Tensor]]:
    """Inputs and targets for the layers, and the arguments of transformers' forward that mean the same."""
    draw = torch.Generator().manual_seed(7 + step)
    words = torch.randint(2, WORDS, (SAMPLES, LENGTH), generator=draw)
    mask = torch.ones_like(words)
    if padded:
        mask[1, 6:], mask[4, 3:] = 0, 0
    given = {"input_ids": words, **({"attention_mask": mask} if masked else {})}
    inputs = (words, mask) if masked else words
    if name == "bert":
        targets = torch.randint(LABELS, (SAMPLES,), generator=draw)
        return inputs, targets, {**given, "labels": targets}
    labels = torch.randint(2, WORDS, (SAMPLES, LENGTH - (3 if name == "t5" else 0)), generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
    if name == "t5":
        target = nn.functional.pad(labels[:, :-1], (1, 0)).clamp(min=0)  # behind the start token; padding for -100
        return (words, mask, target), labels, {**given, "attention_mask": mask, "labels": labels}
    return inputs, nn.functional.pad(labels[:, 1:], (0, 1), value=-100), {**given, "labels": labels}


def transformers_model(name: str, config: dict[str, Any], attention: str = "sdpa") -> PreTrainedModel:
    """transformers' own model of this configuration, with random weights, and without the cache of a generation, in which T5
    has its numbers in another order."""
    torch.manual_seed(3)
    layer = ZOO[name].build(attention=attention, **config)[0]
    assert isinstance(layer, HFLayer)
    settings = copy.deepcopy(layer.origin.model.config)
    settings.use_cache = False
    return KINDS[name](settings)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class LowRank(nn.Module):
    """A linear layer with an adapter, as peft puts one in its place: the names are peft's."""

    def __init__(self, linear: nn.Linear, device: str = "cpu") -> None:
        super().__init__()
        self.base_layer = linear.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(linear.in_features, 2, bias=False, device=device)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, linear.out_features, bias=False, device=device)})

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return output


def adapted(device: str = "cpu", **arguments: Any) -> nn.Sequential:
    """A llama with adapters in the attention of each layer."""
    torch.manual_seed(4)
    layers = llama.build(**arguments)
    for name, module in list(layers.named_modules()):
        if name.endswith(("q_proj", "v_proj")):
            owner, _, own = name.rpartition(".")
            setattr(layers.get_submodule(owner), own, LowRank(module, device))
    return layers


def compiled(layers: nn.Sequential) -> nn.Sequential:
    """Every second layer compiled, and the attention in the others."""
    for index, (name, layer) in enumerate(list(layers.named_children())):
        if index % 2 == 0:
            setattr(layers, name, torch.compile(layer, backend="eager"))
        elif hasattr(layer, "layer"):
            inner: Any = layer.layer
            inner.self_attn = torch.compile(inner.self_attn, backend="eager")
    return layers


def train_wrapped(world: World, folder: str) -> dict[str, Any]:
    """A step of a llama with adapters and compiled layers, and what the engine has before and after a checkpoint."""
    layers = compiled(adapted(weights=folder)).to(torch.float64)
    inputs, targets, _ = batch("llama")
    plan = make_plan([{"cuts": ZOO["llama"].cuts, "sizes": [3, 1, 2]}], model="llama")
    engine = open_engine(world, plan, layers, inputs, targets, ZOO["llama"].loss())
    optimizer = optimizer_of(engine.trained_parameters())
    loss = engine.step(inputs, targets)
    optimizer.step()
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    names = [name for name, _ in engine.named_parameters()]
    saved = checkpoint.save(Path(folder).with_name("wrapped"), 1, engine.stage, optimizer, STATE, world, 1)
    engine.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    zeros = all(not tensor.any() for tensor in engine.state_dict().values())
    checkpoint.load(saved, engine.stage, optimizer, world, whole=layers)
    back = all(torch.equal(tensor, state[name]) for name, tensor in engine.state_dict().items())
    engine.close()
    return {"loss": loss, "state": state, "names": names, "checkpoint": str(saved), "zeros": zeros, "back": back}


def train_zoo(world: World, folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Each model from its folder, three steps over three stages, a checkpoint; what this rank holds then. And the memory that a
    stage of a larger one takes."""
    larger = gpt2.build(n_layer=8, n_embd=512, n_head=8, vocab_size=16_000)
    found: dict[str, dict[str, Any]] = {"memory": fill_stage(larger, *((0, 2), (2, 8), (8, 10))[world.rank])}
    for name, folder in folders.items():
        describe_with(f"device {world.device_id}, {name}")
        saved = Path(folder).with_name(f"{name}-checkpoints")
        found[name] = _train(world, name, folder, "torch", saved)
        found[name]["otherwise"] = {way: _train(world, name, folder, *WAYS[way]) for way in ways_of(name)}
    found["wrapped"] = train_wrapped(world, folders["llama"])
    return found


WAYS: dict[str, tuple[Any, ...]] = {
    "recomputed": ("torch",),
    "two replicas": ("torch", None, True),
    **{backend: (backend,) for backend in LIBRARIES},
}


def ways_of(name: str) -> list[str]:
    """In which other ways a model trains: two of the four, by turns."""
    at = list(ZOO).index(name)
    return [list(WAYS)[(at + step) % len(WAYS)] for step in (0, 1)]


def _train(
    world: World, name: str, folder: str, backend: Backend, saved: Path | None = None, two_replicas: bool = False
) -> dict[str, Any]:
    """Three steps and a checkpoint, or, where none is wanted, with all stages recomputed; or over two unlike replicas. Nothing on
    a rank without a part."""
    zoo = ZOO[name]
    rows: list[dict[str, Any]] = [{"cuts": zoo.cuts, "sizes": [3, 1, 2], "recompute": saved is None}]
    if two_replicas:
        first, *others = zoo.cuts
        rows = [
            {"cuts": [first, sum(others)], "sizes": [2, 1], "devices": ["n0/0", "n0/1"]},
            {"cuts": [sum(zoo.cuts)], "sizes": [1, 2], "devices": ["n0/2"]},
        ]
    plan = make_plan(rows, model=name, schedule="1f1b" if backend == "torch" else "gpipe")
    layers = zoo.build(weights=folder, **dict.fromkeys(zoo.dropout, 0.0)).to(torch.float64)
    inputs, targets, _ = batch(name)
    engine = open_engine(world, plan, layers, inputs, targets, zoo.loss(), backend=backend)
    if engine is None:
        return {"losses": [], "state": {}}
    held = [n for n, layer in layers.named_children() if not empty_names(layer)]
    optimizer, losses = optimizer_of(engine.parameters()), []
    for step in range(3):
        inputs, targets, _ = batch(name, step)
        losses.append(engine.step(engine.share(inputs), engine.share(targets)))
        optimizer.step()
    state = {f"{n}.{own}": t for n, part in engine.stage.named_children() for own, t in tensors_of(part).items()}
    found: dict[str, Any] = {"losses": losses, "held": held, "state": {name: tensor.detach() for name, tensor in state.items()}}
    if saved is not None:
        found["checkpoint"] = str(checkpoint.save(saved, 3, engine.stage, optimizer, STATE, world, 1))
    engine.close()
    return found
