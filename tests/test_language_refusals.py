"""What does not fit together of texts and a model, or of a data set's own arguments: told before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"

import hetpipe
from hetpipe import InputError
from hetpipe.hf.replay.build import build
from hetpipe.hf.replay.rows import refuse_mixed_rows
from hetpipe.hf.replay.tiny import limits_of, tiny
from hetpipe.language.conversations import chat, instructions
from hetpipe.layers.trials.apart import note_of_switch, refuse_looking_ahead, refuse_mixing, refuse_strange, refuse_switch
from tests.support.chats import chat_of, lines, refusal, tokenizer
from tests.support.ranks import make_plan

import transformers  # isort: skip


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer(tmp_path_factory.mktemp("chatml"))


def test_wrong_arguments_are_named(chatml: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "chats.jsonl", [chat_of("Hello", "Yes.")])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "none").mkdir()
    (tmp_path / "whole.json").write_text('[{"prompt": 1},')
    good: dict[str, Any] = {"file": file, "tokenizer": chatml}
    faults: list[tuple[dict[str, Any], str]] = [
        ({"file": str(tmp_path / "chat.jsonl")}, f"there is no file or folder '{tmp_path / 'chat.jsonl'}' (from "),
        ({"file": str(tmp_path / "none")}, f"the folder {tmp_path / 'none'} holds no file that ends in .jsonl, .json, .parquet"),
        ({"file": str(tmp_path / "empty.jsonl")}, f"{tmp_path / 'empty.jsonl'} holds no records"),
        ({"file": str(tmp_path / "whole.json")}, f"{tmp_path / 'whole.json'} is not valid JSON: line 1, column 16"),
        ({"file": 5}, "file must be a file, a folder, a data set of the hub, or a list of files, found 5"),
        ({"tokenizer": str(tmp_path / "nowhere")}, f"there is no folder '{tmp_path / 'nowhere'}' with a tokenizer (from "),
        ({"tokenizer": str(tmp_path / "none")}, f"cannot load the tokenizer '{tmp_path / 'none'}': "),
        ({"tokenizer": 3}, "tokenizer must be a folder of save_pretrained, or a name on the hub, found 3"),
        ({"tokenizer": tokenizer(tmp_path / "plain", None)}, "has no template of chats. Name a file with one (template: FI"),
        ({"length": 0}, "chat: length must be an integer of at least 1, got 0"),
        ({"limit": 0}, "chat: limit must be an integer of at least 1, got 0"),
        ({"too_long": "cut"}, "unknown too_long 'cut'"),
        ({"turns": "first"}, "unknown turns 'first'"),
        ({"test_fraction": 1}, "test_fraction must be from 0 to below 1, got 1"),
        ({"pack": True, "mask": True}, "pack: true and mask: true exclude each other: with a mask, models do not tell the"),
        ({"pack": True, "sizes": [8]}, "pack: true makes rows of one length (2048), so sizes have no use"),
        ({"sizes": [0]}, "chat: each of sizes must be an integer of at least 1, got 0"),
        ({"sizes": [4, 2]}, "the largest of sizes is 4, but the longest sample has "),
        ({"sizes": []}, "the largest of sizes is missing, but the longest sample has "),
    ]
    for changes, said in faults:
        assert said in refusal(chat, **{**good, **changes}), changes
    ends = tokenizer(tmp_path / "endless", None, eos_token=None)
    assert "names no token that ends a text (eos_token)" in refusal(instructions, file=file, tokenizer=ends)


@pytest.mark.parametrize(
    ("kind", "apart"), [("qwen3", True), ("gemma2", True), ("mamba", False), ("bloom", False), ("opt", False)]
)
def test_a_model_that_does_not_tell_samples_in_a_row_apart_is_refused(kind: str, apart: bool) -> None:
    """They would be trained on each other, without a word."""
    config = transformers.CONFIG_MAPPING[kind]
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]
    small = tiny(model_class, config())
    if apart:
        refuse_mixing(model_class, small)
        return
    said = refusal(refuse_mixing, model_class=model_class, config=small)
    assert f"a model of type '{kind}' does not tell the samples of a row apart: with small layers, logits differ by " in said


def test_own_loops_refuse_such_a_model_for_a_sample_with_packed_rows() -> None:
    """As jobs do. Only positions that begin anew in a row ask for it."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    opt = build(type="opt", extras=("position_ids",), ffn_dim=16, word_embed_proj_dim=16, **sizes)
    qwen = build(type="qwen3", extras=("position_ids",), intermediate_size=16, head_dim=8, num_key_value_heads=2, **sizes)
    tokens, one_row = torch.randint(50, (1, 8)), torch.arange(8)[None]
    refuse_mixed_rows(opt, (tokens, one_row))
    refuse_mixed_rows(qwen, (tokens, one_row % 4))
    refuse_mixed_rows(nn.Sequential(nn.Linear(2, 2)), (tokens, one_row % 4))
    plan = make_plan([{"cuts": [len(opt)], "sizes": [1]}])
    with pytest.raises(InputError, match="a model of type 'opt' does not tell the samples of a row apart"):
        hetpipe.wrap(opt, plan, (tokens, one_row % 4), nn.functional.cross_entropy)


def configuration(kind: str, **values: Any) -> Any:
    made: Any = transformers.CONFIG_MAPPING[kind]
    return made(**values)


def longrope(kind: str, positions: int = 4096) -> Any:
    factors = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    return configuration(
        kind,
        original_max_position_embeddings=positions,
        max_position_embeddings=131072,
        rope_scaling={"type": "longrope", **factors},
    )


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (longrope("phi3"), 4096),
        (longrope("phi3", 512), 512),
        (configuration("llama", max_position_embeddings=2048, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 2048),
        (configuration("qwen2", max_position_embeddings=300, rope_scaling={"rope_type": "dynamic", "factor": 4.0}), 300),
        (
            configuration(
                "gemma3_text",
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {
                        "rope_type": "longrope",
                        "rope_theta": 1e6,
                        "factor": 8.0,
                        "short_factor": [1.0],
                        "long_factor": [2.0],
                        "original_max_position_embeddings": 1000,
                    },
                },
            ),
            1000,
        ),
    ],
)
def test_rows_with_samples_on_either_side_of_what_positions_hang_on_are_refused(config: Any, limit: int) -> None:
    """All positions of a micro-batch are others where one sample in it is longer."""
    refuse_switch(config, (3, limit))
    refuse_switch(config, (limit + 1, 4 * limit))
    for reach in ((3, limit + 1), (limit, limit + 1), (1, 100 * limit)):
        said = refusal(refuse_switch, config=config, reach=reach)
        assert f"as soon as one of them has more than {limit} tokens" in said
        assert f"Take data with pack: false, or a length of {limit} at most" in said
    assert note_of_switch(config, 3, limit) is note_of_switch(config, limit + 1, 4 * limit) is None
    assert f"is padded to more than {limit} tokens" in str(note_of_switch(config, limit, limit + 1))


def test_samples_are_tried_on_either_side_of_what_a_configuration_names() -> None:
    """Of a type that nobody has told of, too."""
    config, model_class = longrope("phi3"), transformers.Phi3ForCausalLM
    small = tiny(model_class, config)
    refuse_mixing(model_class, small, limits_of(config, small, (3, 4096)))
    limits = limits_of(config, small, (3, 5000))
    assert {limit.value for limit in limits} == {4096}
    said = refusal(refuse_mixing, model_class=model_class, config=small, limits=limits)
    assert "does not tell the samples of a row apart, of which some have more than 4096 tokens (" in said


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "qwen3"])
def test_samples_are_tried_on_either_side_of_a_window(kind: str) -> None:
    config = configuration(kind, sliding_window=128)
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    small = tiny(model_class, config)
    limits = limits_of(config, small, (10, 300))
    assert all(limit.key == "sliding_window" for limit in limits)
    refuse_mixing(model_class, small, limits)


@pytest.mark.parametrize(("kind", "causal"), [("qwen3", True), ("mamba", True), ("bert", False)])
def test_padding_without_a_mask_is_for_causal_models(kind: str, causal: bool) -> None:
    config = transformers.CONFIG_MAPPING[kind]
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]
    small = tiny(model_class, config())
    if causal:
        refuse_looking_ahead(model_class, small)
        return
    said = refusal(refuse_looking_ahead, model_class=model_class, config=small)
    assert (
        "Only a causal model ignores such padding, and a model of type 'bert' is not causal: with small layers, logits of a "
        in said
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pack": "no"}, "pack is 'no': write true or false, without quotes"),
        ({"mask": 1}, "mask is 1: write true or false, without quotes"),
        ({"sizes": "64"}, "sizes must be a list of whole numbers, such as [256, 1024], got '64'"),
        ({"sizes": 64}, "sizes must be a list of whole numbers, such as [256, 1024], got 64"),
        ({"test_fraction": "0.1"}, "test_fraction must be a number from 0 to below 1, got '0.1'"),
    ],
)
def test_arguments_of_other_types_are_told(chatml: str, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    file = lines(tmp_path / "chats.jsonl", [chat_of("Hello", "Yes.")])
    assert refusal(chat, file=file, tokenizer=chatml, **arguments) == message


@pytest.mark.parametrize(("begin", "kind"), [(b"\x1f\x8b", "packed by gzip"), ("{}".encode("utf-16"), "UTF-16")])
def test_files_that_are_packed_or_encoded_otherwise_are_told(chatml: str, tmp_path: Path, begin: bytes, kind: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_bytes(begin + b"\n" * 50)
    assert refusal(chat, file=str(file), tokenizer=chatml) == f"{file} is {kind}. Give it as plain UTF-8"


def test_words_and_positions_that_the_model_does_not_know_are_told(chatml: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "chats.jsonl", [chat_of("Hello", "Yes. " * 30)] * 3)
    single, rows = (chat(file, chatml, 200, pack=pack, test_fraction=0).train for pack in (False, True))
    longest, words = int(single.lengths.max()), single.words  # type: ignore[attr-defined]
    assert (single.positions, rows.positions, rows.words) == (longest, longest, words)  # type: ignore[attr-defined]
    assert words == 1 + max(int(single[0][0].max()), single.pad)  # type: ignore[attr-defined]
    for data in (single, rows):
        refuse_strange(transformers.Qwen3Config(vocab_size=words, max_position_embeddings=longest), data)
        said = refusal(refuse_strange, config=transformers.Qwen3Config(vocab_size=words - 1), data=data)
        assert f"gives token numbers up to {words - 1} (padding included), but the model of type 'qwen3' knows " in said
        said = refusal(refuse_strange, config=transformers.GPT2Config(n_positions=longest - 1), data=data)
        assert f"samples are {longest} tokens long, but the model of type 'gpt2' has positions for {longest - 1}" in said
