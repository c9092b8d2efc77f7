"""Stages split over several devices (tensor parallelism): layouts, rules and what is refused, checkpoints, and kinds of models.
That training is training on one device stands in test_transparency.py (the family "split")."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetpipe.files.messages import InputError
from hetpipe.layers.shards.layout import Cut
from hetpipe.layers.shards.split import check_split
from hetpipe.layers.shards.styles import Style, layout_of, set_styles, styles_of
from hetpipe.models import gpt, mlp
from tests.support.ranks import cluster_of, run_ranks
from tests.support.split_programs import (
    LANGUAGE,
    accumulated,
    compared,
    in_any_plan,
    in_half,
    language_model,
    refusals,
    saved_under,
    tried,
    tried_in,
)
from tests.support.wrong_rules import WRONG

# ---- cuts ----


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1), st.integers(1, 3))
def test_shards_make_the_whole_and_pieces_lie_in_shards(packed: int, degree: int, finer: int, dimension: int, other: int) -> None:
    """Of each way to cut; and the pieces of more devices are those of the shard in which they lie."""
    cut, count = Cut(dimension, packed), degree * finer
    shape = [other, other]
    shape[dimension] = packed * count * other
    tensor = torch.arange(shape[0] * shape[1]).view(*shape)
    shards = [cut.shard(tensor, j, degree) for j in range(degree)]
    assert torch.equal(cut.join(shards), tensor)
    assert all(cut.whole_shape(shard.shape, degree) == tuple(shape) for shard in shards)
    assert cut.divides(shape, count)
    assert packed * count == 1 or not cut.divides([n + 1 for n in shape], count)
    for j in range(count):
        own = cut.piece(shards[j // finer], j % finer, finer)
        assert torch.equal(own.flatten(), cut.piece(tensor, j, count).flatten())


def test_packed_matrices_are_each_cut() -> None:
    rows = torch.arange(12)
    assert Cut(0, 3).shard(rows, 0, 2).tolist() == [0, 1, 4, 5, 8, 9]
    assert Cut(0, 3).shard(rows, 1, 2).tolist() == [2, 3, 6, 7, 10, 11]
    assert Cut(0).shard(rows, 1, 2).tolist() == [6, 7, 8, 9, 10, 11]


# ---- rules ----


@pytest.mark.parametrize("text", ["colwise", "colwise:3", "colwise/8", "colwise:3/8", "colwise/2x4", "rowwise", "split_heads"])
def test_styles_are_read_as_they_are_written(text: str) -> None:
    assert str(Style.parse(text, "here")) == text


@pytest.mark.parametrize("text", ["", "col", "rowwise:3", "colwise:0", "colwise/", "colwise x2", "colwisex2", 3, None])
def test_what_is_no_style_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match=r"^here: .* is no style of tensor parallelism; there are colwise, rowwise, "):
        Style.parse(text, "here")


def test_a_layout_follows_from_styles() -> None:
    layers = gpt.build(layers=1, width=12, heads=3, context=4, vocabulary=5)
    attention, expand = layers[1], layers[2]
    layout = layout_of("a", attention, styles_of("a", attention), 3)
    assert layout.cut == {"query_key_value.weight": (0, 3), "query_key_value.bias": (0, 3), "project.weight": (1, 1)}
    assert layout_of("m", expand, styles_of("m", expand), 2).cut.keys() == {"expand.weight", "expand.bias", "project.weight"}
    with pytest.raises(InputError, match="layer 'a' cannot be split over 2 devices: 'query_key_value' has 3 units"):
        layout_of("a", attention, styles_of("a", attention), 2)
    assert styles_of("e", layers[0]) == {}


def test_a_job_says_how_layers_are_split() -> None:
    layers = nn.Sequential()
    for n in range(3):
        layers.add_module(f"block{n}", nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    set_styles(layers, {"block[01].0": "colwise", "block*.1": "rowwise"}, "tensor_parallel")
    assert [sorted(styles_of(name, layer)) for name, layer in layers.named_children()] == [["0", "1"], ["0", "1"], ["1"]]
    with pytest.raises(InputError, match=r"^tensor_parallel: 'layer\*' is no module of the model; its first are block0.0, "):
        set_styles(layers, {"layer*": "colwise"}, "tensor_parallel")
    with pytest.raises(InputError, match=r"^tensor_parallel of 'layer\*': 'cols' is no style"):
        set_styles(layers, {"layer*": "cols"}, "tensor_parallel")
    set_styles(mlp.build(layers=2, width=8), {"block1.down": "rowwise"}, "here")


# ---- models ----

SPLIT_FIRST: dict[str, Any] = {"cuts": [2, 2], "sizes": [3, 2], "widths": [2, 1]}
SPLIT_LAST: dict[str, Any] = {"cuts": [1, 3], "sizes": [2, 2], "widths": [1, 2]}
ALL, BESIDE = {"cuts": [4], "sizes": [3, 2], "widths": [4]}, {"cuts": [4], "sizes": [3]}
GPT = {"layers": 1, "width": 16, "heads": 4, "context": 8, "vocabulary": 32}
BERT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 32,
}
BERT |= {"max_position_embeddings": 8, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 32,
}
T5 |= {"dropout_rate": 0.0}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "attention": "sdpa"}
T5_FIRST, T5_LAST = ({"cuts": [3, 4], "sizes": [3, 2], "widths": widths} for widths in ([2, 1], [1, 2]))
T5_BESIDE, T5_ALL = {"cuts": [7], "sizes": [3]}, {"cuts": [7], "sizes": [3, 2], "widths": [4]}
ZOO = {
    "gpt": ("gpt", GPT, (SPLIT_FIRST, BESIDE)),
    "gpt, last": ("gpt", GPT, (SPLIT_LAST,)),
    "gpt, over four": ("gpt", GPT, (ALL,)),
    "mlp": ("mlp", {"layers": 2, "width": 16}, (SPLIT_FIRST, BESIDE)),
    "bert": ("bert", BERT, (SPLIT_FIRST, BESIDE)),
    "bert, over four, sdpa": ("bert", {**BERT, "attention": "sdpa"}, (ALL,)),
    "bert, LoRA": ("bert", {**BERT, "r": 2}, (SPLIT_LAST, BESIDE)),
    "t5": ("t5", T5, (T5_FIRST, T5_BESIDE)),
    "t5, last, gated": ("t5", {**T5, **GATED}, (T5_LAST, T5_BESIDE)),
    "t5, over four": ("t5", T5, (T5_ALL,)),
    "t5, LoRA": ("t5", {**T5, "r": 2}, (T5_FIRST, T5_BESIDE)),
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 4},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gemma": {"num_key_value_heads": 1, "head_dim": 4},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 4},
    "olmo2": {"num_key_value_heads": 2},
    "glm": {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0},
    "cohere": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2},
    "starcoder2": {"num_key_value_heads": 2},
    "llama, LoRA": {"num_key_value_heads": 2, "r": 2},
    "gemma, LoRA": {"num_key_value_heads": 1, "head_dim": 4, "r": 2},
    "gemma, DoRA": {"num_key_value_heads": 1, "head_dim": 4, "r": 2, "use_dora": True},
    "phi3, int8, DoRA": {"num_key_value_heads": 2, "pad_token_id": 0, "r": 2, "use_dora": True, "base": "int8"},
    "llama, nf4, DoRA": {"hidden_size": 128, "intermediate_size": 128, "r": 2, "use_dora": True, "base": "nf4"},
    "phi3, LoRA, sdpa": {"num_key_value_heads": 2, "pad_token_id": 0, "r": 2, "attention": "sdpa"},
    "smollm3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "opt, LoRA, over four": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, "r": 2},
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gemma, LoRA, over four": {"num_key_value_heads": 1, "head_dim": 4, "r": 2},
    "qwen2, over four": {"num_key_value_heads": 2, "num_attention_heads": 8},
    "qwen2, LoRA, over four, sdpa": {"num_key_value_heads": 2, "r": 2, "attention": "sdpa"},
    "qwen2, int8, DoRA, over four": {"num_key_value_heads": 2, "r": 2, "use_dora": True, "base": "int8"},
    "qwen3, over four": {"num_key_value_heads": 2, "head_dim": 4},
}
# Whatever their parameters are: sums in another order, or of the parts of a shared head, are seen in that.
NORMS_IN_FLOAT32 = ("gemma", "gemma2", "cohere", "qwen3, over four")

SIX = LANGUAGE | {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 24}


def language(kind: str) -> tuple[str, dict[str, Any], tuple[dict[str, Any], ...]]:
    options = LANGUAGE | ({} if "ffn_dim" in KINDS[kind] else {"intermediate_size": 24}) | KINDS[kind]
    return kind.partition(",")[0], options, (ALL,) if "over four" in kind else (SPLIT_FIRST, BESIDE)


# Of the others `make test-all` makes sure.
FIRST = ("llama", "qwen3", "gemma", "phi3", "llama, LoRA", "qwen2, LoRA, over four, sdpa", "llama, nf4, DoRA")


@functools.cache
def models(*kinds: str) -> list[dict[str, Any]]:
    """What each of five ranks found, of the zoo's models and these."""
    return run_ranks(compared, cluster_of(4, 1), {**ZOO, **{kind: language(kind) for kind in kinds}})


@pytest.mark.parametrize("name", [*ZOO, *(k if k in FIRST else pytest.param(k, marks=pytest.mark.thorough) for k in KINDS)])
def test_one_step_is_that_of_one_device(name: str) -> None:
    kinds = FIRST if name in FIRST or name in ZOO else tuple(kind for kind in KINDS if kind not in FIRST)
    found = [rank[name] for rank in models(*kinds) if name in rank]
    assert not [told for told in found if isinstance(told, str)]
    most = 1e-6 if name in NORMS_IN_FLOAT32 else 1e-10
    assert max(apart for apart, _, _ in found) < most
    assert max(abs(off) for _, off, _ in found) < most
    assert sum(shards > 0 for _, _, shards in found) >= 2, "nothing was split"


WIDTHS = {
    "bert": (BERT, 1, 3, "'layer0' cannot be split over 3 devices: 'layer.attention.self.query' has 4 units (heads) that"),
    "t5": (T5, 5, 8, "'decoder1' cannot be split over 8 devices: 'block.layer.0.SelfAttention.q' has 4 units (heads) that"),
    "qwen2": (SIX, 1, 3, "'layer.self_attn.k_proj' has 2 units (heads) that are not parted, and 3 heads share each. Plan"),
    "gemma": (SIX | {"num_key_value_heads": 1, "head_dim": 4}, 1, 4, "'layer.self_attn.q_proj' has 6 units (heads) that are"),
}


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_width_that_does_not_divide_heads_is_refused(kind: str) -> None:
    options, layer, degree, message = WIDTHS[kind]
    name, module = [*language_model(kind, options).named_children()][layer]
    with pytest.raises(InputError) as refused:
        check_split(name, module, degree)
    assert message in str(refused.value)


@pytest.mark.parametrize(("seed", "count"), [(1, 12), *(pytest.param(s, 50, marks=pytest.mark.thorough) for s in range(2, 6))])
def test_any_plan_ends_with_the_gradients_of_one_device(seed: int, count: int) -> None:
    """Groups of unlike width side by side, in any order that a schedule may have: no rank waits for ever."""
    assert max(run_ranks(in_any_plan, cluster_of(6), seed, count)) < 1e-10


# ---- wrong rules ----


@functools.cache
def wrong() -> list[dict[str, str | None]]:
    return run_ranks(tried, cluster_of(3), [*WRONG])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused_in_the_first_step(name: str) -> None:
    for told in (rank[name] for rank in wrong()):
        assert told is not None, "it trains"
        assert "layer '1'" in told


QUERY, OUTPUT = "layer.attention.self.query", "layer.attention.output.dense"
WRONG_IN = {
    "bert, queries and outputs exchanged": ("bert", BERT, SPLIT_FIRST, 1, {QUERY: "rowwise", OUTPUT: "colwise/4"}),
    "bert, whole keys": ("bert", BERT, SPLIT_FIRST, 1, {"layer.attention.self.key": None}),
    "bert, outputs that are not added up": ("bert", BERT, SPLIT_FIRST, 1, {"layer.output.dense": None}),
    "bert, keys that nobody shares": ("bert", BERT, SPLIT_FIRST, 1, {"layer.attention.self.key": "colwise/1x4"}),
    "t5, the bias of other heads": ("t5", T5, T5_FIRST, 2, {"own_heads": None}),
    "t5, whole values": ("t5", T5, T5_FIRST, 2, {"block.layer.0.SelfAttention.v": None}),
    "t5, an activation of a sum": ("t5", T5, T5_LAST, 5, {"block.layer.2.DenseReluDense.wi": "rowwise_split_input"}),
}


@functools.cache
def wrong_in() -> list[dict[str, str | None]]:
    return run_ranks(tried_in, cluster_of(3), WRONG_IN)


@pytest.mark.parametrize("name", WRONG_IN)
def test_a_wrong_rule_of_the_zoo_is_refused_in_the_first_step(name: str) -> None:
    layer = {1: "layer0", 2: "encoder1", 5: "decoder1"}[WRONG_IN[name][3]]
    for told in (rank[name] for rank in wrong_in()):
        assert told is not None, "it trains"
        assert f"layer '{layer}'" in told


# ---- half precision, and sums of several steps ----


def test_a_split_stage_computes_in_half_precision() -> None:
    """The look at how it is split, which runs layers whole and split, leaves no copies of weights behind."""
    half, full = (run_ranks(in_half, cluster_of(3), precision)[0]["losses"] for precision in ("bf16", None))
    assert half == pytest.approx(full, rel=0.03)
    assert half != full
    assert half[-1] < half[0]


def test_steps_that_add_up_are_one_batch() -> None:
    for found in run_ranks(accumulated, cluster_of(3, 1)):
        assert found["apart"] < 1e-10
        assert abs(found["norm"]) < 1e-10


# ---- checkpoints ----


@pytest.mark.parametrize(("first", "then"), [("wide", "narrow"), ("narrow", "wide"), ("wide", "other")])
def test_a_checkpoint_goes_from_width_to_width(first: str, then: str, tmp_path: Path) -> None:
    ranks = run_ranks(saved_under, cluster_of(3), str(tmp_path), first, then)
    before, after, norm = ranks[0]["saved"]
    loaded, later, other_norm = ranks[0]["loaded"]
    assert before.keys() == loaded.keys()
    assert all(torch.equal(before[name], loaded[name]) for name in before)
    assert max(float((after[name] - later[name]).abs().max()) for name in after) < 1e-10
    assert norm == pytest.approx(other_norm, rel=1e-12)
    assert len([*tmp_path.glob("step-*/*.safetensors")]) >= 1


# ---- refusals ----


@pytest.fixture(scope="module")
def refused() -> list[dict[str, str]]:
    return run_ranks(refusals, cluster_of(3))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads", "layer '1' cannot be split over 2 devices: 'three' has 5 units"),
        ("parts", "the outputs of 'three' are 12 in 4 parts"),
        ("no module", "tensor_parallel of 'four': the layer has no such module; it has "),
        ("no linear", "tensor_parallel of 'norm': it is a LayerNorm, and only torch.nn.Linear is split"),
        (
            "blocks",
            "'up.base_layer' is held in few bits, 64 numbers by one scale, and a part would have 48 numbers one after the",
        ),
        (
            "blocks",
            "which are no whole scales. Plan a stage with this layer over another number of devices, or write adapter.base",
        ),
        ("rows", "'down' is held in few bits, 64 numbers by one scale, and a part would have 48 numbers of each row"),
        ("no style", "'diagonal' is no style of tensor parallelism"),
    ],
)
def test_what_cannot_be_split_is_refused_on_every_rank(refused: list[dict[str, str]], name: str, message: str) -> None:
    assert all(message in rank[name] for rank in refused)


@pytest.mark.parametrize("name", ["RowNorms", "ByOptions", "AllTogether", "Adafactor", "Muon"])
def test_an_optimizer_that_looks_at_more_than_single_numbers_is_refused(refused: list[dict[str, str]], name: str) -> None:
    """By the ranks that have shards; one that has whole parameters may use it."""
    assert [f"the optimizer '{name}'" in rank[name] for rank in refused] == [True, True, False]


def test_a_shard_gives_no_state_and_is_split_once(refused: list[dict[str, str]]) -> None:
    assert ["has shards of tensors only" in rank["state"] for rank in refused] == [True, True, False]
    assert all("is one of 2 shards of itself" in rank["again"] for rank in refused)
