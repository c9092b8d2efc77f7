"""Any causal language model of transformers as a chain, by one rule (hetpipe/hf/replay): the same bits, or a reason why not. What
the chains do over unequal stages and replicas is in test_zoo.py."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.files.messages import InputError
from hetpipe.hf.chain import HFLayer
from hetpipe.hf.replay.anatomy import anatomy_of
from hetpipe.hf.replay.classes import causal_lm_of
from hetpipe.hf.replay.compare import compare
from hetpipe.hf.replay.layers import chain
from hetpipe.hf.replay.skeleton import Anatomy
from hetpipe.hf.replay.tiny import tiny as small
from hetpipe.hf.replay.trace import CannotCutError, form_of
from hetpipe.layers.device import one_thread
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.layers.weights import materialise
from hetpipe.planning import registry
from tests.support.zoo import WORDS

import transformers  # isort: skip  # offline, as tests.support.zoo sets it

TYPES = (
    "bloom",
    "cohere",
    "falcon",
    "gemma2",
    "gemma3_text",
    "git",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "jetmoe",
    "mamba",
    "mamba2",
    "mixtral",
    "modernbert-decoder",
    "mpt",
    "olmoe",
    "openai-gpt",
    "phi3",
    "qwen3_5",
    "qwen3_moe",
    "recurrent_gemma",
    "smollm3",
    "whisper",
)


def tiny(kind: str) -> tuple[Any, Any]:
    """A model's class, and a small configuration of it."""
    model_class, config = causal_lm_of(transformers.CONFIG_MAPPING[kind]())
    return model_class, small(model_class, config)


def cut(make: Callable[[], Any]) -> Anatomy:
    """What belongs where in a model that is small itself."""
    return anatomy_of(make, form_of(make()))


@pytest.mark.parametrize("kind", TYPES)
def test_logits_and_gradients_are_transformers_own_bits(kind: str) -> None:
    """Plain, with a mask, with positions that begin anew: scales of embeddings, positions by slopes, sliding windows, caps,
    experts, tied heads, states in place of attention, tables beside the list of layers, layers that return lists, ways to draw
    values that ask for values, towers for images, the part of a model that is for text."""
    assert compare(*tiny(kind)).none


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hrm_text", "its layers are not called once each, in their order"),
        ("glm_moe_dsa", "what layer 1 is given depends on values of the layers before"),
        ("deepseek_v4", r"layer 0 is given more than features that depend on values \(input_ids\)"),
        ("blt", "its forward asks for values of tensors, and its layers are found by a run without values"),
        ("inkling2_text", r"layer 1 is given more than features that depend on values \(argument 1\)"),
        ("mllama", "not all of its layers are called"),
        ("rwkv", "its forward changes the values of 'rwkv.blocks.0.attention.output.weight'"),
    ],
)
def test_what_is_no_chain_is_refused_with_the_reason(kind: str, reason: str) -> None:
    model_class, config = tiny(kind)
    with pytest.raises(CannotCutError, match=reason):
        cut(lambda: model_class(config))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("beside", "a parameter of 'model' is in no layer, and neither before nor after them"),
        ("between", "something is computed between layers 0 and 1"),
        ("memory", "what it computes after the last layer depends on more than that layer gives"),
        ("skipped", "not all of its layers are called"),
    ],
)
def test_a_forward_that_does_more_is_noticed(change: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as somebody changed it."""
    model_class, config = tiny("llama")

    def forward(
        self: Any,
        input_ids: Any = None,
        inputs_embeds: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: bool = False,
    ) -> Any:
        first = hidden = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        angles = self.model.rotary_emb(hidden, position_ids=position_ids)
        for layer in self.model.layers[: 2 if change == "skipped" else None]:
            hidden = layer(hidden, position_embeddings=angles)
            hidden = hidden * 2 if change == "between" else hidden
        hidden = hidden + first if change == "memory" else hidden
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(self.model.norm(hidden)))

    def make() -> Any:
        model = model_class(copy.deepcopy(config))
        if change == "beside":
            model.model.more = torch.nn.Parameter(torch.zeros(3))
        return model

    monkeypatch.setattr(model_class, "forward", forward)
    with pytest.raises(CannotCutError, match=reason):
        cut(make)


@pytest.mark.parametrize("training_only", [False, True])
def test_what_no_token_comes_through_is_kept_and_not_trained(training_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless training calls it."""
    model_class, config = tiny("llama")
    forward = model_class.forward

    def make() -> Any:
        model = model_class(copy.deepcopy(config))
        model.model.tower = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
        return model

    @functools.wraps(forward)
    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            self.model.tower(torch.zeros(3))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(model_class, "forward", calling if training_only else forward)
    if training_only:
        with pytest.raises(CannotCutError, match=r"'model.tower' is called in training only"):
            cut(make)
        return
    anatomy = cut(make)
    assert anatomy.idle == ("model.tower",)
    with torch.device("meta"):
        layers = list(chain(make(), anatomy, None, []))
    assert {name for name, p in layers[0].named_parameters() if not p.requires_grad} == {
        f"tower.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    }
    assert all(p.requires_grad for layer in layers[1:] for p in layer.parameters())


def test_a_chain_is_built_to_be_trained() -> None:
    layers = registry.model("causal_lm")(type="gpt2", n_embd=32, n_head=4, n_layer=2, vocab_size=WORDS, n_positions=WORDS)
    assert [name for name, module in layers.named_modules() if not module.training] == []


def test_a_configuration_may_ask_for_tuples() -> None:
    layers: Any = registry.model("causal_lm")(type="gpt2", n_embd=32, n_head=4, n_layer=2, vocab_size=WORDS, return_dict=False)
    materialise(layers)
    assert layers(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, WORDS)
    assert layers[0].origin.model.config.return_dict is False


NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}


@pytest.mark.parametrize(
    ("kind", "key", "most", "sizes"),
    [
        ("gpt2", "n_positions", 4, {"n_embd": 32, "n_layer": 2, "n_head": 4}),  # fewer than small models are tried with
        ("gpt_neo", "max_position_embeddings", 40, NEO),
    ],
)
def test_no_sample_is_longer_than_the_positions_that_were_learned(kind: str, key: str, most: int, sizes: dict[str, Any]) -> None:
    layers = registry.model("causal_lm")(type=kind, vocab_size=WORDS, **{key: most}, **sizes)
    materialise(layers)
    assert layers(torch.zeros(1, most, dtype=torch.int64)).shape == (1, most, WORDS)
    with pytest.raises(
        ValueError, match=f"^{kind}: a sample has {most + 1} tokens, the model's {key} is {most}: shorten the samples$"
    ):
        layers(torch.zeros(1, most + 1, dtype=torch.int64))


def test_drawing_a_table_draws_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that holds it holds the whole model, which may be larger than a machine."""
    sizes = {"hidden_size": 32, "lru_width": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4}
    layers: Any = registry.model("causal_lm")(type="recurrent_gemma", num_hidden_layers=3, vocab_size=WORDS, **sizes)
    drawn = list[str]()
    model_class = type(layers[0].origin.model)
    own = model_class._init_weights

    def drawing(self: Any, module: Any) -> None:
        drawn.append(type(module).__name__)
        own(self, module)

    monkeypatch.setattr(model_class, "_init_weights", drawing)
    value = layers[1].values(["normalizer"])["normalizer"]
    assert drawn == ["RecurrentGemmaModel"]
    assert value == pytest.approx(layers[0].origin.model.config.hidden_size ** 0.5)


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral", "qwen3_moe", "granite", "gpt2"])
def test_values_come_from_a_folder_by_transformers_own_conversions(kind: str, tmp_path: Path) -> None:
    """Mixtral's files hold each expert for itself, GPT-NeoX's the head by another name."""
    model_class, config = tiny(kind)
    torch.manual_seed(3)
    reference = model_class(config)
    reference.save_pretrained(tmp_path)
    layers = registry.model("causal_lm")(weights=str(tmp_path))
    assert all(p.is_meta for p in layers.parameters())
    materialise(layers)
    theirs = tensors_of(reference)
    for layer in layers:
        assert isinstance(layer, HFLayer)
        for own, tensor in tensors_of(layer).items():
            assert torch.equal(tensor, theirs[layer.library_names[own]]), own
    tokens = torch.randint(WORDS, (2, 7))
    with one_thread(torch.device("cpu")), torch.no_grad():
        assert torch.equal(layers.eval()(tokens), reference.eval()(tokens, use_cache=False).logits)


def test_a_layer_that_is_computed_again_draws_the_same_dropout(tmp_path: Path) -> None:
    """What layers are given is computed once for those that follow each other, and draws no random numbers."""
    layers = registry.model("causal_lm")(
        type="opt",
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        vocab_size=WORDS,
        dropout=0.3,
    )
    materialise(layers)
    layers.train()
    hidden = layers[0](torch.randint(WORDS, (2, 7))).detach()
    torch.manual_seed(1)
    first = layers[1](hidden)
    torch.manual_seed(1)
    assert torch.equal(layers[1](hidden), first)
    torch.manual_seed(1)
    after = layers[2](first)
    torch.manual_seed(1)
    assert torch.equal(layers[2](first.clone()), after), "what the layer before left on its output is not needed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either weights, a folder of save_pretrained or a name on Hugging Face, or type"),
        ({"type": "qwen33"}, r"has no causal language model of type 'qwen33'; did you mean 'qwen3'\?"),
        ({"type": "qwen3", "extras": ["mask"]}, "unknown extra 'mask'"),
        ({"type": "qwen3", "hidden_sise": 3}, "has no 'hidden_sise'; did you mean 'hidden_size'"),
        ({"type": "opt", "layerdrop": 0.1}, "layerdrop is 0.1, which is not supported: layers would be left out at random"),
        ({"type": "mixtral", "output_router_logits": True}, "output_router_logits is True, which is not supported: the loss"),
        ({"type": "xmod", "is_decoder": True}, "'xmod' is not cut into layers: .*: Input language unknown"),
        ({"type": "hrm_text"}, "a model of type 'hrm_text' cannot be cut into layers: its layers are not called once each"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, ValueError), match=message):
        registry.model("causal_lm")(**arguments)


def test_a_model_with_few_positions_is_a_chain() -> None:
    """Fewer than the run without values has."""
    registry.model("causal_lm")(
        type="opt",
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        vocab_size=WORDS,
        max_position_embeddings=16,
    )


def test_what_a_sample_has_and_nobody_names_is_told() -> None:
    """It was left out in silence."""
    layers = registry.model("causal_lm")(
        type="opt",
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        vocab_size=WORDS,
    )
    materialise(layers)
    tokens = torch.randint(WORDS, (2, 7))
    mask, positions = torch.ones_like(tokens), torch.arange(7).expand(2, -1)
    with pytest.raises(ValueError, match=r"has 2 tensors beside its tokens, and the model names 1 \(attention_mask\)"):
        layers((tokens, mask, positions))


def test_a_tensor_of_another_shape_or_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model_class, config = tiny("mixtral")
    model_class(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = next(name for name in whole if "experts.2" in name)
    save_file({**whole, name: whole[name][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(InputError, match="cannot be made of"):
        materialise(registry.model("causal_lm")(weights=str(tmp_path)))
    save_file({key: value for key, value in whole.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"cannot be made of|has shape"):
        materialise(registry.model("causal_lm")(weights=str(tmp_path)))
    save_file({**whole, "model.norm.weight": whole["model.norm.weight"][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"'model.norm.weight' has shape \(63,\), and the model's .* for \(64,\)"):
        materialise(registry.model("causal_lm")(weights=str(tmp_path)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_are_traced_and_computed_in_each_type(dtype: torch.dtype) -> None:
    """Torch has a grouped product of neither float64 nor tensors without values."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_local_experts": 4}
    layers = registry.model("causal_lm")(type="mixtral", num_key_value_heads=2, vocab_size=WORDS, **sizes)
    layers.to(dtype)
    tokens = torch.randint(WORDS, (2, 9))
    assert trace_boundaries(layers, tokens)[-1][0].shape == (2, 9, WORDS)
    materialise(layers)
    reference = type(layers[0].origin.model)(copy.deepcopy(layers[0].origin.model.config)).to(dtype)
    reference.set_experts_implementation("eager")
    theirs = tensors_of(reference)
    with torch.no_grad():
        for layer in layers:
            for own, value in tensors_of(layer).items():
                theirs[layer.library_names[own]].copy_(value)
        found, wanted = layers.eval()(tokens), reference.eval()(tokens, use_cache=False).logits
    assert float((found - wanted).abs().max()) < (1e-5 if dtype == torch.float32 else 1e-12)


def test_how_a_folder_says_it_is_computed_is_nobodys_word(tmp_path: Path) -> None:
    """Some such names fetch code that was compiled elsewhere."""
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=WORDS,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    told = {
        **json.loads((tmp_path / "config.json").read_text()),
        "attn_implementation": "flex_attention",
        "experts_implementation": "nobodys/kernel",
    }
    (tmp_path / "config.json").write_text(json.dumps(told))
    own = registry.model("causal_lm")(weights=str(tmp_path))[0].origin.model.config
    plain = transformers.Qwen3ForCausalLM(config).config
    assert (own._attn_implementation, own._experts_implementation) == (plain._attn_implementation, plain._experts_implementation)


def test_a_model_that_sees_what_it_is_to_tell_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
    with pytest.raises(InputError, match="of type .bert. sees the tokens behind each one, .* write is_decoder: true"):
        registry.model("causal_lm")(type="bert", **sizes)
    registry.model("causal_lm")(type="bert", is_decoder=True, **sizes)


def test_widths_like_the_sizes_of_the_run_are_no_sizes_of_a_batch() -> None:
    layers = registry.model("causal_lm")(type="gpt2", n_embd=37, n_head=1, n_layer=2, vocab_size=41, n_positions=WORDS)
    materialise(layers)
    for shape in ((2, 10), (1, 1), (37, 41)):
        assert layers(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 41)
