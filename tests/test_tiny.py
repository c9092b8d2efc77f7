"""A small configuration of the same kind (hetpipe/hf/replay/tiny.py)."""

from __future__ import annotations

from typing import Any

import pytest

from hetpipe.files.messages import InputError
from hetpipe.hf.replay.classes import causal_lm_of
from hetpipe.hf.replay.tiny import tiny
from tests.support.zoo import WORDS

import transformers  # isort: skip  # offline, as tests.support.zoo sets it


def made(kind: str, **values: Any) -> Any:
    """The small configuration of a type with these values."""
    return tiny(*causal_lm_of(transformers.CONFIG_MAPPING[kind](**values)))


def test_sizes_that_belong_together_stay_together() -> None:
    small = made("mamba2")
    assert small.num_heads * small.head_dim == small.expand * small.hidden_size < 300
    small = made("xlnet")
    assert small.n_head * small.d_head == small.d_model
    small = made("llama", num_attention_heads=32, num_key_value_heads=8)
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 2), "four heads share keys, as before"


def test_what_is_cut_into_sections_keeps_its_width() -> None:
    """As many factors as a head has frequencies."""
    factors = [1.0] * 48
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    small = made("phi3", rope_parameters=rope)
    assert small.hidden_size // small.num_attention_heads == 96
    assert small.rope_parameters["short_factor"] == factors


def test_layers_of_each_sort_stay_and_what_is_said_of_each() -> None:
    small = made("qwen3_next")
    assert small.layer_types == ["linear_attention"] * 2 + ["full_attention"] * 2
    small = made("gemma4_text")
    assert small.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2
    values = small.to_dict()
    assert list(map(int, values["per_layer_config"])) == [2, 3]
    assert all(what["head_dim"] == 2 * values["head_dim"] for what in values["per_layer_config"].values()), "as before"


def test_switches_scales_and_caps_stay() -> None:
    given = {"embedding_multiplier": 12.0, "logits_scaling": 3.0, "attention_multiplier": 0.1, "attention_bias": True}
    small = made("granite", vocab_size=50_000, **given)
    assert {key: getattr(small, key) for key in given} == given
    assert (small.num_hidden_layers, small.vocab_size) == (3, WORDS)


def test_sizes_that_are_open_are_filled_where_transformers_needs_them() -> None:
    assert made("nemotron", num_key_value_heads=None).num_key_value_heads == made("nemotron").num_attention_heads
    assert made("llama", head_dim=None).to_dict()["head_dim"] == made("llama").head_dim


def test_what_transformers_does_not_run_is_told() -> None:
    with pytest.raises(InputError, match="transformers runs no small model of this configuration: Input language unknown"):
        made("xmod")
